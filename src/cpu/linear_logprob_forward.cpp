// Linear log-prob forward on the CPU: an online softmax over the vocabulary for each distinct row.
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/linear_logprob.h"
#include "cpu/linear_logprob_rows.h"
#include "cpu/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/linear_logprob_forward.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "cpu/linear_logprob-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace dualkv::cpu::HWY_NAMESPACE {

template <class Element>
class LogprobForward {
  using T = AccumulatorOf<Element>;
  using D = hn::ScalableTag<T>;
  using V = hn::Vec<D>;
  using Scratch = typename Logits<Element>::Scratch;

 public:
  explicit LogprobForward(const dualkv_linear_logprob_params& params)
      : params_(params),
        rows_(params, kBlockRows),
        logits_(params, rows_),
        spans_(CeilDiv(params.vocab_size, kSlabVocab)),
        logprob_(static_cast<T*>(params.logprob)),
        entropy_(static_cast<T*>(params.entropy)),
        lse_(static_cast<T*>(params.lse)) {}

  void Run() {
    ClearIgnored();
    if (rows_.size() == 0) {
      return;
    }
    const int workers = NumWorkers(params_.num_threads, rows_.blocks() * spans_);
    const int64_t group = BlocksPerGroup<T>(rows_.blocks(), workers, params_.hidden_dim + 3 * spans_);
    const int64_t block_values = params_.hidden_dim * kBlockRows;
    Arena<T> arena(group * block_values);
    T* packed = arena.Take(group * block_values);  // [group, C, kBlockRows]
    std::vector<Softmax> parts(group * spans_);    // [group, spans]
    std::vector<Scratch> scratch(workers);
    for (int64_t first = 0; first < rows_.blocks(); first += group) {
      const int64_t blocks = std::min(group, rows_.blocks() - first);
      ParallelFor(workers, blocks,
                  [&](int, int64_t b) { logits_.PackHidden(first + b, packed + b * block_values); });
      // Spans are the outer loop: workers that run side by side read the same weights.
      ParallelFor(workers, spans_ * blocks, [&](int worker, int64_t task) {
        const int64_t span = task / blocks;
        const int64_t b = task % blocks;
        AddSpan(first + b, span, packed + b * block_values, parts[b * spans_ + span], scratch[worker]);
      });
      ParallelFor(workers, blocks, [&](int, int64_t b) { Finish(first + b, &parts[b * spans_]); });
    }
  }

 private:
  // Softmax of the rows of a block over part of the vocabulary, with e = exp(logit - max).
  struct Softmax {
    T max[kBlockRows];
    T sum[kBlockRows];     // of e
    T moment[kBlockRows];  // of e (logit - max)
  };

  // The same for a vector of rows.
  struct Lanes {
    V max;
    V sum;
    V moment;

    static Lanes Load(const Softmax& softmax, int64_t i) {
      const D d;
      return {hn::LoadU(d, softmax.max + i), hn::LoadU(d, softmax.sum + i), hn::LoadU(d, softmax.moment + i)};
    }

    void Store(Softmax& softmax, int64_t i) const {
      const D d;
      hn::StoreU(max, d, softmax.max + i);
      hn::StoreU(sum, d, softmax.sum + i);
      hn::StoreU(moment, d, softmax.moment + i);
    }

    void RaiseMax(V new_max) {
      const D d;
      const V shift = AtLeastExpIsZero(d, hn::Sub(max, new_max));
      const V rescale = ExpOrNan(d, shift);
      moment = hn::Mul(rescale, hn::MulAdd(sum, shift, moment));
      sum = hn::Mul(rescale, sum);
      max = new_max;
    }
  };

  void ClearIgnored() {
    for (int64_t m = 0; m < params_.num_targets; ++m) {
      if (params_.targets[m] == DUALKV_IGNORE_TARGET) {
        logprob_[m] = 0;
        entropy_[m] = 0;
        if (lse_ != nullptr) {
          lse_[m] = 0;
        }
      }
    }
  }

