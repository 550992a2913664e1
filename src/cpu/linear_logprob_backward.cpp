// Linear log-prob backward on the CPU: recomputes the logits by slabs of the vocabulary.
//
// With p = exp(s - lse), the gradient of a row's logit s_v is
//
//   ds_v = -p_v (G + E (s_v - lse + H)) + sum of the dlogprob of its targets v
//
// where G and E are the sums of dlogprob and dentropy over the row's targets and H is the entropy. From it
// dweight += ds^T hidden and dhidden += ds weight. Each element of a gradient is summed by blocks of rows or
// of the vocabulary in ascending order, by one worker at a time: it does not depend on how many there are.
#include <utility>
#include <vector>

#include "cpu/linear_logprob.h"
#include "cpu/linear_logprob_rows.h"
#include "cpu/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/linear_logprob_backward.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "cpu/linear_logprob-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace dualkv::cpu::HWY_NAMESPACE {

template <class Element>
class LogprobBackward {
  using T = AccumulatorOf<Element>;
  using Scratch = typename Logits<Element>::Scratch;

 public:
  explicit LogprobBackward(const dualkv_linear_logprob_backward_params& params)
      : forward_(params.forward),
        rows_(params.forward, kBlockRows),
        logits_(params.forward, rows_),
        row_gradients_(params, rows_),
        dim_(params.forward.hidden_dim),
        dlogprob_(static_cast<const T*>(params.dlogprob)),
        dhidden_(static_cast<Element*>(params.dhidden)),
        dweight_(static_cast<Element*>(params.dweight)),
        dbias_(static_cast<Element*>(params.dbias)) {}

  void Run() {
    if (rows_.size() == 0) {
      ClearAll();
    } else if (dhidden_ != nullptr || dweight_ != nullptr || dbias_ != nullptr) {
      AddSlabs();
    }
  }

 private:
  // For each distinct row what its gradient needs, zero for the slots past the last row.
  struct RowGradients {
    std::vector<T> lse;
    std::vector<T> entropy;
    std::vector<T> dlogprob;  // G
    std::vector<T> dentropy;  // E

    RowGradients(const dualkv_linear_logprob_backward_params& params, const DistinctRows& rows) {
      for (auto* values : {&lse, &entropy, &dlogprob, &dentropy}) {
        values->resize(rows.blocks() * kBlockRows);
      }
      const dualkv_linear_logprob_params& forward = params.forward;
      for (int64_t m = 0; m < forward.num_targets; ++m) {
        if (forward.targets[m] == DUALKV_IGNORE_TARGET) {
          continue;
        }
        const int64_t slot = rows.SlotOf(forward.rows[m]);
        lse[slot] = static_cast<const T*>(forward.lse)[m];
        entropy[slot] = static_cast<const T*>(forward.entropy)[m];
        if (params.dlogprob != nullptr) {
          dlogprob[slot] += static_cast<const T*>(params.dlogprob)[m];
        }
        if (params.dentropy != nullptr) {
          dentropy[slot] += static_cast<const T*>(params.dentropy)[m];
        }
      }
    }
  };

  // The entries of the vocabulary and the blocks of rows between two joins of the workers.
  struct Step {
    int64_t begin;  // first entry
    int64_t count;  // entries
    int64_t first;  // first block
    int64_t blocks;
    bool last_blocks;  // no rows follow for these entries
  };

  // Buffers that the workers share.
  struct Shared {
    T* packed;       // [group, C, kBlockRows]: hidden states, transposed
    T* dlogits;      // [group, kSlabVocab, kBlockRows]: ds / d product
    T* weight_slab;  // [kSlabVocab, weight_ld]: dweight and dbias of the slab
    T* hidden_sum;   // [distinct rows, hidden_ld]: dhidden
    int64_t weight_ld;
    int64_t hidden_ld;
  };

  void ClearAll() {
    const int64_t vocab = forward_.vocab_size;
    for (auto [data, count] : {std::pair(dhidden_, forward_.hidden_rows * dim_),
                               std::pair(dweight_, vocab * dim_), std::pair(dbias_, vocab)}) {
      if (data != nullptr) {
        std::fill(data, data + count, Element{});
      }
    }
  }

