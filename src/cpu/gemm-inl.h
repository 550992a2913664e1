// Matrix product of small row-major blocks: the one inner loop of the CPU backend. Included once for each
// target.
//
// Lanes run along the columns of B and C, and each element of C is a chain of fused multiply-adds over k in
// ascending order, whatever its place in the block: results do not depend on how a problem is cut into blocks
// of rows or columns.
#if defined(DUALKV_CPU_GEMM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DUALKV_CPU_GEMM_INL_H_
#undef DUALKV_CPU_GEMM_INL_H_
#else
#define DUALKV_CPU_GEMM_INL_H_
#endif

#include <algorithm>
#include <cstdint>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace dualkv::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// A matrix whose element (i, j) is at data[i * row_stride + j * column_stride].
template <class T>
struct Strided {
  const T* data;
  int64_t row_stride;
  int64_t column_stride;
};

// Vectors of columns in a register tile, times 6 rows: 24 of the 32 registers of AVX-512 and NEON, 12 of 16
// elsewhere.
inline constexpr int kTileRows = 6;
inline constexpr int64_t kChain = 128;
inline constexpr int kTileVectors = (HWY_TARGET <= HWY_AVX3 || HWY_ARCH_ARM_A64) ? 4 : 2;

template <int kRows, int kVectors, class T>
HWY_INLINE void GemmTile(bool accumulate, int64_t depth, Strided<T> a, const T* HWY_RESTRICT b, int64_t ldb,
                         T* HWY_RESTRICT c, int64_t ldc) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  const int64_t lanes = hn::Lanes(d);
  V sum[kRows][kVectors];
  HWY_UNROLL(8)
  for (int i = 0; i < kRows; ++i) {
    HWY_UNROLL(8)
    for (int j = 0; j < kVectors; ++j) {
      sum[i][j] = hn::Zero(d);
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    V row[kVectors];
    HWY_UNROLL(8)
    for (int j = 0; j < kVectors; ++j) {
      row[j] = hn::LoadU(d, b + k * ldb + j * lanes);
    }
    const T* column = a.data + k * a.column_stride;
    HWY_UNROLL(8)
    for (int i = 0; i < kRows; ++i) {
      const V factor = hn::Set(d, column[i * a.row_stride]);
      HWY_UNROLL(8)
      for (int j = 0; j < kVectors; ++j) {
        sum[i][j] = hn::MulAdd(factor, row[j], sum[i][j]);
      }
    }
  }
  HWY_UNROLL(8)
  for (int i = 0; i < kRows; ++i) {
    HWY_UNROLL(8)
    for (int j = 0; j < kVectors; ++j) {
      T* at = c + i * ldc + j * lanes;
      hn::StoreU(accumulate ? hn::Add(hn::LoadU(d, at), sum[i][j]) : sum[i][j], d, at);
    }
  }
}

template <int kVectors, class T>
HWY_NOINLINE void GemmColumns(bool accumulate, int64_t rows, int64_t depth, Strided<T> a,
                              const T* HWY_RESTRICT b, int64_t ldb, T* HWY_RESTRICT c, int64_t ldc) {
  int64_t i = 0;
  for (; i + kTileRows <= rows; i += kTileRows) {
    GemmTile<kTileRows, kVectors>(accumulate, depth,
                                  Strided<T>{a.data + i * a.row_stride, a.row_stride, a.column_stride}, b,
                                  ldb, c + i * ldc, ldc);
  }
  for (; i < rows; ++i) {
    GemmTile<1, kVectors>(accumulate, depth,
                          Strided<T>{a.data + i * a.row_stride, a.row_stride, a.column_stride}, b, ldb,
                          c + i * ldc, ldc);
  }
}

// C = A B, or C += A B: A is [rows, depth], B [depth, columns] and C [rows, columns] are row-major. Rows of B
// and C are read and written in whole vectors: they must have room for `columns` rounded up to Lanes().
template <class T>
void Gemm(bool accumulate, int64_t rows, int64_t columns, int64_t depth, Strided<T> a, const T* b,
          int64_t ldb, T* c, int64_t ldc) {
  const int64_t lanes = hn::Lanes(hn::ScalableTag<T>());
  int64_t k = 0;
  do {  // once even if depth is 0, to write C
    const int64_t chain = std::min(depth - k, kChain);
    int64_t j = 0;
    for (; j + kTileVectors * lanes <= columns; j += kTileVectors * lanes) {
      GemmColumns<kTileVectors>(accumulate || k > 0, rows, chain, a, b + j, ldb, c + j, ldc);
    }
    for (; j < columns; j += lanes) {
      GemmColumns<1>(accumulate || k > 0, rows, chain, a, b + j, ldb, c + j, ldc);
    }
    a.data += chain * a.column_stride;
    b += chain * ldb;
    k += chain;
  } while (k < depth);
}

}  // namespace dualkv::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // DUALKV_CPU_GEMM_INL_H_
