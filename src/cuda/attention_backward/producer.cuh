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

  // Each warp has a task of its own, and all but the last are one thread's. They keep pace with the consumers
  // only if none has much to do for a step.
  __device__ __forceinline__ void Run() {
    const uint32_t warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    if (warp == 3) {
      CopyRows();
    } else if (ptx::FreshLane() == 0) {
      if (warp == 0) {
        WalkPlan();
      } else if (warp == 1) {
        CopyItems();
      } else {
        CopyQueries();
      }
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
  // down and go up by turns. The last of several goes up in any case: the next bands' turns are for the first
  // rows first.
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
    const int32_t band_begin = item.tile.band_begin * abreast, band_end = item.tile.band_end * abreast;
    const int32_t blocks = gridDim.x;
    const int32_t wave = (of_index.place - band_begin) / blocks;
    const int32_t last_wave = (band_end - 1 - band_begin) / blocks;
    item.ascending = wave % 2 == 1 || (wave > 0 && wave == last_wave);
  }

  // Calls `work` for each item, in order, until there are no more.
  template <class Work>
  __device__ __forceinline__ void ForItems(Work work) {
#pragma unroll 1
    for (uint32_t n = 0;; ++n) {
      ptx::MbarrierWait(&memory_.items_full[n % kItems], n / kItems % 2);
      const Item& item = memory_.items[n % kItems];
      if (item.kv_head < 0) {
        return;
      }
      work(item);
      ptx::MbarrierArrive(&memory_.items_empty[n % kItems]);
    }
  }

  // Where the walk over an item's query runs is.
  struct Place {
    core::ImageQueryRun run;
    int32_t run_index;
    int32_t row;   // the first of the query tile
    int32_t pack;  // of heads
  };

  // Notes down the steps of each item. One thread calls.
  __device__ __forceinline__ void WalkPlan() {
    RingPosition<Memory::kStages> stage;
    uint32_t visit = 0;
    ForItems([&](const Item& item) {
      Place place = {.run = {},  // so that the first step takes one
                     .run_index = item.ascending ? item.tile.run_end - 1 : item.tile.run_begin,
                     .row = 0,
                     .pack = item.kv_head * params_.packs_per_kv_head - 1};
#pragma unroll 1
      for (int32_t steps = item.steps; steps > 0; --steps) {
        Advance(item, place);
        ptx::MbarrierWait(&memory_.queries_empty[stage.index], stage.parity ^ 1);
        NoteDown(item, place, memory_.steps[stage.index], memory_.visits[visit % Memory::kVisits]);
        ptx::MbarrierArrive(&memory_.steps_full[stage.index]);
        stage.Next();
        ++visit;
      }
    });
  }

  // To the item's next step.
  __device__ __forceinline__ void Advance(const Item& item, Place& place) {
    const bool ascending = item.ascending;
    place.row += ascending ? params_.rows_per_tile : -params_.rows_per_tile;
    if (place.row >= place.run.begin && place.row < place.run.end) {
      return;
    }
    place.run_index += ascending ? 1 : -1;
    if (place.run_index < item.tile.run_begin || place.run_index >= item.tile.run_end) {
      place.run_index = ascending ? item.tile.run_begin : item.tile.run_end - 1;
      ++place.pack;
    }
    const int4 run = __ldg(core::PartOfImage<int4>(params_.plan, params_.plan->query_runs) + place.run_index);
    place.run = {.begin = run.x, .end = run.y, .masked = run.z, .turn = run.w};
    place.row =
        ascending ? run.x : run.x + (run.y - run.x - 1) / params_.rows_per_tile * params_.rows_per_tile;
  }

  __device__ __forceinline__ void NoteDown(const Item& item, const Place& place, Step& step, Visit& visit) {
    const int32_t full_rows = params_.rows_per_tile * params_.packed;
    const int32_t rows = min((place.run.end - place.row) * params_.packed, full_rows);
    const bool masked = place.run.masked || item.tile.end - item.tile.begin < kKeyTile;
    step = {.row = place.row,
            .pack = place.pack,
            .rows = rows,
            .flags = (masked ? Step::kMasked : 0) | (rows < full_rows ? Step::kPartial : 0)};
    visit = {.first_row = place.pack * params_.row_pitch +
                          static_cast<int64_t>(place.row - params_.query_row_begin) * params_.packed,
             .rows = rows,
             .turn = place.run.turn};
  }

  // Copies queries and output gradients of each step. One thread calls.
  __device__ __forceinline__ void CopyQueries() {
    RingPosition<Memory::kStages> stage;
    ForItems([&](const Item& item) {
#pragma unroll 1
      for (int32_t steps = item.steps;; --steps) {
        if (steps == min(item.steps, kTakeAhead)) {
          ptx::MbarrierArrive(&memory_.next_item_due);
        }
        if (steps == 0) {
          break;
        }
        ptx::MbarrierWait(&memory_.steps_full[stage.index], stage.parity);
        const Step& step = memory_.steps[stage.index];
        const int32_t pack = step.pack, row = step.row - params_.query_row_begin;
        ptx::Mbarrier* full = &memory_.queries_full[stage.index];
        ptx::MbarrierArriveExpect(full,
                                  2 * params_.rows_per_tile * params_.packed * kHeadDim * sizeof(Element));
#pragma unroll
        for (int box = 0; box < Memory::kBoxes; ++box) {
          ptx::TensorCopy4d(memory_.queries[stage.index][box], &params_.queries, full, 64 * box, 0, pack,
                            row);
          ptx::TensorCopy4d(memory_.douts[stage.index][box], &params_.douts, full, 64 * box, 0, pack, row);
        }
        stage.Next();
      }
    });
  }

  // Copies what there is for each row of each step. A warp calls.
  __device__ __forceinline__ void CopyRows() {
    RingPosition<Memory::kStages> stage;
    uint32_t visit = 0;
    ForItems([&](const Item& item) {
#pragma unroll 1
      for (int32_t steps = item.steps; steps > 0; --steps) {
        ptx::MbarrierWait(&memory_.steps_full[stage.index], stage.parity);
        // The walk has waited for this already. Now the order of the consumers' reads and what is written
        // next is plain to see, for race checkers too.
        ptx::MbarrierWait(&memory_.queries_empty[stage.index], stage.parity ^ 1);
        const Step& step = memory_.steps[stage.index];
        const int64_t first_row = memory_.visits[visit % Memory::kVisits].first_row;
#pragma unroll 1
        for (int32_t p = ptx::FreshLane(); p < kRows; p += 32) {
          const bool valid = p < step.rows;
          const int64_t row = valid ? first_row + p : 0;
          ptx::CopyWord(&memory_.lse_log2[stage.index][p], params_.lse_log2 + row, valid);
          ptx::CopyWord(&memory_.delta[stage.index][p], params_.delta + row, valid);
        }
        if (step.flags & Step::kMasked) {
          NoteVisible(item, step, memory_.visible[stage.index]);
        }
        ptx::ArriveAfterCopies(&memory_.queries_full[stage.index]);
        __syncwarp();
        if (ptx::FreshLane() == 0) {
          ptx::MbarrierArrive(&memory_.queries_full[stage.index]);
        }
        stage.Next();
        ++visit;
      }
    });
  }

  // The keys of the tile that each row of a step sees; none, if the row is not the step's.
  __device__ __forceinline__ void NoteVisible(const Item& item, const Step& step,
                                              KeyInterval (&visible)[kRows]) {
#pragma unroll 1
    for (int32_t p = ptx::FreshLane(); p < kRows; p += 32) {
      KeyInterval keys = {0, 0};
      if (p < step.rows) {
        const int32_t row = step.row + p / params_.packed;
        const int32_t window_left = params_.plan->window_left;
        const int32_t position =
            window_left >= 0 ? __ldg(core::PartOfImage<int32_t>(params_.plan, params_.plan->positions) + row)
                             : 0;
        const core::Interval seen = core::VisibleKeys(row, position, item.tile.segment, window_left);
        const int32_t begin = max(seen.begin - item.tile.begin, 0);
        const int32_t end = min(seen.end, item.tile.end) - item.tile.begin;
        if (begin < end) {
          keys = {static_cast<uint8_t>(begin), static_cast<uint8_t>(end)};
        }
      }
      visible[p] = keys;
    }
  }

  const Params& params_;
  Memory& memory_;
};

}  // namespace dualkv::cuda::attention_backward
