// A consumer warpgroup: 64 keys of each item, with their dK and dV.
//
// The scores of step n + 1 come before dK of step n, which then runs under the exponentials; dweights and dV
// are computed together. The other consumer and the reducer fill what gaps are left on the tensor cores.
#pragma once

#include "cuda/accumulators.cuh"
#include "cuda/attention_backward/config.cuh"
#include "cuda/ptx/tensor_copy.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/ring.cuh"
#include "cuda/tensor.cuh"

namespace dualkv::cuda::attention_backward {

// kSoftcap: whether scores are softcapped.
template <class Element, int kHeadDim, bool kSoftcap>
class Consumer {
  using Memory = SharedMemory<Element, kHeadDim>;
  static constexpr int kRows = Memory::kRows;
  static constexpr int kScores = kRows / 2;  // accumulators of a thread
  static constexpr int kSums = kHeadDim / 2;

  static constexpr uint32_t kRowBytes = 128;  // of a box
  static constexpr uint32_t kAtomBytes = 8 * kRowBytes;

 public:
  // index: of this warpgroup among the consumers.
  __device__ __forceinline__ Consumer(const Params& params, Memory& memory, uint32_t index)
      : params_(params), memory_(memory), index_(index) {}

  __device__ __forceinline__ void Run() {
    float dkeys[kSums], dvalues[kSums];
    while (true) {
      ptx::MbarrierWait(&memory_.items_full[items_.index], items_.parity);
      const int32_t kv_head = ForAllLanes(memory_.items[items_.index].kv_head, ptx::FreshLane());
      if (kv_head < 0) {
        return;
      }
      ptx::MbarrierWait(&memory_.keys_full[0], keys_.parity);
      ClearKeys();
      RunSteps(dkeys, dvalues);
      WriteGradients(kv_head, dkeys, dvalues);
      Release(memory_.items_empty, items_, ptx::FreshLane());
    }
  }

 private:
  __device__ __forceinline__ void RunSteps(float (&dkeys)[kSums], float (&dvalues)[kSums]) {
    float scores[kScores];  // dweights too, of the same step
    uint32_t weights[kScores / 2], dscores[kScores / 2];
    int32_t steps = ForAllLanes(memory_.items[items_.index].steps, ptx::FreshLane());
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      dkeys[i] = dvalues[i] = 0.0f;
    }
    if (steps == 0) {  // no row sees these keys
      Release(memory_.keys_empty, keys_, ptx::FreshLane());
      return;
    }
    bool masked = WaitQueries(queries_);
    ptx::WgmmaFence();
    Multiply(scores, memory_.keys, memory_.queries[queries_.index]);
    ptx::WgmmaCommit();
    const float2* lses = PairsOf(memory_.lse_log2[queries_.index]);
    ptx::WgmmaWait<0>();
    RingPosition<Memory::kStages> last = queries_;
    for (bool first = true;; first = false) {
      if constexpr (kSoftcap) {  // which needs the registers of dscores
        ptx::WgmmaWait<0>();
      }
      ptx::Pin(scores);
      Exponentiate(scores, lses, masked);
      ptx::WgmmaWait<0>();
      ptx::Pin(dkeys);
      if (!first) {
        Release(memory_.queries_empty, last, ptx::FreshLane());
      }
      Pack(scores, weights);
      ptx::WgmmaFence();
      Multiply(scores, memory_.values, memory_.douts[queries_.index]);
      ptx::WgmmaCommit();
      MultiplyTransposed(dvalues, weights, memory_.douts[queries_.index]);
      ptx::WgmmaCommit();
      RingPosition<Memory::kStages> next = queries_;
      next.Next();
      if (steps > 1) {
        masked = WaitQueries(next);
      }
      if constexpr (!kSoftcap) {
        ptx::MbarrierWait(&memory_.dscores_empty[dscores_.index], dscores_.parity ^ 1);
      }
      const float2* deltas = PairsOf(memory_.delta[queries_.index]);
      ptx::WgmmaWait<0>();
      ptx::Pin(scores);
      ptx::Pin(dvalues);
      Differentiate(weights, deltas, scores, dscores);
      Store(dscores);
      if (--steps == 0) {
        break;
      }
      last = queries_;
      queries_ = next;
      ptx::WgmmaFence();
      Multiply(scores, memory_.keys, memory_.queries[queries_.index]);
      ptx::WgmmaCommit();
      MultiplyTransposed(dkeys, dscores, memory_.queries[last.index]);
      ptx::WgmmaCommit();
      HandOver();
      lses = PairsOf(memory_.lse_log2[queries_.index]);
      ptx::WgmmaWait<1>();
    }
    HandOver();
    Release(memory_.keys_empty, keys_, ptx::FreshLane());
    ptx::WgmmaFence();
    MultiplyTransposed(dkeys, dscores, memory_.queries[queries_.index]);
    ptx::WgmmaCommit();
    ptx::WgmmaWait<0>();
    ptx::Pin(dkeys);
    Release(memory_.queries_empty, queries_, ptx::FreshLane());
  }

