// Attention forward on the CPU: online softmax over the key tiles that the plan lists for each query tile.
#include <cmath>
#include <memory>
#include <vector>

#include "cpu/arena.h"
#include "cpu/attention.h"
#include "cpu/elements.h"
#include "cpu/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/attention_forward.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "cpu/attention_tile-inl.h"
#include "cpu/gemm-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace dualkv::cpu::HWY_NAMESPACE {

template <class Element>
class Forward {
  using T = AccumulatorOf<Element>;
  static constexpr T kInfinity = std::numeric_limits<T>::infinity();

 public:
  Forward(const dualkv_attention_params& params, const core::Plan& plan)
      : params_(params),
        plan_(plan.View()),
        keys_only_(plan.keys_only),
        dim_(params.head_dim),
        ld_(RoundUpToLanes<T>(plan_.forward.query_tile)),
        key_tile_(plan_.forward.key_tile),
        softcap_(params.softcap) {}

  void Run() {
    const int64_t tasks = plan_.forward.num_tiles * params_.num_heads;
    const int workers = NumWorkers(params_.num_threads, tasks);
    std::vector<std::unique_ptr<Scratch>> scratch;
    scratch.reserve(workers);
    for (int w = 0; w < workers; ++w) {
      scratch.push_back(std::make_unique<Scratch>(*this));
    }
    ClearRowsWithoutQueries();
    ParallelFor(workers, tasks, [&](int worker, int64_t task) {
      RunTile(*scratch[worker], plan_.forward.tiles[task / params_.num_heads], task % params_.num_heads);
    });
  }

 private:
  // Memory of one worker. Columns of the [.., ld] buffers are the rows of the query tile.
  struct Scratch {
    explicit Scratch(const Forward& f)
        : arena(Arena<T>::Rounded(f.ld_ * f.dim_) * 3 + Arena<T>::Rounded(f.ld_ * f.key_tile_) +
                Arena<T>::Rounded(f.ld_) * 4 + Arena<T>::Rounded(f.key_tile_ * f.dim_) * 2),
          rows(arena.Take(f.ld_ * f.dim_)),
          queries(arena.Take(f.ld_ * f.dim_)),
          sum(arena.Take(f.ld_ * f.dim_)),
          scores(arena.Take(f.ld_ * f.key_tile_)),
          max(arena.Take(f.ld_)),
          total(arena.Take(f.ld_)),
          bounds{arena.Take(f.ld_), arena.Take(f.ld_)},
          keys(arena.Take(f.key_tile_ * f.dim_)),
          values(arena.Take(f.key_tile_ * f.dim_)) {}

    Arena<T> arena;
    T* rows;     // [query_tile, D]: the tile's queries, later its output
    T* queries;  // [D, ld]: scale * q, transposed
    T* sum;      // [D, ld]: sum of exp(score - max) * v
    T* scores;   // [key_tile, ld]: scores, then exp(score - max)
    T* max;      // [ld]: largest score so far
    T* total;    // [ld]: sum of exp(score - max)
    LaneBounds<T> bounds;
    T* keys;    // [key_tile, D]
    T* values;  // [key_tile, D]
  };

  // Rows that the plan visits no tile for: past the last segment, or keys only.
  void ClearRowsWithoutQueries() {
    auto clear = [&](int64_t begin, int64_t end) {
      for (int64_t row = std::max<int64_t>(begin, 0); row < end; ++row) {
        for (int64_t h = 0; h < params_.num_heads; ++h) {
          Element* out = static_cast<Element*>(params_.out.data) + row * params_.out.row_stride +
                         h * params_.out.head_stride;
          std::fill(out, out + dim_, Element{});
          if (params_.lse != nullptr) {
            static_cast<T*>(params_.lse)[h * params_.query_rows + row] = -kInfinity;
          }
        }
      }
    };
    for (int64_t s = 0; s < plan_.num_segments; ++s) {
      if (keys_only_[s]) {
        clear(plan_.segments[s].begin - params_.query_row_begin,
              plan_.segments[s].end - params_.query_row_begin);
      }
    }
    clear(plan_.total_tokens - params_.query_row_begin, params_.query_rows);
  }

