// The reducer warpgroup: computes dQ of each step from the consumers' dscores, and adds it to that of the
// other blocks.
//
// Visits to a query tile and pack of heads take turns, if their order matters: the first stores what the
// others add to. Each warp waits for the turn, and counts it when what it has added is there for all to see.
// Both take a while. So a turn does not end behind its additions but behind the issue of the next step's
// first product, and then too the next turn's count is looked at for the first time.
#pragma once

#include "cuda/attention_backward/config.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/ring.cuh"

namespace dualkv::cuda::attention_backward {

template <class Element, int kHeadDim>
class Reducer {
  using Memory = SharedMemory<Element, kHeadDim>;
  // dQ of a step is computed in pieces of 64 rows and 64 columns.
  static constexpr int kPieces = Memory::kRows / 64 * Memory::kBoxes;
  static constexpr uint32_t kAtomBytes = 1024;

 public:
  __device__ __forceinline__ Reducer(const Params& params, Memory& memory)
      : params_(params), memory_(memory), zero_(ptx::UnknownAddress(&memory.zero)) {}

  __device__ __forceinline__ void Run() {
#pragma unroll 1
    for (uint32_t n = 0;; ++n) {
      ptx::MbarrierWait(&memory_.items_full[n % kItems], n / kItems % 2);
      const Item& item = memory_.items[n % kItems];
      if (ForAllLanes(item.kv_head, ptx::FreshLane()) < 0) {
        return;
      }
      // For an item without steps too: it must not let keys go that have not come.
      ptx::MbarrierWait(&memory_.keys_full[0], n % 2);
#pragma unroll 1
      for (int32_t steps = ForAllLanes(item.steps, ptx::FreshLane()); steps > 0; --steps) {
        AddQueryGradients();
      }
      RingPosition<1> keys;
      Release(memory_.keys_empty, keys, ptx::FreshLane());
      if (params_.turns != nullptr) {  // the next keys are on their way meanwhile
        EndTurn();
      }
      RingPosition<kItems> done = {n % kItems, 0};
      Release(memory_.items_empty, done, ptx::FreshLane());
    }
  }

 private:
  // Of the next step whose dscores are ready.
  __device__ __forceinline__ void AddQueryGradients() {
    RingPosition<kScoreBuffers> buffer = {step_ % kScoreBuffers, step_ / kScoreBuffers % 2};
    ptx::MbarrierWait(&memory_.dscores_full[buffer.index], buffer.parity);
    float* dq = nullptr;
    int32_t rows = 0;
    int32_t visits = 0;  // that the query tile has had, times kReducerWarps
    bool first = false;  // it has had none, and dq is not set yet
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      float sums[32];
      ptx::WgmmaFence();
      Multiply(sums, memory_.dscores[buffer.index][piece / Memory::kBoxes],
               memory_.keys[piece % Memory::kBoxes]);
      ptx::WgmmaCommit();
      const Visit& visit = memory_.visits[step_ % Memory::kVisits];
      if (piece == 0) {
        const uint32_t thread = threadIdx.x % 128, row = thread / 32 * 16 + thread % 32 / 4;
        dq = params_.dq + AccumulatedRow(visit.first_row, row, kHeadDim) + thread % 4 * 4;
        rows = visit.rows - row;
        if (params_.turns != nullptr) {
          visits = ptx::LoadRelaxed(params_.turns + visit.first_row);
          EndTurn();
          turn_begun_ = params_.turns + visit.first_row;
          first = visit.turn == 0;
        }
      }
      ptx::WgmmaWait<0>();
      ptx::Pin(sums);
      if (piece == 0 && params_.turns != nullptr) {
        // Not until it is equal: other warps of this block may have counted already.
        while (__any_sync(0xffffffff, visits < kReducerWarps * visit.turn)) {
          visits = ptx::LoadAcquire(turn_begun_);
        }
      }
      if (piece == kPieces - 1) {
        Release(memory_.dscores_empty, buffer, ptx::FreshLane());
      }
      constexpr int kRowPiece = 64 * kHeadDim, kColumnPiece = 4 * kBlockFloats;
      float* target = dq + piece / Memory::kBoxes * kRowPiece + piece % Memory::kBoxes * kColumnPiece;
      const int32_t left = rows - 64 * (piece / Memory::kBoxes);
      if (first) {
        Store(target, left, sums);
      } else {
        Add(target, left, sums);
      }
    }
    ++step_;
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

  // The rows at dq and 8 further on become the sums; `rows` are left from the first on. Few visits are first,
  // so this needs no pace.
  __device__ __forceinline__ void Store(float* dq, int32_t rows, const float (&sums)[32]) {
    ForQuads(dq, rows, sums, [](float* target, float4 quad, int) { ptx::StoreRelaxed(target, quad); });
  }

  // The same, but the sums are added to the rows.
  //
  // Two additions at a time: more would fill the queue that the consumers' loads and stores go through as
  // well. A word that is read behind two of them comes when they have left it, and the next address needs it.
  __device__ __forceinline__ void Add(float* dq, int32_t rows, const float (&sums)[32]) {
    int32_t zero = 0;
    ForQuads(dq, rows, sums, [&](float* target, float4 quad, int index) {
      if (index % 2 == 0 && index > 0) {
        zero = ptx::LoadInOrder(zero_);
      }
      ptx::ReduceAdd(target + zero, quad);
    });
  }

  // Calls write(target, sums, index) for each four sums that go to neighbouring floats.
  template <class Write>
  __device__ __forceinline__ void ForQuads(float* dq, int32_t rows, const float (&sums)[32], Write write) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (8 * i < rows) {
#pragma unroll
        for (int block = 0; block < 4; ++block) {
          const float* low = sums + 8 * block + 2 * i;
          write(dq + 8 * i * kHeadDim + kBlockFloats * block, float4{low[0], low[1], low[4], low[5]},
                4 * i + block);
        }
      }
    }
  }

  // Ends the turn that began last, if it has not ended. The fence orders what the warp's lanes have added
  // before the count; and after the count that was looked at, what will be added.
  __device__ __forceinline__ void EndTurn() {
    __syncwarp();
    ptx::FenceGpu();
    ptx::CountOne(turn_begun_ != nullptr && ptx::FreshLane() == 0, turn_begun_);
    turn_begun_ = nullptr;
  }

  const Params& params_;
  Memory& memory_;
  const int32_t* const zero_;
  uint32_t step_ = 0;
  int32_t* turn_begun_ = nullptr;  // the counter of the turn that has not ended yet
};

}  // namespace dualkv::cuda::attention_backward
