// A consumer warpgroup: 64 rows of each query tile.
//
// Its steps overlap: the tensor cores compute the scores of step n + 1 and the values' product of step n
// together, and they go on with that product, and with the steps of the other warpgroups, while the softmax
// of n + 1 runs. Query tiles follow each other without a gap: the first step of a tile is the step after the
// last of the tile before.
#pragma once

#include "core/visibility.h"
#include "cuda/attention_forward/config.cuh"
#include "cuda/attention_forward/softmax.cuh"
#include "cuda/ptx/tensor_copy.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace dualkv::cuda::attention_forward {

// kGeneralScores: scores are softcapped, or their scale is not positive.
template <class Element, int kHeadDim, bool kGeneralScores>
class Consumer {
  using Memory = SharedMemory<Element, kHeadDim>;
  static constexpr int kKeyTile = Config<kHeadDim>::kKeyTile;
  static constexpr int kConsumers = Config<kHeadDim>::kConsumers;
  static constexpr int kScores = kKeyTile / 2;  // accumulators of a thread
  static constexpr int kSums = kHeadDim / 2;

  static constexpr uint32_t kRowBytes = 128;  // of a box
  static constexpr uint32_t kAtomBytes = 8 * kRowBytes;
  enum NamedBarrier : uint32_t { kTurn = 1, kOwn = kTurn + kConsumers };  // one for each consumer

  // The part of a query tile that a thread needs.
  struct Tile {
    int32_t row_begin;
    int32_t row_end;
    int32_t head_begin;
    int32_t position[2];  // of its two rows, with a window
  };

 public:
  // index: of this warpgroup among the consumers.
  __device__ __forceinline__ Consumer(const Params& params, Memory& memory, uint32_t index)
      : params_(params),
        memory_(memory),
        index_(index),
        lane_(threadIdx.x % 32),
        window_left_(params.plan->window_left),
        total_tokens_(params.plan->total_tokens) {
    const int32_t top = 64 * index + threadIdx.x % 128 / 32 * 16 + lane_ / 4;
    for (int i = 0; i < 2; ++i) {
      row_in_tile_[i] = (top + 8 * i) / params.packed;
      head_in_pack_[i] = (top + 8 * i) % params.packed;
    }
    softmax_.factor = kGeneralScores ? 1.0f : params.scale * kLog2E;
    softmax_.Reset();
  }

  __device__ __forceinline__ void Run() {
    float scores[kScores];
    float sums[kSums];
    uint32_t weights[kScores / 2];  // exp(score - max), packed
    float rescale[2];

    if (index_ == kConsumers - 1) {
      PassTurn();
    }
    StepHead step = WaitStep();
    if (step.flags & Step::kEnd) {
      return;
    }
    Tile tile = WaitTile();
    WaitTurn();
    ptx::WgmmaFence();
    MultiplyKeys(scores);
    ptx::WgmmaCommit();
    PassTurn();
    ptx::WgmmaWait<0>();
    ptx::Pin(scores);
    FinishScores(step.flags, tile, scores);
    softmax_.Update(scores, rescale);
    PackWeights(scores, weights);

    while (true) {
      const StepHead next = WaitStep();
      if (next.flags & Step::kEnd) {
        break;
      }
      const bool first = next.flags & Step::kFirst;
      Tile next_tile = tile;
      if (first) {
        next_tile = WaitTile();
      }
      WaitTurn();
      ptx::WgmmaFence();
      MultiplyKeys(scores);
      ptx::WgmmaCommit();
      MultiplyValues(step, weights, sums);
      ptx::WgmmaCommit();
      PassTurn();
      ptx::WgmmaWait<1>();
      ptx::Pin(scores);
      FinishScores(next.flags, next_tile, scores);
      if (first) {
        ptx::WgmmaWait<0>();
        ptx::Pin(sums);
        FinishTile(tile, sums);
        tile = next_tile;
      }
      softmax_.Update(scores, rescale);
      ptx::WgmmaWait<0>();
      ptx::Pin(sums);
      ReleaseValues();
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        sums[i] *= rescale[i / 2 % 2];
      }
      PackWeights(scores, weights);
      step = next;
    }