  // Of a step; returns whether it is masked. Votes, as the compiler knows that they are the same for all
  // lanes, and they take less time than ForAllLanes.
  __device__ __forceinline__ bool WaitQueries(const RingPosition<Memory::kStages>& queries) {
    ptx::MbarrierWait(&memory_.queries_full[queries.index], queries.parity);
    const int32_t flags = memory_.steps[queries.index].flags;
    const bool masked = __any_sync(0xffffffff, flags & Step::kMasked);
    if (__any_sync(0xffffffff, flags & Step::kPartial)) {
      ClearRows(queries);
    }
    return masked;
  }

  // sums [keys, rows] = keys or values [64 of keys, D] times queries or output gradients [rows, D] transposed
  template <class KeyBoxes, class RowBoxes>
  __device__ __forceinline__ void Multiply(float (&sums)[kScores], const KeyBoxes& keys,
                                           const RowBoxes& rows) {
    const uint64_t a = ptx::SharedOperand(keys[0][64 * index_], kAtomBytes);
    const uint64_t b = ptx::SharedOperand(rows[0], kAtomBytes);
#pragma unroll
    for (int box = 0; box < Memory::kBoxes; ++box) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        ptx::Wgmma<Element, kRows>::Shared(sums, ptx::Advance(a, box * kKeyTile * kRowBytes + k * 32),
                                           ptx::Advance(b, box * kRows * kRowBytes + k * 32), box + k > 0);
      }
    }
  }

  // sums [keys, D] += weights [keys, rows] times queries or output gradients [rows, D]
  template <class RowBoxes>
  __device__ __forceinline__ void MultiplyTransposed(float (&sums)[kSums],
                                                     const uint32_t (&weights)[kScores / 2],
                                                     const RowBoxes& rows) {
    const uint64_t b = ptx::SharedOperand(rows[0], kAtomBytes, kRows * kRowBytes);
#pragma unroll
    for (int k = 0; k < kRows / 16; ++k) {
      ptx::Wgmma<Element, kHeadDim>::Registers(sums, weights + 4 * k, ptx::Advance(b, 2 * k * kAtomBytes),
                                               true);
    }
  }

  // What is kept of each row, two rows at a time: entry s is for the accumulators s to s + 3. The lane's
  // place is asked for while products run.
  __device__ __forceinline__ const float2* PairsOf(const float (&rows)[kRows]) const {
    return reinterpret_cast<const float2*>(rows) + ptx::FreshLane() % 4;
  }

  // weights = exp(scores - lse), 0 where the key is not visible
  __device__ __forceinline__ void Exponentiate(float (&scores)[kScores], const float2* lses, bool masked) {
    if constexpr (kSoftcap) {
      ptx::MbarrierWait(&memory_.dscores_empty[dscores_.index], dscores_.parity ^ 1);
    }
#pragma unroll
    for (int s = 0; s < kScores; s += 4) {
      const float2 lse = lses[s];
      if constexpr (kSoftcap) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          scores[s + i] = params_.softcap(scores[s + i]);
        }
        PutDerivativesAside(scores, s);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float factor = kSoftcap ? 1.0f : params_.softcap.exponent_scale;
        const float exponent = fmaf(scores[s + i], factor, -(i % 2 ? lse.y : lse.x));
        scores[s + i] = ptx::Exp2(ptx::MinOrNan(exponent, 0.0f));  // it is above 0 by its rounding only
      }
    }
    if (masked) {
      Mask(scores);
    }
  }

  __device__ __forceinline__ void Pack(const float (&scores)[kScores], uint32_t (&weights)[kScores / 2]) {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) {
      weights[i] = ptx::Pack<Element>(scores[2 * i], scores[2 * i + 1]);
    }
  }

  // dscores = weights * (dweights - delta), times the softcap's derivative
  __device__ __forceinline__ void Differentiate(const uint32_t (&weights)[kScores / 2], const float2* deltas,
                                                float (&dweights)[kScores],
                                                uint32_t (&dscores)[kScores / 2]) {
#pragma unroll
    for (int s = 0; s < kScores; s += 4) {
      const float2 delta = deltas[s];
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const float2 weight = ptx::Unpack<Element>(weights[(s + i) / 2]);
        dweights[s + i] = weight.x * (dweights[s + i] - delta.x);
        dweights[s + i + 1] = weight.y * (dweights[s + i + 1] - delta.y);
      }
      if constexpr (kSoftcap) {
        MultiplyByDerivatives(dweights, s);
      }
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        dscores[(s + i) / 2] = ptx::Pack<Element>(dweights[s + i], dweights[s + i + 1]);
      }
    }
    if constexpr (kSoftcap) {
      __syncwarp();  // dscores come where the derivatives are
    }
  }

  // The softcap's derivatives for four scores are kept where the dscores of the warp will be: its 16 keys
  // have as many bytes as its lanes have scores, packed.
  __device__ __forceinline__ void PutDerivativesAside(const float (&scores)[kScores], int s) {
    const Softcap& softcap = params_.softcap;
    Aside(s) = {ptx::Pack<Element>(softcap.Derivative(scores[s]), softcap.Derivative(scores[s + 1])),
                ptx::Pack<Element>(softcap.Derivative(scores[s + 2]), softcap.Derivative(scores[s + 3]))};
  }
  __device__ __forceinline__ void MultiplyByDerivatives(float (&dweights)[kScores], int s) {
    const uint2 packed = Aside(s);
    const float2 low = ptx::Unpack<Element>(packed.x), high = ptx::Unpack<Element>(packed.y);
    dweights[s] *= low.x, dweights[s + 1] *= low.y, dweights[s + 2] *= high.x, dweights[s + 3] *= high.y;
  }
  __device__ __forceinline__ uint2& Aside(int s) {
    constexpr int kScoresOfBuffer = 32;  // of a thread, in 64 of the rows
    auto* keys =
        memory_.dscores[dscores_.index][s / kScoresOfBuffer][64 * index_ + threadIdx.x % 128 / 32 * 16];
    return reinterpret_cast<uint2*>(keys)[s % kScoresOfBuffer / 4 * 32 + ptx::FreshLane()];
  }

  __device__ __forceinline__ void Mask(float (&weights)[kScores]) const {
    const auto* pairs =
        reinterpret_cast<const uint32_t*>(memory_.visible[queries_.index]) + ptx::FreshLane() % 4;
    const uint32_t key = FirstKey();
#pragma unroll
    for (int s = 0; s < kScores; s += 4) {
      const uint32_t rows = pairs[s];  // two of them
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t begin = rows >> i % 2 * 16 & 0xff, end = rows >> (i % 2 * 16 + 8) & 0xff;
        const bool visible = key + i / 2 * 8 - begin < end - begin;
        weights[s + i] = visible ? weights[s + i] : 0.0f;
      }
    }
  }

  // Of the tile, the first of the two that this thread has; the other is 8 further on.
  __device__ __forceinline__ int32_t FirstKey() const {
    return 64 * index_ + threadIdx.x % 128 / 32 * 16 + ptx::FreshLane() / 4;
  }

  // Writes dscores where the reducer takes them from.
  __device__ __forceinline__ void Store(const uint32_t (&packed)[kScores / 2]) {
    auto& buffer = memory_.dscores[dscores_.index];
    // Lane l has the address of row l % 8 of the 8 x 8 matrix l / 8 of four: keys 8 further on in every
    // second, rows in the upper two.
    const int32_t lane = ptx::FreshLane();
    const int32_t key = 64 * index_ + threadIdx.x % 128 / 32 * 16 + lane % 16;
    const uint32_t base = ptx::SharedAddress(buffer[0][key]) + (lane / 16 ^ lane % 8) * 16;
#pragma unroll
    for (int k = 0; k < kRows / 16; ++k) {
      ptx::StoreMatrices(base + k / 4 * sizeof(buffer[0]) ^ k % 4 * 32, packed + 4 * k);
    }
  }
  // Gives what was stored to the reducer. Stores take a while to be there; products are issued before.
  __device__ __forceinline__ void HandOver() {
    ptx::FenceProxyAsync();
    Release(memory_.dscores_full, dscores_, ptx::FreshLane());
  }

  // Keys and values that are not the tile's count for nothing, but 0 times what they hold need not be 0.
  __device__ __forceinline__ void ClearKeys() {
    const auto& tile = memory_.items[items_.index].tile;
    const int32_t valid = ForAllLanes(tile.end, ptx::FreshLane()) - ForAllLanes(tile.begin, ptx::FreshLane());
    if (valid < kKeyTile) {
      Clear(memory_.keys, valid, kKeyTile);
      Clear(memory_.values, valid, kKeyTile);
      ptx::FenceProxyAsync();
      ptx::NamedBarrierSync(kConsumerBarrier, 128 * kConsumers);
    }
  }

  // The same for query rows that are not the step's. Their lse and delta are 0, and so are their dscores.
  __device__ __forceinline__ void ClearRows(const RingPosition<Memory::kStages>& queries) {
    const int32_t valid = ForAllLanes(memory_.steps[queries.index].rows, ptx::FreshLane());
    Clear(memory_.queries[queries.index], valid, kRows);
    Clear(memory_.douts[queries.index], valid, kRows);
    ptx::FenceProxyAsync();
    ptx::NamedBarrierSync(kConsumerBarrier, 128 * kConsumers);
  }

  // Rows [begin, end) of all boxes. The consumers clear together.
  template <class Boxes>
  __device__ __forceinline__ void Clear(Boxes& boxes, int32_t begin, int32_t end) {
    const int32_t thread = 128 * index_ + threadIdx.x % 128;
    for (int32_t i = begin * 8 + thread; i < end * 8; i += 128 * kConsumers) {
      for (int box = 0; box < Memory::kBoxes; ++box) {
        reinterpret_cast<int4*>(boxes[box])[i] = int4{0, 0, 0, 0};
      }
    }
  }

  __device__ __forceinline__ void WriteGradients(int32_t kv_head, const float (&dkeys)[kSums],
                                                 const float (&dvalues)[kSums]) {
    const core::ImageKeyTile tile = ForAllLanes(memory_.items[items_.index].tile, ptx::FreshLane());
    if (tile.partial >= 0) {
      float* part = params_.partials + (static_cast<int64_t>(tile.partial) * params_.num_kv_heads + kv_head) *
                                           2 * kKeyTile * kHeadDim;
      StorePartial(part, dkeys, params_.scale);
      StorePartial(part + kKeyTile * kHeadDim, dvalues, 1.0f);
      return;
    }
    const int32_t lane = ptx::FreshLane();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t key = tile.begin + FirstKey() + 8 * i;
      StoreRow(RowOf<Element>(params_.dk, key, kv_head), dkeys, i, params_.scale, params_.head_dim,
               key < tile.end, lane);
      StoreRow(RowOf<Element>(params_.dv, key, kv_head), dvalues, i, 1.0f, params_.head_dim, key < tile.end,
               lane);
    }
  }

  __device__ __forceinline__ void StorePartial(float* part, const float (&sums)[kSums], float factor) {
    const int32_t lane = ptx::FreshLane();
#pragma unroll
    for (int s = 0; s < kSums; s += 2) {
      const int32_t key = FirstKey() + s / 2 % 2 * 8;
      reinterpret_cast<float2*>(part + key * kHeadDim + s / 4 * 8)[lane % 4] = {sums[s] * factor,
                                                                                sums[s + 1] * factor};
    }
  }

  static constexpr uint32_t kConsumerBarrier = 1;

  const Params& params_;
  Memory& memory_;
  const uint32_t index_;
  RingPosition<kItems> items_;
  RingPosition<1> keys_;
  RingPosition<Memory::kStages> queries_;
  RingPosition<kScoreBuffers> dscores_;
};

}  // namespace dualkv::cuda::attention_backward
