// Scratch memory of one worker: cut from one aligned allocation, made before the workers start.
#pragma once

#include <cstddef>
#include <new>

#include "hwy/aligned_allocator.h"

namespace dualkv::cpu {

template <class T>
class Arena {
 public:
  explicit Arena(size_t capacity) : memory_(hwy::AllocateAligned<T>(capacity)), next_(memory_.get()) {
    if (!memory_) {
      throw std::bad_alloc();
    }
  }

  // `count` elements, aligned to a cache line.
  T* Take(size_t count) {
    T* taken = next_;
    next_ += Rounded(count);
    return taken;
  }

  // Elements of capacity that a Take(count) uses.
  static constexpr size_t Rounded(size_t count) {
    constexpr size_t kLine = 64 / sizeof(T);
    return (count + kLine - 1) / kLine * kLine;
  }

 private:
  hwy::AlignedFreeUniquePtr<T[]> memory_;
  T* next_;
};

}  // namespace dualkv::cpu