    WaitTurn();
    ptx::WgmmaFence();
    MultiplyValues(step, weights, sums);
    ptx::WgmmaCommit();
    PassTurn();
    ptx::WgmmaWait<0>();
    ptx::Pin(sums);
    FinishTile(tile, sums);
    if (index_ == 0) {
      WaitTurn();  // takes up the turn that is left
    }
  }

 private:
  // The consumers issue their products in turns, so that one's softmax falls into the products of the others.
  __device__ __forceinline__ void WaitTurn() { ptx::NamedBarrierSync(kTurn + index_, 256); }
  __device__ __forceinline__ void PassTurn() {
    ptx::NamedBarrierArrive(kTurn + (index_ + 1) % kConsumers, 256);
  }

  struct StepHead {
    int32_t flags;
    int32_t key_begin;
  };

  __device__ __forceinline__ StepHead WaitStep() {
    ptx::MbarrierWait(&memory_.keys_full[keys_.index], keys_.parity);
    const Step& step = memory_.steps[keys_.index];
    // Uniform for the compiler too: it would not let products run on across branches that threads may part
    // at.
    return {__shfl_sync(0xffffffff, step.flags, 0), step.key_begin};
  }

  __device__ __forceinline__ Tile WaitTile() {
    ptx::MbarrierWait(&memory_.queries_full[queries_.index], queries_.parity);
    return ReadTile(memory_.steps[keys_.index]);
  }

  // The scores of the step are computed: hides what is not visible, and lets go of the keys.
  __device__ __forceinline__ void FinishScores(int32_t flags, const Tile& tile, float (&scores)[kScores]) {
    if constexpr (kGeneralScores) {
      Transform(scores);
    }
    if (flags & Step::kMasked) {
      Mask(memory_.steps[keys_.index], tile, scores);
    }
    ReleaseKeys(flags);
  }

  __device__ __forceinline__ void PackWeights(const float (&scores)[kScores],
                                              uint32_t (&weights)[kScores / 2]) {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) {
      weights[i] = ptx::Pack<Element>(scores[2 * i], scores[2 * i + 1]);
    }
  }

  __device__ __forceinline__ void ReleaseKeys(int32_t flags) {
    if (lane_ == 0) {
      ptx::MbarrierArrive(&memory_.keys_empty[keys_.index]);
    }
    keys_.Next();
    if (flags & Step::kLast) {
      if (lane_ == 0) {
        ptx::MbarrierArrive(&memory_.queries_empty[queries_.index]);
      }
      queries_.Next();
    }
  }

  __device__ __forceinline__ void ReleaseValues() {
    if (lane_ == 0) {
      ptx::MbarrierArrive(&memory_.values_empty[values_.index]);
    }
    values_.Next();
  }

  // scores = queries keys^T
  __device__ __forceinline__ void MultiplyKeys(float (&scores)[kScores]) {
    const uint64_t a = ptx::SharedOperand(memory_.queries[queries_.index][0][64 * index_], kAtomBytes);
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

  // sums += weights values
  __device__ __forceinline__ void MultiplyValues(StepHead step, const uint32_t (&weights)[kScores / 2],
                                                 float (&sums)[kSums]) {
    ptx::MbarrierWait(&memory_.values_full[values_.index], values_.parity);
    if (step.flags & Step::kPastEnd) {
      ClearValues(total_tokens_ - step.key_begin);
    }
    const uint64_t b = ptx::SharedOperand(memory_.values[values_.index], kAtomBytes, kKeyTile * kRowBytes);
    const bool first = step.flags & Step::kFirst;
    auto multiply = [&](int begin, int end) {
#pragma unroll
      for (int k = begin; k < end; ++k) {
        ptx::Wgmma<Element, kHeadDim>::Registers(sums, weights + 4 * k, ptx::Advance(b, 2 * k * kAtomBytes),
                                                 k > 0 || !first);
      }
    };
    multiply(0, kKeyTile / 32);
    if (!(step.flags & Step::kNarrow)) {
      multiply(kKeyTile / 32, kKeyTile / 16);
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
    ptx::NamedBarrierSync(kOwn + index_, 128);
  }

  __device__ __forceinline__ Tile ReadTile(const Step& step) const {
    Tile tile = {step.row_begin, step.row_end, step.head_begin, {0, 0}};
    if (window_left_ >= 0) {
      const auto* positions = reinterpret_cast<const int32_t*>(
          reinterpret_cast<const std::byte*>(params_.plan) + params_.plan->positions);
      for (int i = 0; i < 2; ++i) {
        const int32_t row = tile.row_begin + row_in_tile_[i];
        tile.position[i] = row < tile.row_end ? __ldg(positions + row) : 0;
      }
    }
    return tile;
  }

  // To the units of base-2 exponents.
  __device__ __forceinline__ void Transform(float (&scores)[kScores]) const {
    if (params_.softcap > 0) {
      // tanh(x) = 1 - 2 / (1 + exp(2 x))
      const float to_exponent = 2 * kLog2E * params_.scale / params_.softcap, cap = params_.softcap * kLog2E;
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        scores[i] = fmaf(ptx::Reciprocal(1.0f + ptx::Exp2(scores[i] * to_exponent)), -2 * cap, cap);
      }
    } else {
      const float factor = params_.scale * kLog2E;
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        scores[i] *= factor;
      }
    }
  }

  // Hides the keys that a row does not see.
  __device__ __forceinline__ void Mask(const Step& step, const Tile& tile, float (&scores)[kScores]) const {
    const dualkv_segment segment = step.segment;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const core::Interval keys =
          core::VisibleKeys(tile.row_begin + row_in_tile_[i], tile.position[i], segment, window_left_);
      const int32_t column = step.key_begin + 2 * (lane_ % 4);  // of the thread's first score
      const int32_t begin = keys.begin - column, end = keys.end - column;
#pragma unroll
      for (int block = 0; block < kScores / 4; ++block) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float& score = scores[4 * block + 2 * i + j];
          score = 8 * block + j >= begin && 8 * block + j < end ? score : -INFINITY;
        }
      }
    }
  }

  // Writes out and lse of the tile's rows; the softmax starts anew.
  __device__ __forceinline__ void FinishTile(const Tile& tile, const float (&sums)[kSums]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int32_t row = tile.row_begin + row_in_tile_[i], head = tile.head_begin + head_in_pack_[i];
      const int32_t target = row - params_.query_row_begin;
      const bool valid = row < tile.row_end && target >= 0 && target < params_.query_rows &&
                         row_in_tile_[i] < params_.rows_per_tile;
      float lse;
      const float factor = softmax_.Finish(i, valid && params_.sinks ? params_.sinks[head] : -INFINITY, &lse);
      if (valid && params_.lse != nullptr && lane_ % 4 == 0) {
        params_.lse[static_cast<int64_t>(head) * params_.query_rows + target] = lse;
      }
      Element* out = static_cast<Element*>(params_.out) + target * params_.out_row_stride +
                     head * params_.out_head_stride;
#pragma unroll
      for (int block = 0; block < kHeadDim / 8; block += 4) {
        // Lane q of the quad has columns 2 q and 2 q + 1 of four blocks; it gets all 8 columns of block q.
        uint32_t words[4];
#pragma unroll
        for (int b = 0; b < 4; ++b) {
          const float* pair = sums + 4 * (block + b) + 2 * i;
          words[b] = ptx::Pack<Element>(pair[0] * factor, pair[1] * factor);
        }
        TransposeInQuad(words);
        const int32_t column = 8 * (block + lane_ % 4);
        if (valid && column < params_.head_dim) {
          *reinterpret_cast<uint4*>(out + column) = {words[0], words[1], words[2], words[3]};
        }
      }
    }
    softmax_.Reset();
  }

  // words[b] of lane q goes to words[q] of lane b, within each four lanes.
  __device__ __forceinline__ void TransposeInQuad(uint32_t (&words)[4]) const {
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2) {
      const bool upper = lane_ & bit;
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        if (!(b & bit)) {
          const uint32_t received = __shfl_xor_sync(0xffffffff, upper ? words[b] : words[b | bit], bit);
          (upper ? words[b] : words[b | bit]) = received;
        }
      }
    }
  }

  const Params& params_;
  Memory& memory_;
  const uint32_t index_;
  const int32_t lane_;
  const int32_t window_left_;
  const int32_t total_tokens_;
  int32_t row_in_tile_[2];  // of this thread's two rows of products
  int32_t head_in_pack_[2];
  Softmax softmax_;
  RingPosition<kQueryBuffers> queries_;
  RingPosition<kStages> keys_;
  RingPosition<kStages> values_;
};

}  // namespace dualkv::cuda::attention_forward
