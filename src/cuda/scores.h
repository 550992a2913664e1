// From the scale and softcap of the C interface to those of the kernels.
#pragma once

#include <algorithm>
#include <limits>
#include <numbers>

#include "cuda/softcap.cuh"
#include "dualkv/dualkv.h"

namespace dualkv::cuda {

// The nearest finite float.
inline float Narrow(double x) {
  constexpr double kMost = std::numeric_limits<float>::max();
  return static_cast<float>(std::clamp(x, -kMost, kMost));
}

inline Softcap MakeSoftcap(const dualkv_attention_params& params) {
  constexpr double kBits = std::numbers::log2e;
  const float scale = Narrow(params.scale * kBits);
  // A scale of 0 becomes one that leaves no score different from 0: hidden scores stay infinite.
  return {.exponent_scale = scale != 0 ? scale : std::numeric_limits<float>::denorm_min(),
          .exponent_cap = Narrow(params.softcap * kBits),
          .inverse_cap = params.softcap > 0 ? Narrow(1 / (params.softcap * kBits)) : 0.0f,
          .tanh_scale = params.softcap > 0 ? Narrow(2 * kBits * params.scale / params.softcap) : 0.0f};
}

}  // namespace dualkv::cuda