  void RunTile(Scratch& s, const dualkv_tile& tile, int64_t head) {
    const int64_t rows = tile.end - tile.begin;
    const int64_t width = RoundUpToLanes<T>(rows);
    const int64_t kv_head = head / (params_.num_heads / params_.num_kv_heads);
    CopyRows(RowsOfHead<Element>(params_.q, tile.begin - params_.query_row_begin, head), rows, dim_, s.rows,
             dim_);
    Transpose(s.rows, dim_, rows, dim_, static_cast<T>(params_.scale), s.queries, ld_, width);
    std::fill(s.sum, s.sum + dim_ * ld_, T(0));
    std::fill(s.max, s.max + width, -kInfinity);
    std::fill(s.total, s.total + width, T(0));

    for (int32_t r = tile.run_begin; r < tile.run_end; ++r) {
      const dualkv_run& run = plan_.forward.runs[r];
      for (int32_t begin = run.begin; begin < run.end; begin += key_tile_) {
        const int64_t keys = std::min(run.end - begin, key_tile_);
        const HeadRows<T> k = LoadRows(RowsOfHead<Element>(params_.k, begin, kv_head), keys, s.keys);
        const HeadRows<T> v = LoadRows(RowsOfHead<Element>(params_.v, begin, kv_head), keys, s.values);

        // scores = K (scale Q)^T: [keys, rows]
        Gemm<T>(false, keys, width, dim_, {k.data, k.stride, 1}, s.queries, ld_, s.scores, ld_);
        if (run.masked) {
          s.bounds.Set(plan_, tile.begin, rows, width, run.segment, begin, keys);
          Softmax<true>(s, keys, width);
        } else {
          Softmax<false>(s, keys, width);
        }
        // sum += V^T P: [D, rows]
        Gemm<T>(true, dim_, width, keys, {v.data, 1, v.stride}, s.scores, ld_, s.sum, ld_);
      }
    }
    Finish(s, tile, head, rows, width);
  }

  // Rows of keys or values in the accumulation type: where they are, or converted.
  HeadRows<T> LoadRows(HeadRows<Element> rows, int64_t count, T* target) {
    if constexpr (std::is_same_v<Element, T>) {
      return rows;
    } else {
      CopyRows(rows, count, dim_, target, dim_);
      return {target, dim_};
    }
  }

  // Turns scores into exp(score - max) with the new maximum of each row, and rescales what has been summed so
  // far. A hidden key counts as -inf; a row that sees none of the keys keeps its bits.
  template <bool kMasked>
  void Softmax(Scratch& s, int64_t keys, int64_t width) {
    const hn::ScalableTag<T> d;
    const auto minus_infinity = hn::Set(d, -kInfinity);
    for (int64_t i = 0; i < width; i += hn::Lanes(d)) {
      const auto low = kMasked ? hn::LoadU(d, s.bounds.low + i) : hn::Zero(d);
      const auto high = kMasked ? hn::LoadU(d, s.bounds.high + i) : hn::Zero(d);
      const auto old_max = hn::LoadU(d, s.max + i);
      auto max = old_max;
      for (int64_t j = 0; j < keys; ++j) {
        T* at = s.scores + j * ld_ + i;
        auto score = hn::LoadU(d, at);
        if (softcap_.active()) {
          score = hn::Mul(hn::Set(d, softcap_.cap), softcap_.Tanh(d, score));
        }
        if constexpr (kMasked) {
          score = hn::IfThenElse(SeenBy(d, low, high, j), score, minus_infinity);
        }
        if (kMasked || softcap_.active()) {
          hn::StoreU(score, d, at);
        }
        max = hn::Max(max, score);
      }
      hn::StoreU(max, d, s.max + i);
      // While a row has seen no key, its maximum is -inf; any finite one keeps its exponentials at 0.
      const auto finite_max = hn::IfThenElse(hn::Eq(max, minus_infinity), hn::Zero(d), max);
      auto total = hn::Zero(d);
      for (int64_t j = 0; j < keys; ++j) {
        T* at = s.scores + j * ld_ + i;
        const auto weight = ExpOrNan(d, hn::Sub(hn::LoadU(d, at), finite_max));
        hn::StoreU(weight, d, at);
        total = hn::Add(total, weight);
      }
      const auto rescale = ExpOrNan(d, hn::Sub(old_max, finite_max));
      hn::StoreU(hn::MulAdd(hn::LoadU(d, s.total + i), rescale, total), d, s.total + i);
      if (!hn::AllTrue(d, hn::Eq(rescale, hn::Set(d, T(1))))) {
        for (int64_t j = 0; j < dim_; ++j) {
          T* at = s.sum + j * ld_ + i;
          hn::StoreU(hn::Mul(hn::LoadU(d, at), rescale), d, at);
        }
      }
    }
  }

