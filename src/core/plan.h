// The plan: a forest turned once into tile schedules that every layer's forward and backward follow.
//
// Query rows and keys are cut into tiles. Which tiles see each other is a block-sparse matrix: the forward
// reads it by query tiles, the backward by key tiles. Neighbouring tiles of one kind (masked or not) are
// stored as one run.
//
// The backward needs more on a machine with more processors than key tiles: heavy key tiles are cut into
// parts. And it needs an order in which to add to dQ: each run says whose turn it is.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/forest.h"
#include "core/visibility.h"
#include "dualkv/dualkv.h"

namespace dualkv::core {

struct TileSizes {
  int32_t query;
  int32_t key;

  bool operator==(const TileSizes&) const = default;
};

// Tiles of the CPU backend: a query tile of 64 rows is four AVX-512 registers of floats; a key tile's scores
// and probabilities (2 x 128 x 64 floats) stay in a 1 MB second-level cache beside K and V of head dim 128.
inline constexpr TileSizes kCpuTiles = {.query = 64, .key = 128};

// See dualkv_schedule.
struct Schedule {
  TileSizes tile_sizes;
  std::vector<dualkv_tile> tiles;
  std::vector<dualkv_run> runs;

  dualkv_schedule View() const;
};

// See dualkv_plan_view. Immutable.
struct Plan {
  // keys_only is empty or has a flag for each segment. window_left < 0: no window. backward_parts >= 0: see
  // dualkv_plan_params.
  Plan(const Forest& forest, int64_t window_left, std::span<const uint8_t> keys_only, TileSizes forward_tiles,
       TileSizes backward_tiles, int32_t backward_parts);

  dualkv_plan_view View() const;

  Forest forest;
  int64_t window_left;
  std::vector<uint8_t> keys_only;  // a flag for each segment
  std::vector<int32_t> positions;  // of every row; empty without a window
  std::vector<Interval> cleared;   // rows that are no queries
  Schedule forward;
  Schedule backward;
  int64_t num_query_tiles;  // of the backward
  std::vector<int32_t> first_query_tile;
  std::vector<int32_t> turn;
  int32_t backward_parts;
  int64_t num_partials = 0;
  int64_t num_split_tiles = 0;  // key tiles that were cut
  std::vector<int32_t> partial;
  std::vector<int32_t> band;
  int32_t longest_band = 0;  // in tiles
};

// The most parts that key tiles are cut into, see CutIntoParts in plan.cpp.
inline int64_t MostPartials(int32_t backward_parts) { return 4 * int64_t{backward_parts}; }

}  // namespace dualkv::core
