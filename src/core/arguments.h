// Checks of arrays of lengths and counts, as several operations take them.
#pragma once

#include <cstdint>
#include <span>

#include "core/error.h"
#include "core/forest.h"

namespace dualkv::core {

// The `count` values of an argument; NULL is accepted for none.
template <class T>
std::span<const T> Values(const T* values, int64_t count, const char* name) {
  Require(values != nullptr || count == 0, name, " must not be NULL for ", count, " values");
  return {values, static_cast<size_t>(count)};
}

// Adds counts or lengths to `total`, which must not exceed kMaxRows `units`. Returns their own sum.
inline int64_t AddUp(std::span<const int64_t> values, const char* name, const char* units, int64_t& total) {
  const int64_t before = total;
  for (size_t i = 0; i < values.size(); ++i) {
    Require(values[i] >= 0, name, "[", i, "] must be >= 0, got ", values[i]);
    Require(values[i] <= kMaxRows - total, "at most ", kMaxRows, " ", units, " are supported, got ", total,
            " + ", values[i], " at ", name, "[", i, "]");
    total += values[i];
  }
  return total - before;
}

}  // namespace dualkv::core