  // The softmax of a block over one span of kSlabVocab entries. Leaves the logits of targets in logprob.
  void AddSpan(int64_t block, int64_t span, const T* packed, Softmax& softmax, Scratch& s) const {
    const int64_t rows = rows_.BlockSize(block);
    std::fill(softmax.max, softmax.max + kBlockRows, std::numeric_limits<T>::lowest());
    std::fill(softmax.sum, softmax.sum + kBlockRows, T(0));
    std::fill(softmax.moment, softmax.moment + kBlockRows, T(0));
    const int64_t span_end = std::min((span + 1) * kSlabVocab, params_.vocab_size);
    for (int64_t begin = span * kSlabVocab; begin < span_end; begin += kBlockVocab) {
      const int64_t count = std::min(kBlockVocab, span_end - begin);
      logits_.Multiply(begin, count, packed, rows, s);
      for (int64_t i = 0; i < rows; i += hn::Lanes(D())) {
        AddBlock(count, i, softmax, s);
      }
      for (const auto& target : rows_.Targets(block, begin, begin + count)) {
        logprob_[target.index] =
            s.products[(target.token - begin) * kBlockRows + target.slot - rows_.BlockBegin(block)];
      }
    }
  }

  // Turns the products of the vector of rows at i into logits and adds them to their softmax.
  void AddBlock(int64_t count, int64_t i, Softmax& softmax, Scratch& s) const {
    const D d;
    Lanes lanes = Lanes::Load(softmax, i);
    V max = lanes.max;
    for (int64_t v = 0; v < count; ++v) {
      T* at = s.products + v * kBlockRows + i;
      V slope;
      const V logit = logits_.Logit(d, hn::LoadU(d, at), s.bias[v], slope);
      hn::StoreU(logit, d, at);
      max = hn::Max(max, logit);
    }
    lanes.RaiseMax(max);
    V sum = hn::Zero(d);
    V moment = hn::Zero(d);
    for (int64_t v = 0; v < count; ++v) {
      const V shift = AtLeastExpIsZero(d, hn::Sub(hn::LoadU(d, s.products + v * kBlockRows + i), max));
      const V e = ExpOrNan(d, shift);
      sum = hn::Add(sum, e);
      moment = hn::MulAdd(e, shift, moment);
    }
    lanes.sum = hn::Add(lanes.sum, sum);
    lanes.moment = hn::Add(lanes.moment, moment);
    lanes.Store(softmax, i);
  }

  // Joins the spans in order and writes the results of a block's targets.
  void Finish(int64_t block, const Softmax* parts) const {
    Softmax softmax = parts[0];
    for (int64_t i = 0; i < rows_.BlockSize(block); i += hn::Lanes(D())) {
      Lanes joined = Lanes::Load(softmax, i);
      for (int64_t span = 1; span < spans_; ++span) {
        Lanes part = Lanes::Load(parts[span], i);
        const V max = hn::Max(joined.max, part.max);
        joined.RaiseMax(max);
        part.RaiseMax(max);
        joined.sum = hn::Add(joined.sum, part.sum);
        joined.moment = hn::Add(joined.moment, part.moment);
      }
      joined.Store(softmax, i);
    }
    for (const auto& target : rows_.Targets(block)) {
      const int64_t i = target.slot - rows_.BlockBegin(block);
      const T log_sum = std::log(softmax.sum[i]);
      logprob_[target.index] = (logprob_[target.index] - softmax.max[i]) - log_sum;
      entropy_[target.index] = log_sum - softmax.moment[i] / softmax.sum[i];
      if (lse_ != nullptr) {
        lse_[target.index] = softmax.max[i] + log_sum;
      }
    }
  }

  const dualkv_linear_logprob_params& params_;
  const DistinctRows rows_;
  const Logits<Element> logits_;
  const int64_t spans_;
  T* const logprob_;  // [M]
  T* const entropy_;  // [M]
  T* const lse_;      // [M] or NULL
};

void LinearLogprobForwardTarget(const dualkv_linear_logprob_params& params) {
  VisitDtype(params.dtype, [&]<class Element> { LogprobForward<Element>(params).Run(); });
}

}  // namespace dualkv::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace dualkv::cpu {

HWY_EXPORT(LinearLogprobForwardTarget);

void LinearLogprobForward(const dualkv_linear_logprob_params& params) {
  HWY_DYNAMIC_DISPATCH(LinearLogprobForwardTarget)(params);
}

}  // namespace dualkv::cpu
#endif  // HWY_ONCE
