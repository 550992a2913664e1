// A consumer warpgroup: 64 rows of each query tile.
//
// Its steps overlap: the tensor cores compute the scores of step n + 1 and the values' product of step n
// together, and they go on with that product, and with the steps of the other warpgroups, while the softmax
// of n + 1 runs. Query tiles follow each other without a gap: the first step of a tile is the step after the
// last of the tile before.
#pragma once

#include <type_traits>

#include "core/visibility.h"
#include "cuda/accumulators.cuh"
#include "cuda/attention_forward/config.cuh"
#include "cuda/attention_forward/softmax.cuh"
#include "cuda/ptx/tensor_copy.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/ring.cuh"
#include "cuda/tensor.cuh"

namespace dualkv::cuda::attention_forward {

// kSoftcap: whether scores are softcapped.
template <class Element, int kHeadDim, bool kSoftcap>
class Consumer {
  using Memory = SharedMemory<Element, kHeadDim>;
  static constexpr int kKeyTile = Config<kHeadDim>::kKeyTile;
  static constexpr int kConsumers = Config<kHeadDim>::kConsumers;
  static constexpr int kScores = kKeyTile / 2;  // accumulators of a thread
  static constexpr int kSums = kHeadDim / 2;
  static constexpr int kSlack =
      std::is_same_v<Element, __half> ? 2 : 8;  // weights below 2^-24 vanish in fp16

  static constexpr uint32_t kRowBytes = 128;  // of a box
  static constexpr uint32_t kAtomBytes = 8 * kRowBytes;

 public:
  // index: of this warpgroup among the consumers.
  __device__ __forceinline__ Consumer(const Params& params, Memory& memory, uint32_t index)
      : params_(params),
        memory_(memory),
        index_(index),
        lane_(threadIdx.x % 32),
        top_(64 * index + threadIdx.x % 128 / 32 * 16),
        window_left_(params.plan->window_left),
        total_tokens_(params.plan->total_tokens) {
    softmax_.factor = kSoftcap ? 1.0f : params.softcap.exponent_scale;
    softmax_.Reset();
  }

  __device__ __forceinline__ void Run() {
    float scores[kScores];
    float sums[kSums];
    uint32_t weights[kScores / 2];  // exponentials of the scores, packed
    float rescale[2];

    StepHead step = WaitStep();
    if (step.flags & StepHead::kEnd) {
      return;
    }
    WaitQueries();
    ptx::WgmmaFence();
    MultiplyKeys(scores);
    ptx::WgmmaCommit();
    ptx::WgmmaWait<0>();
    ptx::Pin(scores);
    FinishScores(step.flags, scores);
    softmax_.Update(scores, rescale);
    PackWeights(scores, weights);

    // The scores of `next` and the values' product of `step`.
    auto multiply = [&] {
      WaitValues(step);
      ptx::WgmmaFence();
      MultiplyKeys(scores);
      ptx::WgmmaCommit();
      MultiplyValues(step, weights, sums);
      ptx::WgmmaCommit();
      ptx::WgmmaWait<1>();
      ptx::Pin(scores);
    };
    StepHead next = WaitStep();
    while (true) {
      while (!(next.flags & (StepHead::kFirst | StepHead::kEnd))) {
        multiply();
        FinishScores(next.flags, scores);
        const bool rescaled =
            softmax_.settled ? softmax_.UpdateSettled(scores, rescale) : softmax_.Update(scores, rescale);
        step = next;
        // NOTE: ptxas moves the wait for the values' product to the front of its basic block, in front of the
        // softmax. This wait, in between, is a loop and ends the block.
        next = WaitStep();
        ptx::WgmmaWait<0>();
        ptx::Pin(sums);
        Release(memory_.values_empty, values_, lane_);
        if (rescaled) {
#pragma unroll
          for (int i = 0; i < kSums; ++i) {
            sums[i] *= rescale[i / 2 % 2];
          }
        }
        PackWeights(scores, weights);
      }
      if (next.flags & StepHead::kEnd) {
        break;
      }
      scored_.Next();
      WaitQueries();
      multiply();
      FinishScores(next.flags, scores);
      ptx::WgmmaWait<0>();
      ptx::Pin(sums);
      Release(memory_.values_empty, values_, lane_);
      FinishTile(sums);
      softmax_.Update(scores, rescale);
      PackWeights(scores, weights);
      step = next;
      next = WaitStep();
    }

    WaitValues(step);
    ptx::WgmmaFence();
    MultiplyValues(step, weights, sums);
    ptx::WgmmaCommit();
    ptx::WgmmaWait<0>();
    ptx::Pin(sums);
    FinishTile(sums);
  }

