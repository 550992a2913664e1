// Which heads the kernels work on together: in a query tile, and in blocks side by side.
#pragma once

#include <algorithm>
#include <cstdint>

namespace dualkv::cuda {

// How many of the `group` query heads of a KV head share a tile of `products` rows of the products: the more,
// the fewer query rows it has, and the less it computes for rows that do not see a key. At most one row of
// the products in 16 stays empty.
inline int32_t PackedHeads(int32_t group, int32_t products) {
  constexpr int32_t kMost = 16;
  int32_t packed = std::min(group, kMost);
  while (group % packed != 0 || products % packed > products / 16) {
    --packed;
  }
  return packed;
}

// The largest divisor of the number of heads up to `most`, and at least 1.
inline int32_t LargestDivisor(int32_t heads, int64_t most) {
  int32_t divisor = heads;
  while (divisor > 1 && (divisor > most || heads % divisor != 0)) {
    --divisor;
  }
  return divisor;
}

}  // namespace dualkv::cuda
