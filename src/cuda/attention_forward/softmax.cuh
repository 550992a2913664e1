// Online softmax over the two rows of a thread, in the layout of the products' accumulators: of row i,
// element j of score block b is scores[4 b + 2 i + j]. The four lanes of a quad share their rows.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/ptx/warpgroup.cuh"

namespace dualkv::cuda::attention_forward {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float QuadMax(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}

__device__ __forceinline__ float QuadSum(float x) {
  x += __shfl_xor_sync(0xffffffff, x, 1);
  return x + __shfl_xor_sync(0xffffffff, x, 2);
}

// Scores become base-2 exponents when multiplied by `factor` > 0.
struct Softmax {
  float factor;
  float max[2];    // largest score so far
  float total[2];  // this thread's share of the sum of exp2(factor * (score - max))

  __device__ __forceinline__ void Reset() {
    max[0] = max[1] = -INFINITY;
    total[0] = total[1] = 0.0f;
  }

  // Turns scores into exp2(factor * (score - max)) with the new maximum. What has been summed so far is to be
  // multiplied by `rescale`. A score of -inf counts for nothing, and leaves a row as it was, to the bit.
  template <int kScores>
  __device__ __forceinline__ void Update(float (&scores)[kScores], float (&rescale)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float new_max = max[i];
#pragma unroll
      for (int s = 2 * i; s < kScores; s += 4) {
        new_max = fmaxf(new_max, fmaxf(scores[s], scores[s + 1]));
      }
      new_max = QuadMax(new_max);
      // While a row has seen no key its maximum is -inf; any finite one keeps its exponentials at 0.
      const float shift = new_max == -INFINITY ? 0.0f : new_max * factor;
      rescale[i] = ptx::Exp2(fmaf(max[i], factor, -shift));
      max[i] = new_max;
      float sum = 0.0f;
#pragma unroll
      for (int s = 2 * i; s < kScores; s += 4) {
        scores[s] = ptx::Exp2(fmaf(scores[s], factor, -shift));
        scores[s + 1] = ptx::Exp2(fmaf(scores[s + 1], factor, -shift));
        sum += scores[s] + scores[s + 1];
      }
      total[i] = fmaf(total[i], rescale[i], sum);
    }
  }

  // Of row i at the end: what its sum is to be multiplied by, with `sink` (-inf: none), a further score in
  // the units of exp, in the denominator; and the natural log of that.
  __device__ __forceinline__ float Finish(int i, float sink, float* lse) const {
    const float sum = QuadSum(total[i]);
    const float own = max[i] * factor, other = sink * kLog2E;
    const float top = fmaxf(own, other);
    const float weight = ptx::Exp2(own - top);
    const float denominator = fmaf(sum, weight, ptx::Exp2(other - top));
    *lse = (top + log2f(denominator)) * kLn2;
    return weight / denominator;
  }
};

}  // namespace dualkv::cuda::attention_forward
