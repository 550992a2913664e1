// Scores in the units of base-2 exponents, softcapped or not.
#pragma once

#include "cuda/ptx/warpgroup.cuh"

namespace dualkv::cuda {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

// exponent_scale * q.k; softcapped, exponent_cap * tanh(tanh_scale / 2 * q.k), where tanh_scale is in the
// units of base-2 exponents too.
struct Softcap {
  float exponent_scale;  // not 0
  float exponent_cap;    // 0: no softcap
  float inverse_cap;
  float tanh_scale;

  // tanh(x) = 1 - 2 / (1 + exp(2 x)), and near 0, where that difference has no digits left, x - x^3 / 3.
  __device__ __forceinline__ float operator()(float score) const {
    constexpr float kUnit = 2 * kLog2E;  // of t, which is 2 x as a base-2 exponent
    constexpr float kNear = 0.05f * kUnit, kThird = 1 / (3 * kUnit * kUnit);
    const float t = score * tanh_scale;
    const float near = score * exponent_scale * fmaf(-kThird * t, t, 1.0f);
    const float far = fmaf(ptx::Reciprocal(1.0f + ptx::Exp2(t)), -2 * exponent_cap, exponent_cap);
    return fabsf(t) < kNear ? near : far;
  }

  // Of a score that has been softcapped: 1 - tanh(x)^2.
  __device__ __forceinline__ float Derivative(float capped) const {
    const float tanh = capped * inverse_cap;
    return fmaf(-tanh, tanh, 1.0f);
  }
};

}  // namespace dualkv::cuda
