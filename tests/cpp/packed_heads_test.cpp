// Which items of work the kernels make of tiles and heads.
#include "cuda/packed_heads.h"

#include <gtest/gtest.h>

#include <set>
#include <utility>

namespace dualkv::cuda {
namespace {

TEST(PackedHeads, EachTileAndHeadIsOneItem) {
  for (const int32_t heads : {1, 6, 7, 8}) {
    for (const int32_t tiles : {1, 2, 5}) {
      for (int32_t most = 0; most <= heads; ++most) {
        const int32_t abreast = LargestDivisor(heads, most);
        ASSERT_EQ(heads % abreast, 0);
        ASSERT_LE(abreast, std::max(most, 1));
        std::set<std::pair<int32_t, int32_t>> items;
        for (int32_t item = 0; item < tiles * heads; ++item) {
          const TileAndHead<int32_t> found(item, tiles, abreast);
          ASSERT_TRUE(0 <= found.tile && found.tile < tiles && 0 <= found.head && found.head < heads);
          ASSERT_TRUE(items.emplace(found.tile, found.head).second);
          EXPECT_EQ(found.head / abreast, item / (tiles * abreast)) << "some heads, then the next";
          EXPECT_EQ(found.place, found.tile * abreast + found.head % abreast);
        }
      }
    }
  }
}

}  // namespace
}  // namespace dualkv::cuda