  void AddSlabs() {
    const int64_t slab_blocks = CeilDiv(std::min(kSlabVocab, forward_.vocab_size), kBlockVocab);
    const int workers =
        NumWorkers(forward_.num_threads, std::max(rows_.blocks(), CeilDiv(dim_, kPanel)) * slab_blocks);
    const int64_t group = BlocksPerGroup<T>(rows_.blocks(), workers, dim_ + kSlabVocab);
    const int64_t packed_values = group * dim_ * kBlockRows;
    const int64_t dlogit_values = group * kSlabVocab * kBlockRows;
    const int64_t weight_ld = Arena<T>::Rounded(WeightColumns());
    const int64_t hidden_ld = Arena<T>::Rounded(dim_);
    const int64_t weight_values = WantsWeight() ? kSlabVocab * weight_ld : 0;
    const int64_t hidden_values = dhidden_ != nullptr ? rows_.size() * hidden_ld : 0;
    Arena<T> arena(packed_values + dlogit_values + weight_values + hidden_values);
    const Shared shared = {.packed = arena.Take(packed_values),
                           .dlogits = arena.Take(dlogit_values),
                           .weight_slab = arena.Take(weight_values),
                           .hidden_sum = arena.Take(hidden_values),
                           .weight_ld = weight_ld,
                           .hidden_ld = hidden_ld};
    std::vector<Scratch> scratch(workers);

    for (int64_t begin = 0; begin < forward_.vocab_size; begin += kSlabVocab) {
      for (int64_t first = 0; first < rows_.blocks(); first += group) {
        const Step step = {.begin = begin,
                           .count = std::min(kSlabVocab, forward_.vocab_size - begin),
                           .first = first,
                           .blocks = std::min(group, rows_.blocks() - first),
                           .last_blocks = first + group >= rows_.blocks()};
        Run(step, shared, workers, scratch);
      }
    }
    if (dhidden_ != nullptr) {
      ParallelFor(workers, CeilDiv(forward_.hidden_rows, kBlockRows),
                  [&](int, int64_t task) { StoreHidden(task * kBlockRows, shared); });
    }
  }

  void Run(const Step& step, const Shared& shared, int workers, std::vector<Scratch>& scratch) {
    ParallelFor(workers, step.blocks, [&](int, int64_t b) {
      logits_.PackHidden(step.first + b, shared.packed + b * dim_ * kBlockRows);
    });
    const int64_t vocab_blocks = CeilDiv(step.count, kBlockVocab);
    ParallelFor(workers, vocab_blocks * step.blocks, [&](int worker, int64_t task) {
      SetLogitGradients(step, shared, task % step.blocks, task / step.blocks * kBlockVocab, scratch[worker]);
    });
    if (WantsWeight()) {
      // Without dweight only the panel that holds dbias.
      const int64_t first_panel = dweight_ != nullptr ? 0 : dim_ / kPanel;
      const int64_t panels = CeilDiv(WeightColumns(), kPanel) - first_panel;
      ParallelFor(workers, panels * vocab_blocks, [&](int worker, int64_t task) {
        AddWeightPanel(step, shared, (first_panel + task / vocab_blocks) * kPanel,
                       task % vocab_blocks * kBlockVocab, scratch[worker]);
      });
    }
    if (dhidden_ != nullptr) {
      ParallelFor(workers, CeilDiv(dim_, kPanel) * step.blocks, [&](int worker, int64_t task) {
        AddHiddenPanel(step, shared, task % step.blocks, task / step.blocks * kPanel, scratch[worker]);
      });
    }
  }

  // dlogits of block step.first + b and the entries of the slab from v0 on, kBlockVocab at most.
  void SetLogitGradients(const Step& step, const Shared& shared, int64_t b, int64_t v0, Scratch& s) const {
    const int64_t block = step.first + b;
    const int64_t rows = rows_.BlockSize(block);
    const int64_t count = std::min(kBlockVocab, step.count - v0);
    T* dlogits = shared.dlogits + (b * kSlabVocab + v0) * kBlockRows;
    logits_.Multiply(step.begin + v0, count, shared.packed + b * dim_ * kBlockRows, rows, s);

    const hn::ScalableTag<T> d;
    for (int64_t i = 0; i < rows; i += hn::Lanes(d)) {
      const int64_t slot = rows_.BlockBegin(block) + i;
      const auto lse = hn::LoadU(d, row_gradients_.lse.data() + slot);
      const auto entropy = hn::LoadU(d, row_gradients_.entropy.data() + slot);
      const auto dlogprob = hn::LoadU(d, row_gradients_.dlogprob.data() + slot);
      const auto dentropy = hn::LoadU(d, row_gradients_.dentropy.data() + slot);
      for (int64_t v = 0; v < count; ++v) {
        hn::Vec<decltype(d)> slope;
        const auto logit = logits_.Logit(d, hn::LoadU(d, s.products + v * kBlockRows + i), s.bias[v], slope);
        const auto log_p = AtLeastExpIsZero(d, hn::Sub(logit, lse));
        const auto factor = hn::MulAdd(dentropy, hn::Add(log_p, entropy), dlogprob);
        hn::StoreU(hn::Neg(hn::Mul(hn::Mul(ExpOrNan(d, log_p), factor), slope)), d,
                   dlogits + v * kBlockRows + i);
      }
    }

    if (dlogprob_ == nullptr) {
      return;
    }
    const int64_t begin = step.begin + v0;
    for (const auto& target : rows_.Targets(block, begin, begin + count)) {
      const hn::CappedTag<T, 1> d1;
      const int64_t v = target.token - begin;
      const int64_t at = v * kBlockRows + target.slot - rows_.BlockBegin(block);
      hn::Vec<decltype(d1)> slope;
      logits_.Logit(d1, hn::Set(d1, s.products[at]), s.bias[v], slope);
      dlogits[at] += dlogprob_[target.index] * hn::GetLane(slope);
    }
  }

