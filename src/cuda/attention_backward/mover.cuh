// The mover warpgroup: copies what the consumers work on, and adds dQ of each step, which it computes from
// their dscores, to that of the other blocks.
#pragma once

#include "core/visibility.h"
#include "cuda/attention_backward/config.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/tensor_copy.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/ring.cuh"

namespace dualkv::cuda::attention_backward {

template <class Element, int kHeadDim>
class Mover {
  using Memory = SharedMemory<Element, kHeadDim>;
  static constexpr int kRows = Memory::kRows;
  // dQ of a step is computed in pieces of 64 rows and 64 columns.
  static constexpr int kPieces = kRows / 64 * Memory::kBoxes;
  static constexpr uint32_t kAtomBytes = 1024;
  // Steps whose copies are under way while one is computed; the last buffer is in use until then.
  static constexpr int kAhead = Memory::kStages - 1;
  // Steps before an item's end at which the block takes its next: late, so that blocks take items in the
  // order in which they come to an end, and soon enough for it to be there then.
  static constexpr int kTakeAhead = 8;
  // What its warps do besides.
  enum Warp { kStepWarp = 0, kItemWarp = 1 };

 public:
  __device__ __forceinline__ Mover(const Params& params, Memory& memory) : params_(params), memory_(memory) {}

  __device__ __forceinline__ void Run() {
    RingPosition<kItems> items;
    TakeItem(items);
    while (true) {
      ptx::MbarrierWait(&memory_.items_full[items.index], items.parity);
      const Item& item = memory_.items[items.index];
      if (ForAllLanes(item.kv_head, ptx::FreshLane()) < 0) {
        return;
      }
      CopyKeys(item);
      StartWalk(item);
      int32_t steps = ForAllLanes(item.steps, ptx::FreshLane());
#pragma unroll 1
      for (int32_t step = 0; step < min(steps, kAhead); ++step) {
        CopyStep(item);
      }
#pragma unroll 1
      for (;; --steps) {
        if (steps == min(item.steps, kTakeAhead)) {
          RingPosition<kItems> next = items;
          next.Next();
          TakeItem(next);
          __syncwarp();
        }
        if (steps == 0) {
          break;
        }
        if (steps > kAhead) {
          CopyStep(item);
        }
        AddQueryGradients();
      }
      if (params_.turns != nullptr) {
        EndTurn();
      }
      RingPosition<1> keys;
      Release(memory_.keys_empty, keys, ptx::FreshLane());
      Release(memory_.items_empty, items, ptx::FreshLane());
    }
  }

 private:
  static __device__ __forceinline__ uint32_t Warp() { return __shfl_sync(0xffffffff, threadIdx.x / 32, 0); }

  // Takes the next of the items, from a counter that all blocks share.
  //
  // A wave is what blocks take of a band at the same time. Its items begin together if they come down from
  // the last rows, and end one after the other, each by a tile's rows earlier than the one before. So begin
  // the next ones; and that is when those that go up from their diagonals are at the same rows. So waves come
  // down and go up by turns.
  __device__ __forceinline__ void TakeItem(RingPosition<kItems> next) {
    if (threadIdx.x != 32 * kItemWarp) {
      return;
    }
    const int32_t index = atomicAdd(params_.next_item, 1);
    const bool exists = index < params_.plan->num_key_tiles * params_.num_kv_heads;
    ptx::MbarrierWait(&memory_.items_empty[next.index], next.parity ^ 1);
    Item& item = memory_.items[next.index];
    item.kv_head = exists ? index % params_.num_kv_heads : -1;
    if (exists) {
      item.tile = core::PartOfImage<core::ImageKeyTile>(
          params_.plan, params_.plan->key_tiles)[index / params_.num_kv_heads];
      const auto* runs = core::PartOfImage<core::ImageQueryRun>(params_.plan, params_.plan->query_runs);
      int32_t steps = 0;
#pragma unroll 1
      for (int32_t r = item.tile.run_begin; r < item.tile.run_end; ++r) {
        steps += (runs[r].end - runs[r].begin + params_.rows_per_tile - 1) / params_.rows_per_tile;
      }
      item.steps = steps * params_.packs_per_kv_head;
      item.ascending = 0;
      for (int32_t wave_end = item.tile.band * params_.num_kv_heads + gridDim.x; wave_end <= index;
           wave_end += gridDim.x) {
        item.ascending ^= 1;
      }
    }
    ptx::MbarrierArrive(&memory_.items_full[next.index]);
  }

