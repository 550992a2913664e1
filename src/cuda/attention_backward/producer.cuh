// The producer warpgroup: takes what the block works on, and copies it for the others.
#pragma once

#include "core/visibility.h"
#include "cuda/attention_backward/config.cuh"
#include "cuda/packed_heads.h"
#include "cuda/ptx/tensor_copy.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/ring.cuh"

namespace dualkv::cuda::attention_backward {

template <class Element, int kHeadDim>
class Producer {
  using Memory = SharedMemory<Element, kHeadDim>;
  static constexpr int kRows = Memory::kRows;
  // Steps before the copying of an item ends at which the block takes its next: late, so that blocks take
  // items in the order in which they come to an end, and soon enough for it to be there then.
  static constexpr int kTakeAhead = 8;

 public:
  __device__ __forceinline__ Producer(const Params& params, Memory& memory)
      : params_(params), memory_(memory) {}

  // Two of its warps have work.
  __device__ __forceinline__ void Run() {
    const uint32_t warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    if (warp == 0) {
      CopySteps();
    } else if (warp == 1 && ptx::FreshLane() == 0) {
      CopyItems();
    }
  }

 private:
  // Takes items, and copies the keys and values of each. One thread calls.
  __device__ __forceinline__ void CopyItems() {
#pragma unroll 1
    for (uint32_t n = 0;; ++n) {
      if (n > 0) {
        ptx::MbarrierWait(&memory_.next_item_due, (n - 1) % 2);
      }
      Item& item = memory_.items[n % kItems];
      ptx::MbarrierWait(&memory_.items_empty[n % kItems], n / kItems % 2 ^ 1);
      TakeItem(item);
      ptx::MbarrierArrive(&memory_.items_full[n % kItems]);
      if (item.kv_head < 0) {
        return;
      }
      ptx::MbarrierWait(&memory_.keys_empty[0], n % 2 ^ 1);
      ptx::MbarrierArriveExpect(&memory_.keys_full[0], sizeof(memory_.keys) + sizeof(memory_.values));
#pragma unroll 1
      for (int box = 0; box < Memory::kBoxes; ++box) {
        ptx::TensorCopy3d(memory_.keys[box], &params_.keys, &memory_.keys_full[0], 64 * box, item.kv_head,
                          item.tile.begin);
        ptx::TensorCopy3d(memory_.values[box], &params_.values, &memory_.keys_full[0], 64 * box, item.kv_head,
                          item.tile.begin);
      }
    }
  }

  // The block's next item, from a counter that all blocks share.
  //
  // A wave is what blocks take of a band at the same time. Its items begin together if they come down from
  // the last rows, and end one after the other, each by a tile's rows earlier than the one before. So begin
  // the next ones; and that is when those that go up from their diagonals are at the same rows. So waves come
  // down and go up by turns.
  __device__ __forceinline__ void TakeItem(Item& item) {
    const int32_t index = atomicAdd(params_.next_item, 1);
    if (index >= params_.plan->num_key_tiles * params_.num_kv_heads) {
      item.kv_head = -1;
      return;
    }
    const int32_t abreast = params_.kv_heads_abreast;
    const TileAndHead<int32_t> of_index(index, params_.plan->num_key_tiles, abreast);
    item.kv_head = of_index.head;
    item.tile = core::PartOfImage<core::ImageKeyTile>(params_.plan, params_.plan->key_tiles)[of_index.tile];
    const auto* runs = core::PartOfImage<core::ImageQueryRun>(params_.plan, params_.plan->query_runs);
    int32_t steps = 0;
#pragma unroll 1
    for (int32_t r = item.tile.run_begin; r < item.tile.run_end; ++r) {
      steps += (runs[r].end - runs[r].begin + params_.rows_per_tile - 1) / params_.rows_per_tile;
    }
    item.steps = steps * params_.packs_per_kv_head;
    item.ascending = 0;
#pragma unroll 1
    for (int32_t wave_end = item.tile.band * abreast + gridDim.x; wave_end <= of_index.place;
         wave_end += gridDim.x) {
      item.ascending ^= 1;
    }
  }

  // What belongs to each step of each item. A warp calls.
  __device__ __forceinline__ void CopySteps() {
#pragma unroll 1
    for (uint32_t n = 0;; ++n) {
      ptx::MbarrierWait(&memory_.items_full[n % kItems], n / kItems % 2);
      const Item& item = memory_.items[n % kItems];
      if (item.kv_head < 0) {
        return;
      }
      if (ptx::FreshLane() == 0) {
        StartWalk(item);
      }
      __syncwarp();
#pragma unroll 1
      for (int32_t steps = item.steps;; --steps) {
        if (steps == min(item.steps, kTakeAhead) && ptx::FreshLane() == 0) {
          ptx::MbarrierArrive(&memory_.next_item_due);
        }
        if (steps == 0) {
          break;
        }
        CopyStep(item);
      }
      ptx::MbarrierArrive(&memory_.items_empty[n % kItems]);  // each lane, as each has read it
    }
  }

  // Before the first step of an item.
  __device__ __forceinline__ void StartWalk(const Item& item) {
    Walk& walk = memory_.walk;
    walk.run = {};
    walk.run_index = item.ascending ? item.tile.run_end - 1 : item.tile.run_begin;
    walk.row = 0;
    walk.pack = item.kv_head * params_.packs_per_kv_head - 1;
  }

