// Elementary functions that keep NaN, which is outside the range that Highway's are specified for. Included
// once for each target.
#if defined(DUALKV_CPU_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DUALKV_CPU_MATH_INL_H_
#undef DUALKV_CPU_MATH_INL_H_
#else
#define DUALKV_CPU_MATH_INL_H_
#endif

#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace dualkv::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// exp(x) with NaN for NaN, for which Highway's gives 0 (release 1.0.3).
template <class D, class V = hn::Vec<D>>
HWY_INLINE V ExpOrNan(D d, V x) {
  return hn::IfThenElse(hn::IsNaN(x), x, hn::Exp(d, x));
}

// tanh(x) with NaN for NaN.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V TanhOrNan(D d, V x) {
  return hn::IfThenElse(hn::IsNaN(x), x, hn::Tanh(d, x));
}

// A score or logit x becomes cap * tanh(x / cap); cap 0 leaves it.
template <class T>
struct Softcap {
  T cap;
  T inverse;

  explicit Softcap(double value)
      : cap(static_cast<T>(value)), inverse(value > 0 ? static_cast<T>(1 / value) : T(0)) {}
  bool active() const { return cap > 0; }

  // tanh(x / cap): the capped value is cap times it, and its derivative 1 - its square.
  template <class D, class V = hn::Vec<D>>
  HWY_INLINE V Tanh(D d, V x) const {
    return TanhOrNan(d, hn::Mul(x, hn::Set(d, inverse)));
  }
};

}  // namespace dualkv::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // DUALKV_CPU_MATH_INL_H_
