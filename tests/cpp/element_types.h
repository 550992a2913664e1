// The element types of tensors as tests see them.
#pragma once

#include "core/half.h"
#include "dualkv/dualkv.h"

namespace dualkv::testing {

using core::BFloat16;
using core::Float16;

inline void Convert(double x, double& y) { y = x; }
inline void Convert(double x, float& y) { y = static_cast<float>(x); }
inline void Convert(double x, BFloat16& y) { y = core::ToBFloat16(static_cast<float>(x)); }
inline void Convert(double x, Float16& y) { y = core::ToFloat16(static_cast<float>(x)); }
inline double ToDouble(double x) { return x; }
inline double ToDouble(float x) { return x; }
inline double ToDouble(BFloat16 x) { return core::ToFloat(x); }
inline double ToDouble(Float16 x) { return core::ToFloat(x); }

template <class Element>
struct Type;
template <>
struct Type<double> {
  using Accumulator = double;
  static constexpr dualkv_dtype kDtype = DUALKV_FLOAT64;
  static constexpr double kEpsilon = 0x1p-52;
};
template <>
struct Type<float> {
  using Accumulator = float;
  static constexpr dualkv_dtype kDtype = DUALKV_FLOAT32;
  static constexpr double kEpsilon = 0x1p-23;
};
template <>
struct Type<BFloat16> {
  using Accumulator = float;
  static constexpr dualkv_dtype kDtype = DUALKV_BFLOAT16;
  static constexpr double kEpsilon = 0x1p-7;
};
template <>
struct Type<Float16> {
  using Accumulator = float;
  static constexpr dualkv_dtype kDtype = DUALKV_FLOAT16;
  static constexpr double kEpsilon = 0x1p-10;
};

}  // namespace dualkv::testing
