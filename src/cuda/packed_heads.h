// Which heads the kernels work on together: in a query tile, and in blocks side by side.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/visibility.h"

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

// An item of work, a tile and a head, if `abreast` heads are worked on side by side: the heads of a tile
// follow each other, and all tiles for these heads, before the next.
template <class Int>
struct TileAndHead {
  Int tile;
  Int head;
  Int place;  // of the item among those of the heads abreast

  DUALKV_HOST_DEVICE TileAndHead(Int item, Int num_tiles, Int abreast) {
    const Int first_head = item / (num_tiles * abreast) * abreast;
    place = item - num_tiles * first_head;
    tile = place / abreast;
    head = first_head + place % abreast;
  }
};

// The largest divisor of the number of heads up to `most`, and at least 1.
inline int32_t LargestDivisor(int32_t heads, int64_t most) {
  int32_t divisor = heads;
  while (divisor > 1 && (divisor > most || heads % divisor != 0)) {
    --divisor;
  }
  return divisor;
}

}  // namespace dualkv::cuda
