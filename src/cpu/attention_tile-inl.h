// Pieces that the attention forward and backward share. Included once for each target.
//
// Scores are kept transposed, [keys, rows]: a query row is a lane. Maxima, sums and exponentials of a softmax
// then run down the lanes with no horizontal step, and what happens in a lane depends on nothing but its own
// row and the keys.
#if defined(DUALKV_CPU_ATTENTION_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DUALKV_CPU_ATTENTION_TILE_INL_H_
#undef DUALKV_CPU_ATTENTION_TILE_INL_H_
#else
#define DUALKV_CPU_ATTENTION_TILE_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "core/visibility.h"
#include "cpu/elements.h"
#include "cpu/gemm-inl.h"
#include "cpu/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace dualkv::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

template <class T>
int64_t RoundUpToLanes(int64_t count) {
  const int64_t lanes = hn::Lanes(hn::ScalableTag<T>());
  return (count + lanes - 1) / lanes * lanes;
}

// A block of rows of one head: row i is `dim` elements at data + i * stride.
template <class Element>
struct HeadRows {
  const Element* data;
  int64_t stride;
};

template <class Element>
HeadRows<Element> RowsOfHead(const dualkv_tensor& tensor, int64_t row, int64_t head) {
  return {static_cast<const Element*>(tensor.data) + row * tensor.row_stride + head * tensor.head_stride,
          tensor.row_stride};
}

// Copies rows to target[i * ld + d], zero for dim <= d < ld.
template <class Element, class T>
void CopyRows(HeadRows<Element> rows, int64_t count, int64_t dim, T* HWY_RESTRICT target, int64_t ld) {
  for (int64_t i = 0; i < count; ++i) {
    const Element* HWY_RESTRICT row = rows.data + i * rows.stride;
    T* HWY_RESTRICT to = target + i * ld;
    for (int64_t d = 0; d < dim; ++d) {
      Convert(row[d], to[d]);
    }
    std::fill(to + dim, to + ld, T(0));
  }
}

// Writes factor * rows transposed to target[d * ld + i], zero for count <= i < width.
template <class T>
void Transpose(const T* HWY_RESTRICT rows, int64_t stride, int64_t count, int64_t dim, T factor,
               T* HWY_RESTRICT target, int64_t ld, int64_t width) {
  constexpr int64_t kBlock = 16;  // columns of a cache line
  for (int64_t d0 = 0; d0 < dim; d0 += kBlock) {
    const int64_t d1 = std::min(d0 + kBlock, dim);
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t d = d0; d < d1; ++d) {
        target[d * ld + i] = factor * rows[i * stride + d];
      }
    }
    for (int64_t d = d0; d < d1; ++d) {
      std::fill(target + d * ld + count, target + d * ld + width, T(0));
    }
  }
}

// For each lane of a query tile the keys of a tile that its row sees: [low, high), counted from the tile's
// first key.
template <class T>
struct LaneBounds {
  T* low;   // [width]
  T* high;  // [width]

  void Set(const dualkv_plan_view& plan, int32_t row_begin, int64_t rows, int64_t width, int32_t segment,
           int32_t key_begin, int64_t keys) {
    for (int64_t i = 0; i < rows; ++i) {
      const auto row = static_cast<int32_t>(row_begin + i);
      const int32_t position = plan.window_left >= 0 ? plan.positions[row] : 0;  // matters to windows only
      const core::Interval seen = core::VisibleKeys(row, position, plan.segments[segment], plan.window_left);
      low[i] = static_cast<T>(std::clamp<int64_t>(int64_t{seen.begin} - key_begin, 0, keys));
      high[i] = static_cast<T>(std::clamp<int64_t>(int64_t{seen.end} - key_begin, 0, keys));
    }
    std::fill(low + rows, low + width, T(0));
    std::fill(high + rows, high + width, T(0));
  }
};

// The lanes that see key `key` of the tile.
template <class D, class V = hn::Vec<D>>
HWY_INLINE auto SeenBy(D d, V low, V high, int64_t key) {
  const V k = hn::Set(d, static_cast<hn::TFromD<D>>(key));
  return hn::And(hn::Ge(k, low), hn::Lt(k, high));
}

}  // namespace dualkv::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // DUALKV_CPU_ATTENTION_TILE_INL_H_
