// Pieces that the forward and backward of the linear log-prob share. Included once for each target.
//
// Logits are kept transposed, [vocabulary, rows]: a row of hidden states is a lane. A softmax over the
// vocabulary then runs down the lanes with no horizontal step, and what happens in a lane depends on nothing
// but its own row and the weight. A logit is summed over C in one order, however the work is cut: the
// backward recomputes the logits of the forward bit for bit.
#if defined(DUALKV_CPU_LINEAR_LOGPROB_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DUALKV_CPU_LINEAR_LOGPROB_INL_H_
#undef DUALKV_CPU_LINEAR_LOGPROB_INL_H_
#else
#define DUALKV_CPU_LINEAR_LOGPROB_INL_H_
#endif

#include <algorithm>
#include <cstdint>

#include "cpu/arena.h"
#include "cpu/elements.h"
#include "cpu/gemm-inl.h"
#include "cpu/linear_logprob_rows.h"
#include "cpu/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace dualkv::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Sizes of the blocks that the work is cut into, in whole tiles of Gemm, 6 rows by 64 columns: kBlockRows is
// either and so a multiple of both.
inline constexpr int64_t kBlockRows = 192;              // distinct rows of a block, its lanes
inline constexpr int64_t kBlockVocab = 120;             // vocabulary entries whose logits a worker holds
inline constexpr int64_t kSlabVocab = 8 * kBlockVocab;  // entries between two joins of the workers
inline constexpr int64_t kDepth = 256;  // C is cut here: a packed operand stays in the L2 cache
inline constexpr int64_t kPanel = 64;   // columns of C that a gradient task accumulates
inline constexpr int64_t kGroupBytes = int64_t{4} << 20;  // scratch a worker for a group of blocks

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Blocks of rows that the workers take on together: as many as their scratch holds, evenly spread over the
// groups. values_per_row: what a row takes of it.
template <class T>
int64_t BlocksPerGroup(int64_t blocks, int workers, int64_t values_per_row) {
  const int64_t block_bytes = kBlockRows * values_per_row * static_cast<int64_t>(sizeof(T));
  const int64_t most = std::max<int64_t>(1, workers * kGroupBytes / block_bytes);
  return CeilDiv(blocks, CeilDiv(blocks, most));
}

// Copies columns [begin, begin + count) of `rows` rows, row i at row_at(i), to target[i * ld + j], with zeros
// for count <= j < ld.
template <class T, class RowAt>
void CopyColumns(int64_t rows, RowAt row_at, int64_t begin, int64_t count, T* HWY_RESTRICT target,
                 int64_t ld) {
  for (int64_t i = 0; i < rows; ++i) {
    const auto* HWY_RESTRICT row = row_at(i) + begin;
    T* HWY_RESTRICT to = target + i * ld;
    for (int64_t j = 0; j < count; ++j) {
      Convert(row[j], to[j]);
    }
    std::fill(to + count, to + ld, T(0));
  }
}

// The logits: their inputs, and how they are computed.
template <class Element>
class Logits {
 public:
  using T = AccumulatorOf<Element>;

  // Memory of one worker.
  struct Scratch {
    Scratch()
        : arena(kSlabVocab * kPanel + kBlockVocab * kBlockRows + Arena<T>::Rounded(kBlockVocab)),
          operand(arena.Take(kSlabVocab * kPanel)),
          products(arena.Take(kBlockVocab * kBlockRows)),
          bias(arena.Take(kBlockVocab)) {}

    Arena<T> arena;
    T* operand;   // [kBlockVocab, kDepth] or [kSlabVocab, kPanel]: a packed operand of a product
    T* products;  // [kBlockVocab, kBlockRows]: weight . hidden, in the forward turned into logits
    T* bias;      // [kBlockVocab]
  };
  static_assert(kBlockVocab * kDepth <= kSlabVocab * kPanel && kBlockRows <= kSlabVocab);

