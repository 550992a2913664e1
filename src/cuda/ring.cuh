// Rings of buffers in shared memory, which copies or warps fill and other warps empty.
#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/ptx/barrier.cuh"

namespace dualkv::cuda {

// Where a buffer of a ring is used for the n-th time, and the parity of its barriers' phase.
template <int kSize>
struct RingPosition {
  uint32_t index = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void Next() {
    if (++index == kSize) {
      index = 0;
      parity ^= 1;
    }
  }
};

// Lets the producer overwrite the buffer, as far as this warp is concerned. All its lanes call.
template <int kSize>
__device__ __forceinline__ void Release(ptx::Mbarrier (&empty)[kSize], RingPosition<kSize>& position,
                                        int32_t lane) {
  __syncwarp();
  if (lane == 0) {
    ptx::MbarrierArrive(&empty[position.index]);
  }
  position.Next();
}

// What a producer wrote beside a buffer, read by the lane that also lets the buffer go. So its order to the
// producer's next write is plain to see, for race checkers too, and for the compiler its value is the same
// for all threads: it would not let products run on across branches that threads may part at.
// Rows of lse and the like are read by all lanes; for these the order is that of Release's __syncwarp.
template <class T>
__device__ __forceinline__ T ForAllLanes(const T& shared, int32_t lane) {
  constexpr int kWords = sizeof(T) / sizeof(int32_t);
  int32_t words[kWords] = {};
  if (lane == 0) {
    memcpy(words, &shared, sizeof(T));
  }
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    words[i] = __shfl_sync(0xffffffff, words[i], 0);
  }
  T value;
  memcpy(&value, words, sizeof(T));
  return value;
}

}  // namespace dualkv::cuda