  bool WantsWeight() const { return dweight_ != nullptr || dbias_ != nullptr; }

  // The bias is one more column of the weight, C, for which every hidden state is 1.
  int64_t WeightColumns() const { return dbias_ != nullptr ? dim_ + 1 : dim_; }

  // weight_slab += dlogits . hidden for the columns from c on, kPanel at most, and the entries of the slab
  // from v0 on, kBlockVocab at most.
  void AddWeightPanel(const Step& step, const Shared& shared, int64_t c, int64_t v0, Scratch& s) const {
    const int64_t count = std::min(kBlockVocab, step.count - v0);
    const int64_t hidden_columns = std::clamp<int64_t>(dim_ - c, 0, kPanel);
    const int64_t columns = std::min(kPanel, WeightColumns() - c);
    T* sum = shared.weight_slab + v0 * shared.weight_ld + c;
    for (int64_t b = 0; b < step.blocks; ++b) {
      const int64_t block = step.first + b;
      const int64_t rows = rows_.BlockSize(block);
      CopyColumns(
          rows, [&](int64_t i) { return logits_.HiddenOf(rows_.BlockBegin(block) + i); }, c, hidden_columns,
          s.operand, kPanel);
      if (columns > hidden_columns) {
        for (int64_t i = 0; i < rows; ++i) {
          s.operand[i * kPanel + hidden_columns] = 1;
        }
      }
      Gemm<T>(block > 0, count, columns, rows,
              {shared.dlogits + (b * kSlabVocab + v0) * kBlockRows, kBlockRows, 1}, s.operand, kPanel, sum,
              shared.weight_ld);
    }
    if (step.last_blocks) {
      for (int64_t v = 0; v < count; ++v) {
        const int64_t token = step.begin + v0 + v;
        const T* from = sum + v * shared.weight_ld;
        for (int64_t j = 0; dweight_ != nullptr && j < hidden_columns; ++j) {
          Convert(from[j], dweight_[token * dim_ + c + j]);
        }
        if (columns > hidden_columns) {
          Convert(from[hidden_columns], dbias_[token]);
        }
      }
    }
  }

  // hidden_sum += dlogits^T . weight of block step.first + b for the columns from c on, kPanel at most.
  void AddHiddenPanel(const Step& step, const Shared& shared, int64_t b, int64_t c, Scratch& s) const {
    const int64_t block = step.first + b;
    const int64_t columns = std::min(kPanel, dim_ - c);
    CopyColumns(
        step.count, [&](int64_t v) { return logits_.WeightOf(step.begin + v); }, c, columns, s.operand,
        kPanel);
    Gemm<T>(step.begin > 0, rows_.BlockSize(block), columns, step.count,
            {shared.dlogits + b * kSlabVocab * kBlockRows, 1, kBlockRows}, s.operand, kPanel,
            shared.hidden_sum + rows_.BlockBegin(block) * shared.hidden_ld + c, shared.hidden_ld);
  }

  // Writes dhidden for kBlockRows rows of the hidden states; those without targets get 0.
  void StoreHidden(int64_t begin, const Shared& shared) const {
    const int64_t end = std::min(begin + kBlockRows, forward_.hidden_rows);
    for (int64_t row = begin; row < end; ++row) {
      Element* to = dhidden_ + row * dim_;
      const int64_t slot = rows_.SlotOf(row);
      if (slot == DistinctRows::kNone) {
        std::fill(to, to + dim_, Element{});
        continue;
      }
      for (int64_t c = 0; c < dim_; ++c) {
        Convert(shared.hidden_sum[slot * shared.hidden_ld + c], to[c]);
      }
    }
  }

  const dualkv_linear_logprob_params& forward_;
  const DistinctRows rows_;
  const Logits<Element> logits_;
  const RowGradients row_gradients_;
  const int64_t dim_;
  const T* const dlogprob_;  // [M] or NULL
  Element* const dhidden_;   // [T, C] or NULL
  Element* const dweight_;   // [V, C] or NULL
  Element* const dbias_;     // [V] or NULL
};

void LinearLogprobBackwardTarget(const dualkv_linear_logprob_backward_params& params) {
  VisitDtype(params.forward.dtype, [&]<class Element> { LogprobBackward<Element>(params).Run(); });
}

}  // namespace dualkv::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace dualkv::cpu {

HWY_EXPORT(LinearLogprobBackwardTarget);

void LinearLogprobBackward(const dualkv_linear_logprob_backward_params& params) {
  HWY_DYNAMIC_DISPATCH(LinearLogprobBackwardTarget)(params);
}

}  // namespace dualkv::cpu
#endif  // HWY_ONCE