  __device__ __forceinline__ void CopyKeys(const Item& item) {
    if (threadIdx.x == 32 * kItemWarp) {
      ptx::MbarrierWait(&memory_.keys_empty[0], memory_.keys_parity ^ 1);
      memory_.keys_parity ^= 1;
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

  // Before the first step of an item.
  __device__ __forceinline__ void StartWalk(const Item& item) {
    if (threadIdx.x == 32 * kStepWarp) {
      Walk& walk = memory_.walk;
      walk.run = {};
      walk.run_index = item.ascending ? item.tile.run_end - 1 : item.tile.run_begin;
      walk.row = 0;
      walk.head_begin = (item.kv_head * params_.packs_per_kv_head - 1) * params_.packed;
    }
    __syncwarp();
  }

  // Has what belongs to the item's next step copied.
  __device__ __forceinline__ void CopyStep(const Item& item) {
    if (Warp() != kStepWarp) {
      return;
    }
    Walk walk = memory_.walk;
    const bool ascending = item.ascending;
    walk.row += ascending ? params_.rows_per_tile : -params_.rows_per_tile;
    if (walk.row < walk.run.begin || walk.row >= walk.run.end) {
      walk.run_index += ascending ? 1 : -1;
      if (walk.run_index < item.tile.run_begin || walk.run_index >= item.tile.run_end) {
        walk.run_index = ascending ? item.tile.run_begin : item.tile.run_end - 1;
        walk.head_begin += params_.packed;
      }
      const int4 run =
          __ldg(core::PartOfImage<int4>(params_.plan, params_.plan->query_runs) + walk.run_index);
      walk.run = {.begin = run.x, .end = run.y, .masked = run.z, .turn = run.w};
      walk.row =
          ascending ? run.x : run.x + (run.y - run.x - 1) / params_.rows_per_tile * params_.rows_per_tile;
    }
    const bool masked = walk.run.masked || item.tile.end - item.tile.begin < kKeyTile;
    const int32_t row_end = min(walk.row + params_.rows_per_tile, walk.run.end);
    const int32_t rows = (row_end - walk.row) * params_.packed;
    const int32_t pack = walk.head_begin / params_.packed, row = walk.row - params_.query_row_begin;
    const int64_t first_row = pack * params_.row_pitch + static_cast<int64_t>(row) * params_.packed;
    const uint32_t stage = walk.stage;
    ptx::Mbarrier* full = &memory_.queries_full[stage];
    ptx::MbarrierWait(&memory_.queries_empty[stage], walk.stage_parity ^ 1);
    if (masked) {
      CopyVisible(item, walk, row_end);
    }
#pragma unroll
    for (int i = 0; i < kRows; i += 32) {
      const int32_t p = i + ptx::FreshLane();
      const bool valid = p < rows;
      ptx::CopyWord(&memory_.lse[stage][p], params_.lse + first_row + (valid ? p : 0), valid);
      ptx::CopyWord(&memory_.delta[stage][p], params_.delta + first_row + (valid ? p : 0), valid);
    }
    ptx::ArriveAfterCopies(full);
    __syncwarp();
    if (threadIdx.x == 32 * kStepWarp) {
      memory_.steps[stage] = {.flags = (masked ? Step::kMasked : 0) |
                                       (rows < params_.rows_per_tile * params_.packed ? Step::kPartial : 0),
                              .rows = rows};
      memory_.visits[walk.visit] = {.first_row = first_row, .rows = rows, .turn = walk.run.turn};
      ptx::MbarrierArriveExpect(full,
                                2 * params_.rows_per_tile * params_.packed * kHeadDim * sizeof(Element));
#pragma unroll 1
      for (int box = 0; box < Memory::kBoxes; ++box) {
        ptx::TensorCopy4d(memory_.queries[stage][box], &params_.queries, full, 64 * box, 0, pack, row);
        ptx::TensorCopy4d(memory_.douts[stage][box], &params_.douts, full, 64 * box, 0, pack, row);
      }
      if (++walk.stage == Memory::kStages) {
        walk.stage = 0;
        walk.stage_parity ^= 1;
      }
      if (++walk.visit == Memory::kVisits) {
        walk.visit = 0;
      }
      memory_.walk = walk;
    }
    __syncwarp();
  }

  // The keys that each row of a step sees.
  __device__ __forceinline__ void CopyVisible(const Item& item, const Walk& walk, int32_t row_end) {
#pragma unroll 1
    for (int32_t p = ptx::FreshLane(); p < kRows; p += 32) {
      const int32_t row = walk.row + p / params_.packed;
      KeyInterval keys = {0, 0};
      if (row < row_end) {
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
      memory_.visible[walk.stage][p] = keys;
    }
  }

  // Of the next step whose dscores are ready.
  __device__ __forceinline__ void AddQueryGradients() {
    ptx::MbarrierWait(&memory_.dscores_full[dscores_.index], dscores_.parity);
    const Visit visit = memory_.visits[visit_];
    const int32_t row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    float* dq = params_.dq + AccumulatedRow(visit.first_row + row, kHeadDim) + 4 * (threadIdx.x % 4);
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      constexpr int kRowPiece = 64 * kHeadDim, kColumnPiece = 4 * kBlockFloats;
      float sums[32];
      ptx::WgmmaFence();
      Multiply(sums, memory_.dscores[dscores_.index][piece / Memory::kBoxes],
               memory_.keys[piece % Memory::kBoxes]);
      ptx::WgmmaCommit();
      ptx::WgmmaWait<0>();
      ptx::Pin(sums);
      if (piece == 0 && params_.turns != nullptr) {
        EndTurn();
        WaitTurn(visit);
      }
      if (piece == kPieces - 1) {
        Release(memory_.dscores_empty, dscores_, ptx::FreshLane());
      }
      Add(dq + piece / Memory::kBoxes * kRowPiece + piece % Memory::kBoxes * kColumnPiece,
          visit.rows - row - 64 * (piece / Memory::kBoxes), sums);
    }
    visit_ = visit_ == Memory::kVisits - 1 ? 0 : visit_ + 1;
  }

  // sums [64 rows, 64 columns] = dscores [keys, 64 rows] transposed times keys [keys, 64 columns]
  template <class Rows, class Keys>
  __device__ __forceinline__ void Multiply(float (&sums)[32], const Rows& rows, const Keys& keys) {
    const uint64_t a = ptx::SharedOperand(rows, kAtomBytes);
    const uint64_t b = ptx::SharedOperand(keys, kAtomBytes);
#pragma unroll
    for (int k = 0; k < kKeyTile / 16; ++k) {
      ptx::Wgmma<Element, 64>::SharedTransposed(sums, ptx::Advance(a, 2 * k * kAtomBytes),
                                                ptx::Advance(b, 2 * k * kAtomBytes), k > 0);
    }
  }

  // To the rows at dq and 8 further on; `rows` are left from the first on.
  __device__ __forceinline__ void Add(float* dq, int32_t rows, const float (&sums)[32]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (8 * i < rows) {
#pragma unroll
        for (int block = 0; block < 4; ++block) {
          const float* low = sums + 8 * block + 2 * i;
          ptx::ReduceAdd(dq + 8 * i * kHeadDim + kBlockFloats * block, low[0], low[1], low[4], low[5]);
        }
      }
    }
  }

  // Visits to a query tile and pack of heads take turns, if their order matters. A turn ends when what has
  // been added is there for all to see; that takes a while, and meanwhile the next step is computed.
  __device__ __forceinline__ void WaitTurn(const Visit& visit) {
    if (threadIdx.x == 0) {
      int32_t* turns = params_.turns + visit.first_row;
      while (ptx::LoadAcquire(turns) != visit.turn) {
      }
      memory_.turns_begun = turns;
    }
    ptx::NamedBarrierSync(kMoverBarrier, 128);
  }
  // Of the turn that was waited for last, if it has not ended. The release orders what all threads have
  // added.
  __device__ __forceinline__ void EndTurn() {
    ptx::NamedBarrierSync(kMoverBarrier, 128);
    if (threadIdx.x == 0 && memory_.turns_begun != nullptr) {
      ptx::AddRelease(memory_.turns_begun, 1);
      memory_.turns_begun = nullptr;
    }
  }

  static constexpr uint32_t kMoverBarrier = 2;

  const Params& params_;
  Memory& memory_;
  RingPosition<kScoreBuffers> dscores_;
  uint32_t visit_ = 0;
};

}  // namespace dualkv::cuda::attention_backward