  // To the item's next step.
  __device__ __forceinline__ void Advance(const Item& item) {
    Walk& walk = memory_.walk;
    const bool ascending = item.ascending;
    int32_t row = walk.row + (ascending ? params_.rows_per_tile : -params_.rows_per_tile);
    if (row < walk.run.begin || row >= walk.run.end) {
      int32_t index = walk.run_index + (ascending ? 1 : -1);
      if (index < item.tile.run_begin || index >= item.tile.run_end) {
        index = ascending ? item.tile.run_begin : item.tile.run_end - 1;
        ++walk.pack;
      }
      walk.run_index = index;
      const int4 run = __ldg(core::PartOfImage<int4>(params_.plan, params_.plan->query_runs) + index);
      walk.run = {.begin = run.x, .end = run.y, .masked = run.z, .turn = run.w};
      row = ascending ? run.x : run.x + (run.y - run.x - 1) / params_.rows_per_tile * params_.rows_per_tile;
    }
    walk.row = row;
  }

  __device__ __forceinline__ void CopyStep(const Item& item) {
    const Walk& walk = memory_.walk;
    ptx::MbarrierWait(&memory_.queries_empty[walk.stage], walk.stage_parity ^ 1);
    if (ptx::FreshLane() == 0) {
      Advance(item);
      const int32_t full_rows = params_.rows_per_tile * params_.packed;
      const int32_t rows = min((walk.run.end - walk.row) * params_.packed, full_rows);
      const bool masked = walk.run.masked || item.tile.end - item.tile.begin < kKeyTile;
      memory_.steps[walk.stage] = {
          .flags = (masked ? Step::kMasked : 0) | (rows < full_rows ? Step::kPartial : 0), .rows = rows};
      memory_.visits[walk.visit] = {
          .first_row = walk.pack * params_.row_pitch +
                       static_cast<int64_t>(walk.row - params_.query_row_begin) * params_.packed,
          .rows = rows,
          .turn = walk.run.turn};
    }
    __syncwarp();
    if (memory_.steps[walk.stage].flags & Step::kMasked) {
      CopyVisible(item);
    }
    CopyRows(memory_.visits[walk.visit]);
    __syncwarp();
    if (ptx::FreshLane() == 0) {
      CopyQueries();
      MoveOn();
    }
    __syncwarp();
  }

  // The keys that each row of a step sees.
  __device__ __forceinline__ void CopyVisible(const Item& item) {
#pragma unroll 1
    for (int32_t p = ptx::FreshLane(); p < kRows; p += 32) {
      const int32_t row = memory_.walk.row + p / params_.packed;
      KeyInterval keys = {0, 0};
      if (row < memory_.walk.run.end && p < params_.rows_per_tile * params_.packed) {
        const int32_t window_left = params_.plan->window_left;
        const int32_t position =
            window_left >= 0 ? __ldg(core::PartOfImage<int32_t>(params_.plan, params_.plan->positions) + row)
                             : 0;
        const core::Interval visible = core::VisibleKeys(row, position, item.tile.segment, window_left);
        const int32_t begin = max(visible.begin - item.tile.begin, 0);
        const int32_t end = min(visible.end, item.tile.end) - item.tile.begin;
        if (begin < end) {
          keys = {static_cast<uint8_t>(begin), static_cast<uint8_t>(end)};
        }
      }
      memory_.visible[memory_.walk.stage][p] = keys;
    }
  }

  // lse and delta of each row of a step, 0 for rows that are not its own.
  __device__ __forceinline__ void CopyRows(const Visit& visit) {
    const uint32_t stage = memory_.walk.stage;
#pragma unroll 1
    for (int32_t p = ptx::FreshLane(); p < kRows; p += 32) {
      const bool valid = p < visit.rows;
      const int64_t row = valid ? visit.first_row + p : 0;
      ptx::CopyWord(&memory_.lse[stage][p], params_.lse + row, valid);
      ptx::CopyWord(&memory_.delta[stage][p], params_.delta + row, valid);
    }
    ptx::ArriveAfterCopies(&memory_.queries_full[stage]);
  }

  // Queries and output gradients of a step. It comes last: its arrival is for all that the warp has written.
  __device__ __forceinline__ void CopyQueries() {
    const Walk& walk = memory_.walk;
    const uint32_t stage = walk.stage;
    const int32_t row = walk.row - params_.query_row_begin;
    ptx::Mbarrier* full = &memory_.queries_full[stage];
    ptx::MbarrierArriveExpect(full, 2 * params_.rows_per_tile * params_.packed * kHeadDim * sizeof(Element));
#pragma unroll 1
    for (int box = 0; box < Memory::kBoxes; ++box) {
      ptx::TensorCopy4d(memory_.queries[stage][box], &params_.queries, full, 64 * box, 0, walk.pack, row);
      ptx::TensorCopy4d(memory_.douts[stage][box], &params_.douts, full, 64 * box, 0, walk.pack, row);
    }
  }

  // To the next buffers.
  __device__ __forceinline__ void MoveOn() {
    Walk& walk = memory_.walk;
    walk.visit = (walk.visit + 1) % Memory::kVisits;
    if (++walk.stage == Memory::kStages) {
      walk.stage = 0;
      walk.stage_parity ^= 1;
    }
  }

  const Params& params_;
  Memory& memory_;
};

}  // namespace dualkv::cuda::attention_backward
