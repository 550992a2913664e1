// The producers: two threads walk the plan, one ahead of the other, and keep the rings of queries and keys,
// and of values, full.
#pragma once

#include <type_traits>

#include "cuda/attention_forward/config.cuh"
#include "cuda/cleared_rows.cuh"
#include "cuda/packed_heads.h"
#include "cuda/ptx/tensor_copy.cuh"
#include "cuda/ring.cuh"
#include "cuda/tensor.cuh"

namespace dualkv::cuda::attention_forward {

// Calls visit_tile(tile, pack) for each query tile and pack of heads of this block, and then visit_step(run,
// key, pack, first) for each of its key tiles: the one at `key`, the first or not.
template <int kKeyTile, class VisitTile, class VisitStep>
__device__ __forceinline__ void WalkPlan(const Params& params, VisitTile visit_tile, VisitStep visit_step) {
  const auto* tiles = core::PartOfImage<int4>(params.plan, params.plan->tiles);
  const auto* runs = core::PartOfImage<core::ImageRun>(params.plan, params.plan->runs);
  // Tiles come heaviest first. Blocks take them to and fro, so that each gets as much. Some packs are worked
  // on side by side, so that the L2 holds their keys and values; then come the next.
  const uint32_t packs = params.num_heads / params.packed, abreast = params.packs_abreast;
  const uint32_t num_tiles = params.plan->num_tiles, items = num_tiles * packs;
  bool forth = true;
  for (uint32_t first = 0; first < items; first += gridDim.x, forth = !forth) {
    const uint32_t item = first + (forth ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
    if (item >= items) {
      continue;
    }
    const TileAndHead<uint32_t> place(item, num_tiles, abreast);
    const int4 entry = __ldg(tiles + place.tile);
    const dualkv_tile tile = {entry.x, entry.y, entry.z, entry.w};
    const uint32_t pack = place.head;
    visit_tile(tile, pack);
    bool first_step = true;
#pragma unroll 1
    for (int32_t r = tile.run_begin; r < tile.run_end; ++r) {
#pragma unroll 1
      for (int32_t key = runs[r].begin; key < runs[r].end; key += kKeyTile) {
        visit_step(runs[r], key, pack, first_step);
        first_step = false;
      }
    }
  }
}

// Copies the rows of a key tile, of keys or values, into a buffer.
template <class Boxes>
__device__ __forceinline__ void CopyKeyTile(const Params& params, const CUtensorMap& map, Boxes& buffer,
                                            ptx::Mbarrier* full, int32_t pack, int32_t key) {
  ptx::MbarrierArriveExpect(full, sizeof(buffer));
#pragma unroll 1
  for (int box = 0; box < static_cast<int>(std::extent_v<Boxes>); ++box) {
    ptx::TensorCopy3d(buffer[box], &map, full, 64 * box, pack / params.packs_per_kv_head, key);
  }
}

template <class Element, int kHeadDim>
__device__ __forceinline__ void ProduceKeys(const Params& params, SharedMemory<Element, kHeadDim>& memory) {
  constexpr int kKeyTile = Config<kHeadDim>::kKeyTile;
  RingPosition<kQueryBuffers> queries;
  RingPosition<kStages> keys;
  WalkPlan<kKeyTile>(
      params,
      [&](const dualkv_tile& tile, int32_t pack) {
        ptx::Mbarrier* full = &memory.queries_full[queries.index];
        ptx::MbarrierWait(&memory.queries_empty[queries.index], queries.parity ^ 1);
        memory.query_tiles[queries.index] = {tile.begin, tile.end, pack * params.packed};
        ptx::MbarrierArriveExpect(full, params.rows_per_tile * params.packed * kHeadDim * sizeof(Element));
#pragma unroll 1
        for (int box = 0; box < kHeadDim / 64; ++box) {
          ptx::TensorCopy4d(memory.queries[queries.index][box], &params.queries, full, 64 * box, 0, pack,
                            tile.begin - params.query_row_begin);
        }
        queries.Next();
      },
      [&](const core::ImageRun& run, int32_t key, int32_t pack, bool first) {
        ptx::Mbarrier* full = &memory.keys_full[keys.index];
        ptx::MbarrierWait(&memory.keys_empty[keys.index], keys.parity ^ 1);
        Step& step = memory.steps[keys.index];
        step.head.flags = (first ? StepHead::kFirst : 0) |
                          (run.masked || key + kKeyTile > run.end ? StepHead::kMasked : 0) |
                          (key + kKeyTile > params.plan->total_tokens ? StepHead::kPastEnd : 0);
        step.head.key_begin = key;
        step.segment = run.segment;
        CopyKeyTile(params, params.keys, memory.keys[keys.index], full, pack, key);
        keys.Next();
      });
  ptx::MbarrierWait(&memory.keys_empty[keys.index], keys.parity ^ 1);
  memory.steps[keys.index].head.flags = StepHead::kEnd;
  ptx::MbarrierArrive(&memory.keys_full[keys.index]);
}

template <class Element, int kHeadDim>
__device__ __forceinline__ void ProduceValues(const Params& params, SharedMemory<Element, kHeadDim>& memory) {
  RingPosition<kStages> values;
  WalkPlan<Config<kHeadDim>::kKeyTile>(
      params, [](const dualkv_tile&, int32_t) {},
      [&](const core::ImageRun&, int32_t key, int32_t pack, bool) {
        ptx::Mbarrier* full = &memory.values_full[values.index];
        ptx::MbarrierWait(&memory.values_empty[values.index], values.parity ^ 1);
        CopyKeyTile(params, params.values, memory.values[values.index], full, pack, key);
        values.Next();
      });
}

// Rows that are no queries, of keys-only segments and past the forest: out = 0, lse = -inf. Warp `warp` of
// `warps` of the grid takes its share.
template <class Element>
__device__ __forceinline__ void ClearRows(const Params& params, int32_t warp, int32_t warps) {
  const int32_t lane = threadIdx.x % 32;
  ForClearedRows(params.plan, params.query_row_begin, params.query_rows, [&](int32_t begin, int32_t end) {
#pragma unroll 1
    for (int64_t row = int64_t{begin} + warp; row < end; row += warps) {
#pragma unroll 1
      for (int32_t head = 0; head < params.num_heads; ++head) {
        if (lane < params.head_dim / 8) {
          reinterpret_cast<int4*>(RowOf<Element>(params.out, row, head))[lane] = int4{0, 0, 0, 0};
        }
        if (params.lse != nullptr && lane == 0) {
          params.lse[static_cast<int64_t>(head) * params.query_rows + row] = -INFINITY;
        }
      }
    }
  });
}

}  // namespace dualkv::cuda::attention_forward
