// Element types of tensors, the type that each is accumulated in, and dispatch on dualkv_dtype.
#pragma once

#include <cstdint>

#include "core/error.h"
#include "core/half.h"
#include "dualkv/dualkv.h"

namespace dualkv::cpu {

using core::BFloat16;
using core::Float16;

template <class Element>
struct Accumulator {
  using Type = float;
};
template <>
struct Accumulator<double> {
  using Type = double;
};
template <class Element>
using AccumulatorOf = typename Accumulator<Element>::Type;

inline void Convert(double x, double& y) { y = x; }
inline void Convert(float x, float& y) { y = x; }
inline void Convert(BFloat16 x, float& y) { y = core::ToFloat(x); }
inline void Convert(Float16 x, float& y) { y = core::ToFloat(x); }
inline void Convert(float x, BFloat16& y) { y = core::ToBFloat16(x); }
inline void Convert(float x, Float16& y) { y = core::ToFloat16(x); }

// Calls visit.template operator()<Element>() for the element type of `dtype`.
template <class Visitor>
void VisitDtype(int32_t dtype, Visitor&& visit) {
  switch (dtype) {
    case DUALKV_FLOAT64:
      return visit.template operator()<double>();
    case DUALKV_FLOAT32:
      return visit.template operator()<float>();
    case DUALKV_BFLOAT16:
      return visit.template operator()<BFloat16>();
    case DUALKV_FLOAT16:
      return visit.template operator()<Float16>();
    default:
      throw core::InvalidArgument(core::Concat("dtype must be a dualkv_dtype, 0 to 3, got ", dtype));
  }
}

}  // namespace dualkv::cpu