  // out = sum / total and lse = max + log(total), the sink's share included.
  void Finish(Scratch& s, const dualkv_tile& tile, int64_t head, int64_t rows, int64_t width) {
    const int64_t row_begin = tile.begin - params_.query_row_begin;
    if (params_.sinks != nullptr) {
      AddSink(s, static_cast<const T*>(params_.sinks)[head], width);
    }
    if (params_.lse != nullptr) {
      T* lse = static_cast<T*>(params_.lse) + head * params_.query_rows + row_begin;
      for (int64_t i = 0; i < rows; ++i) {
        lse[i] = s.max[i] + std::log(s.total[i]);
      }
    }
    const hn::ScalableTag<T> d;
    for (int64_t j = 0; j < dim_; ++j) {
      for (int64_t i = 0; i < width; i += hn::Lanes(d)) {
        T* at = s.sum + j * ld_ + i;
        hn::StoreU(hn::Div(hn::LoadU(d, at), hn::LoadU(d, s.total + i)), d, at);
      }
    }
    Transpose(s.sum, ld_, dim_, rows, T(1), s.rows, dim_, dim_);
    for (int64_t i = 0; i < rows; ++i) {
      Element* out = static_cast<Element*>(params_.out.data) + (row_begin + i) * params_.out.row_stride +
                     head * params_.out.head_stride;
      for (int64_t j = 0; j < dim_; ++j) {
        Convert(s.rows[i * dim_ + j], out[j]);
      }
    }
  }

  // The sink is one more key with this score and no value.
  void AddSink(Scratch& s, T sink, int64_t width) {
    for (int64_t i = 0; i < width; ++i) {
      const T max = std::max(s.max[i], sink);
      const T rescale = std::exp(s.max[i] - max);
      s.total[i] = s.total[i] * rescale + std::exp(sink - max);
      s.max[i] = max;
      for (int64_t j = 0; j < dim_; ++j) {
        s.sum[j * ld_ + i] *= rescale;
      }
    }
  }

  const dualkv_attention_params& params_;
  const dualkv_plan_view plan_;
  const std::vector<uint8_t>& keys_only_;
  const int64_t dim_;
  const int64_t ld_;  // columns of the transposed buffers: the query tile in whole vectors
  const int32_t key_tile_;
  const Softcap<T> softcap_;
};

void AttentionForwardTarget(const dualkv_attention_params& params, const core::Plan& plan) {
  VisitDtype(params.dtype, [&]<class Element> { Forward<Element>(params, plan).Run(); });
}

const char* TargetNameTarget() { return hwy::TargetName(HWY_TARGET); }

}  // namespace dualkv::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace dualkv::cpu {

HWY_EXPORT(AttentionForwardTarget);
HWY_EXPORT(TargetNameTarget);

void AttentionForward(const dualkv_attention_params& params, const core::Plan& plan) {
  HWY_DYNAMIC_DISPATCH(AttentionForwardTarget)(params, plan);
}

const char* TargetName() { return HWY_DYNAMIC_DISPATCH(TargetNameTarget)(); }

}  // namespace dualkv::cpu
#endif  // HWY_ONCE