 private:
  __device__ __forceinline__ StepHead WaitStep() {
    ptx::MbarrierWait(&memory_.keys_full[keys_.index], keys_.parity);
    return ForAllLanes(memory_.steps[keys_.index].head, lane_);
  }

  __device__ __forceinline__ void WaitQueries() {
    ptx::MbarrierWait(&memory_.queries_full[scored_.index], scored_.parity);
  }

  // The scores of the step are computed: hides what is not visible, and lets go of the keys.
  __device__ __forceinline__ void FinishScores(int32_t flags, float (&scores)[kScores]) {
    if constexpr (kSoftcap) {
      Cap(scores);
    }
    if (flags & StepHead::kMasked) {
      Mask(scores);
    }
    Release(memory_.keys_empty, keys_, lane_);
  }

  __device__ __forceinline__ void PackWeights(const float (&scores)[kScores],
                                              uint32_t (&weights)[kScores / 2]) {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) {
      weights[i] = ptx::Pack<Element>(scores[2 * i], scores[2 * i + 1]);
    }
  }

  // scores = queries keys^T
  __device__ __forceinline__ void MultiplyKeys(float (&scores)[kScores]) {
    const uint64_t a = ptx::SharedOperand(memory_.queries[scored_.index][0][64 * index_], kAtomBytes);
    const uint64_t b = ptx::SharedOperand(memory_.keys[keys_.index], kAtomBytes);
#pragma unroll
    for (int box = 0; box < Memory::kBoxes; ++box) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        ptx::Wgmma<Element, kKeyTile>::Shared(
            scores, ptx::Advance(a, box * kQueryTile<kHeadDim> * kRowBytes + k * 32),
            ptx::Advance(b, box * kKeyTile * kRowBytes + k * 32), box + k > 0);
      }
    }
  }

  __device__ __forceinline__ void WaitValues(StepHead step) {
    ptx::MbarrierWait(&memory_.values_full[values_.index], values_.parity);
    if (step.flags & StepHead::kPastEnd) {
      ClearValues(total_tokens_ - step.key_begin);
    }
  }

  // sums += weights values
  __device__ __forceinline__ void MultiplyValues(StepHead step, const uint32_t (&weights)[kScores / 2],
                                                 float (&sums)[kSums]) {
    const uint64_t b = ptx::SharedOperand(memory_.values[values_.index], kAtomBytes, kKeyTile * kRowBytes);
    const bool first = step.flags & StepHead::kFirst;
#pragma unroll
    for (int k = 0; k < kKeyTile / 16; ++k) {
      ptx::Wgmma<Element, kHeadDim>::Registers(sums, weights + 4 * k, ptx::Advance(b, 2 * k * kAtomBytes),
                                               k > 0 || !first);
    }
  }

  // Values past the forest count for nothing, but 0 times what they hold need not be 0.
  __device__ void ClearValues(int32_t valid) {
    for (int32_t i = valid * 8 + threadIdx.x % 128; i < kKeyTile * 8; i += 128) {
      for (int box = 0; box < Memory::kBoxes; ++box) {
        reinterpret_cast<int4*>(memory_.values[values_.index][box])[i] = int4{0, 0, 0, 0};
      }
    }
    ptx::FenceProxyAsync();
    ptx::NamedBarrierSync(1 + index_, 128);
  }

  __device__ __forceinline__ void Cap(float (&scores)[kScores]) const {
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      scores[i] = params_.softcap(scores[i]);
    }
  }

  // Hides the keys that a row does not see.
  __device__ __forceinline__ void Mask(float (&scores)[kScores]) const {
    const Step step = ForAllLanes(memory_.steps[keys_.index], lane_);
    const QueryTile tile = ForAllLanes(memory_.query_tiles[scored_.index], lane_);
    const int32_t column = step.head.key_begin + 2 * (lane_ % 4);  // of the thread's first score
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int32_t row = tile.row_begin + memory_.product_rows[top_ + 8 * i + lane_ / 4].row;
      const int32_t position = window_left_ >= 0 && row < tile.row_end ? __ldg(Positions() + row) : 0;
      // Rows that are not the tile's see all keys: their numbers are not used, but should be ordinary ones.
      const core::Interval keys = row < tile.row_end
                                      ? core::VisibleKeys(row, position, step.segment, window_left_)
                                      : core::Interval{step.head.key_begin, step.head.key_begin + kKeyTile};
      Hide(scores, i, [&](int32_t key) { return key >= keys.end - column; });
      if (window_left_ >= 0) {
        Hide(scores, i, [&](int32_t key) { return key < keys.begin - column; });
      }
    }
  }

  // Hides the keys of row i for which hidden(key), counted from the thread's first score.
  template <class Hidden>
  __device__ __forceinline__ void Hide(float (&scores)[kScores], int i, Hidden hidden) const {
    const float hidden_score = copysignf(INFINITY, -softmax_.factor);  // its exponent is -inf
#pragma unroll
    for (int s = 2 * i; s < kScores; s += 4) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        scores[s + j] = hidden(2 * (s - 2 * i) + j) ? hidden_score : scores[s + j];
      }
    }
  }

  __device__ __forceinline__ const int32_t* Positions() const {
    return core::PartOfImage<int32_t>(params_.plan, params_.plan->positions);
  }

  // Writes out and lse of the tile's rows, and lets go of it; the softmax starts anew.
  __device__ __forceinline__ void FinishTile(const float (&sums)[kSums]) {
    const int32_t lane = ptx::FreshLane();
    const QueryTile tile = ForAllLanes(memory_.query_tiles[summed_.index], lane_);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const ProductRow row = memory_.product_rows[top_ + 8 * i + lane / 4];
      const int32_t head = tile.head_begin + row.head, target = TargetRow(tile, row);
      const bool valid = target >= 0;
      float lse;
      const float factor = softmax_.Finish(i, valid && params_.sinks ? params_.sinks[head] : -INFINITY, &lse);
      if (valid && params_.lse != nullptr && lane % 4 == 0) {
        params_.lse[static_cast<int64_t>(head) * params_.query_rows + target] = lse;
      }
      Element* out = RowOf<Element>(params_.out, target, head);
      StoreRow(out, sums, i, factor, params_.head_dim, valid, lane);
    }
    softmax_.Reset();
    Release(memory_.queries_empty, summed_, lane_);
  }

  // Row of out and lse; -1 if it is not to be written.
  __device__ __forceinline__ int32_t TargetRow(const QueryTile& tile, ProductRow product_row) const {
    const int32_t row = tile.row_begin + product_row.row, target = row - params_.query_row_begin;
    return row < tile.row_end && target < params_.query_rows ? target : -1;
  }

  const Params& params_;
  Memory& memory_;
  const uint32_t index_;
  const int32_t lane_;
  const int32_t top_;  // first of the warp's 16 rows of products
  const int32_t window_left_;
  const int32_t total_tokens_;
  Softmax<kSoftcap, kSlack> softmax_;
  RingPosition<kQueryBuffers> scored_;  // the query tile whose scores are computed
  RingPosition<kQueryBuffers> summed_;  // the one whose sums are
  RingPosition<kStages> keys_;
  RingPosition<kStages> values_;
};

}  // namespace dualkv::cuda::attention_forward
