// Online softmax over the two rows of a thread, in the layout of the products' accumulators: of row i,
// element j of score block b is scores[4 b + 2 i + j]. The four lanes of a quad share their rows.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/ptx/warpgroup.cuh"
#include "cuda/softcap.cuh"

namespace dualkv::cuda::attention_forward {

__device__ __forceinline__ float QuadMax(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}

__device__ __forceinline__ float QuadSum(float x) {
  x += __shfl_xor_sync(0xffffffff, x, 1);
  return x + __shfl_xor_sync(0xffffffff, x, 2);
}

// Scores become base-2 exponents: factor * score - shift, with a shift for each row that keeps them at most
// 0. A shift stays until an exponent reaches 0; then it moves so that the row's largest exponent is -kSlack.
// Relative errors do not depend on the shift, and most steps neither look for a maximum nor rescale what has
// been summed: that no exponent has reached 0 is seen by their signs. All decisions are a row's own, so its
// bits do not depend on other rows.
//
// kUnitFactor: the factor is 1. kSlack: the less, the more often shifts move; the more, the more of the range
// of the type that weights are rounded to stays unused.
template <bool kUnitFactor, int kSlack>
struct Softmax {
  // Exponents of a shift beyond this are not computed by a fused multiply-add, whose result for equal scores
  // would differ from the shift by its rounding.
  static constexpr float kLargeShift = 1024.0f;

  float factor;    // not 0
  float shift[2];  // -inf: the row has not seen a key
  float total[2];  // this thread's share of the sum of exp2(exponent)
  bool settled;    // all rows of the warp have shifts that are not large

  __device__ __forceinline__ void Reset() {
    shift[0] = shift[1] = -INFINITY;
    total[0] = total[1] = 0.0f;
    settled = false;
  }

  // Turns scores into exp2(exponent). What has been summed so far is to be multiplied by `rescale` if the
  // result, the same for the whole warp, is true. A score of -inf counts for nothing, and leaves a row as it
  // was, to the bit.
  template <int kScores>
  __device__ __forceinline__ bool Update(float (&scores)[kScores], float (&rescale)[2]) {
    float base[2], before[2], after[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      base[i] = shift[i] == -INFINITY ? 0.0f : shift[i];
      const bool large = !kUnitFactor && fabsf(base[i]) > kLargeShift;
      before[i] = large ? factor : 1.0f;
      after[i] = large || kUnitFactor ? 1.0f : factor;
    }
#pragma unroll
    for (int s = 0; s < kScores; ++s) {
      const int i = s / 2 % 2;
      scores[s] = fmaf(kUnitFactor ? scores[s] : scores[s] * before[i], after[i], -base[i]);
    }
    const bool moved = MoveShifts(scores, rescale);
    Exponentiate(scores);
    return moved;
  }

  // The same, if `settled`.
  template <int kScores>
  __device__ __forceinline__ bool UpdateSettled(float (&scores)[kScores], float (&rescale)[2]) {
    uint32_t negative = 0x80000000;
#pragma unroll
    for (int s = 0; s < kScores; ++s) {
      scores[s] = fmaf(scores[s], kUnitFactor ? 1.0f : factor, -shift[s / 2 % 2]);
      negative &= __float_as_uint(scores[s]);
    }
    bool moved = false;
    if (__any_sync(0xffffffff, negative == 0)) {
      moved = MoveShifts(scores, rescale);
    }
    Exponentiate(scores);
    return moved;
  }

  // Of row i at the end: what its sum is to be multiplied by, with `sink` (-inf: none), a further score in
  // the units of exp, in the denominator; and the natural log of that.
  __device__ __forceinline__ float Finish(int i, float sink, float* lse) const {
    const float sum = QuadSum(total[i]);
    const float other = sink * kLog2E;
    const float top = fmaxf(shift[i], other);
    const float weight = ptx::Exp2(shift[i] - top);
    const float denominator = fmaf(sum, weight, ptx::Exp2(other - top));
    // Brings the denominator near 1, where its logarithm is exact.
    constexpr float kPowerOfSlack = 1 << kSlack;
    *lse = (log2f(denominator * kPowerOfSlack) + (top - kSlack)) * kLn2;
    return weight * ptx::Reciprocal(denominator);
  }

 private:
  // Moves the shifts of rows with an exponent that is not below 0, and of those that see their first key.
  template <int kScores>
  __device__ __forceinline__ bool MoveShifts(float (&exponents)[kScores], float (&rescale)[2]) {
    bool moved = false, unsettled = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float tops[2] = {exponents[2 * i], exponents[2 * i + 1]};
#pragma unroll
      for (int s = 2 * i + 4; s < kScores; s += 4) {
        tops[0] = fmaxf(tops[0], exponents[s]);
        tops[1] = fmaxf(tops[1], exponents[s + 1]);
      }
      const float top = QuadMax(fmaxf(tops[0], tops[1]));
      const bool fresh = shift[i] == -INFINITY;
      const bool moves = fresh ? top > -INFINITY : __float_as_int(top) >= 0;  // by its sign, as the vote
      // A shift so large that kSlack is lost in its rounding does not move: what counts is by how much it
      // did.
      const float base = fresh ? 0.0f : shift[i], target = base + (top + kSlack);
      const float move = moves ? target - base : 0.0f;
#pragma unroll
      for (int s = 2 * i; s < kScores; s += 4) {
        exponents[s] -= move;
        exponents[s + 1] -= move;
      }
      rescale[i] = fresh ? 1.0f : ptx::Exp2(-move);  // the sums of a fresh row are 0
      total[i] *= rescale[i];
      shift[i] = moves ? target : shift[i];
      moved |= moves && !fresh;
      unsettled |= !(fabsf(shift[i]) <= kLargeShift);
    }
    settled = !__any_sync(0xffffffff, unsettled);
    return __any_sync(0xffffffff, moved);
  }

  template <int kScores>
  __device__ __forceinline__ void Exponentiate(float (&exponents)[kScores]) {
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int s = 0; s < kScores; ++s) {
      exponents[s] = ptx::Exp2(exponents[s]);
      sums[s % 4] += exponents[s];
    }
    total[0] += sums[0] + sums[1];
    total[1] += sums[2] + sums[3];
  }
};

}  // namespace dualkv::cuda::attention_forward