  Logits(const dualkv_linear_logprob_params& params, const DistinctRows& rows)
      : rows_(rows),
        hidden_(static_cast<const Element*>(params.hidden)),
        weight_(static_cast<const Element*>(params.weight)),
        bias_(static_cast<const Element*>(params.bias)),
        hidden_stride_(params.hidden_row_stride),
        weight_stride_(params.weight_row_stride),
        dim_(params.hidden_dim),
        softcap_(params.softcap),
        inverse_temperature_(static_cast<T>(1 / params.temperature)) {}

  const Element* HiddenOf(int64_t slot) const { return hidden_ + rows_.RowOf(slot) * hidden_stride_; }
  const Element* WeightOf(int64_t token) const { return weight_ + token * weight_stride_; }

  // Writes the hidden states of a block transposed to packed [C, kBlockRows], zero for lanes past its last
  // row.
  void PackHidden(int64_t block, T* HWY_RESTRICT packed) const {
    constexpr int64_t kLine = 64 / sizeof(T);
    const int64_t rows = rows_.BlockSize(block);
    const int64_t width = Arena<T>::Rounded(rows);
    for (int64_t c0 = 0; c0 < dim_; c0 += kLine) {
      const int64_t c1 = std::min(c0 + kLine, dim_);
      for (int64_t i = 0; i < rows; ++i) {
        const Element* row = HiddenOf(rows_.BlockBegin(block) + i);
        for (int64_t c = c0; c < c1; ++c) {
          Convert(row[c], packed[c * kBlockRows + i]);
        }
      }
      for (int64_t c = c0; c < c1; ++c) {
        std::fill(packed + c * kBlockRows + rows, packed + c * kBlockRows + width, T(0));
      }
    }
  }

  // products[v - begin, r] = weight[v] . hidden of row r, and bias[v - begin], for `count` entries of the
  // vocabulary and the rows of a block.
  void Multiply(int64_t begin, int64_t count, const T* packed_hidden, int64_t rows, Scratch& s) const {
    for (int64_t c = 0; c < dim_; c += kDepth) {
      const int64_t depth = std::min(kDepth, dim_ - c);
      CopyColumns(
          count, [&](int64_t v) { return WeightOf(begin + v); }, c, depth, s.operand, depth);
      Gemm<T>(c > 0, count, rows, depth, {s.operand, depth, 1}, packed_hidden + c * kBlockRows, kBlockRows,
              s.products, kBlockRows);
    }
    if (bias_ != nullptr) {
      std::transform(bias_ + begin, bias_ + begin + count, s.bias, [](Element x) {
        T y;
        Convert(x, y);
        return y;
      });
    } else {
      std::fill(s.bias, s.bias + count, T(0));
    }
  }

  // The logit of a product and a bias, and its derivative with respect to either.
  template <class D, class V = hn::Vec<D>>
  HWY_INLINE V Logit(D d, V product, T bias, V& slope) const {
    V x = hn::Add(product, hn::Set(d, bias));
    slope = hn::Set(d, inverse_temperature_);
    if (softcap_.active()) {
      const V tanh = softcap_.Tanh(d, x);
      x = hn::Mul(tanh, hn::Set(d, softcap_.cap));
      slope = hn::Mul(slope, hn::NegMulAdd(tanh, tanh, hn::Set(d, T(1))));
    }
    return hn::Mul(x, hn::Set(d, inverse_temperature_));
  }

 private:
  const DistinctRows& rows_;
  const Element* hidden_;  // [T, C]
  const Element* weight_;  // [V, C]
  const Element* bias_;    // [V] or NULL
  const int64_t hidden_stride_;
  const int64_t weight_stride_;
  const int64_t dim_;
  const Softcap<T> softcap_;
  const T inverse_temperature_;
};

// x, or -1000 if x is less. exp is 0 there, and so is its product with a logit, be that -inf.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V AtLeastExpIsZero(D d, V x) {
  const V floor = hn::Set(d, hn::TFromD<D>(-1000));
  return hn::IfThenElse(hn::Lt(x, floor), floor, x);
}

}  // namespace dualkv::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // DUALKV_CPU_LINEAR_LOGPROB_INL_H_
