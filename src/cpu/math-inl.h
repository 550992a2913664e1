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

}  // namespace dualkv::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // DUALKV_CPU_MATH_INL_H_
