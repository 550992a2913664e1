// Attention backward on the CPU. A task owns a key tile and a KV head: it walks all query rows that see the
// tile, for each query head of the group, and keeps dK and dV to itself. dQ is added to by many tasks, in the
// order of the plan's turns, so that the sums have the same bits for any number of threads.
#include <atomic>
#include <cmath>
#include <memory>
#include <vector>

#include "cpu/arena.h"
#include "cpu/attention.h"
#include "cpu/elements.h"
#include "cpu/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/attention_backward.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "cpu/attention_tile-inl.h"
#include "cpu/gemm-inl.h"
#include "hwy/highway.h"

#ifndef DUALKV_CPU_ATTENTION_BACKWARD_ONCE
#define DUALKV_CPU_ATTENTION_BACKWARD_ONCE
namespace dualkv::cpu {

// The caller's workspace.
template <class T>
struct BackwardWorkspace {
  T* dq;           // [query_rows, H, D]
  T* delta;        // [H, query_rows]: sum over d of out * dout, less dlse
  int32_t* turns;  // [H, num_query_tiles]: visits that each query tile has had
  size_t bytes;

  BackwardWorkspace(const dualkv_attention_params& params, const core::Plan& plan, void* memory) {
    auto* base = static_cast<std::byte*>(memory);
    bytes = 0;
    auto take = [&](int64_t count, size_t size) {
      void* taken = base == nullptr ? nullptr : base + bytes;
      bytes += (count * size + 63) / 64 * 64;
      return taken;
    };
    dq = static_cast<T*>(take(params.query_rows * params.num_heads * params.head_dim, sizeof(T)));
    delta = static_cast<T*>(take(params.query_rows * params.num_heads, sizeof(T)));
    turns = static_cast<int32_t*>(take(plan.num_query_tiles * params.num_heads, sizeof(*turns)));
  }
};

}  // namespace dualkv::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace dualkv::cpu::HWY_NAMESPACE {

template <class Element>
class Backward {
  using T = AccumulatorOf<Element>;

 public:
  Backward(const dualkv_attention_backward_params& params, const core::Plan& plan)
      : params_(params),
        forward_(params.forward),
        plan_(plan.View()),
        keys_only_(plan.keys_only),
        workspace_(params.forward, plan, params.workspace),
        dim_(forward_.head_dim),
        padded_dim_(RoundUpToLanes<T>(dim_)),
        group_(forward_.num_heads / forward_.num_kv_heads),
        ld_(RoundUpToLanes<T>(plan_.backward.query_tile)),
        key_tile_(plan_.backward.key_tile),
        softcap_(forward_.softcap) {}

  void Run() {
    const int64_t tasks = plan_.backward.num_tiles * forward_.num_kv_heads;
    const int64_t heads = forward_.num_heads;
    const int workers = NumWorkers(forward_.num_threads, std::max(tasks, heads));
    std::vector<std::unique_ptr<Scratch>> scratch;
    scratch.reserve(workers);
    for (int w = 0; w < workers; ++w) {
      scratch.push_back(std::make_unique<Scratch>(*this));
    }
    ParallelFor(workers, heads, [&](int, int64_t head) { Prepare(head); });
    ParallelFor(workers, tasks, [&](int worker, int64_t task) {
      RunTile(*scratch[worker], plan_.backward.tiles[task / forward_.num_kv_heads],
              task % forward_.num_kv_heads);
    });
    ParallelFor(workers, heads, [&](int, int64_t head) { WriteQueryGradients(head); });
    ClearKeysPastTheEnd();
  }

 private:
  // Memory of one worker. n keys, m rows: [n, ld] and [D, ld] buffers have rows of the query tile as columns.
  struct Scratch {
    explicit Scratch(const Backward& b)
        : arena(Arena<T>::Rounded(b.key_tile_ * b.padded_dim_) * 4 +
                Arena<T>::Rounded(b.ld_ * b.padded_dim_) * 5 + Arena<T>::Rounded(b.key_tile_ * b.ld_) * 2 +
                Arena<T>::Rounded(b.ld_) * 4),
          keys(arena.Take(b.key_tile_ * b.padded_dim_)),
          values(arena.Take(b.key_tile_ * b.padded_dim_)),
          dkeys(arena.Take(b.key_tile_ * b.padded_dim_)),
          dvalues(arena.Take(b.key_tile_ * b.padded_dim_)),
          queries(arena.Take(b.ld_ * b.padded_dim_)),
          douts(arena.Take(b.ld_ * b.padded_dim_)),
          queries_t(arena.Take(b.ld_ * b.padded_dim_)),
          douts_t(arena.Take(b.ld_ * b.padded_dim_)),
          dqueries(arena.Take(b.ld_ * b.padded_dim_)),
          weights(arena.Take(b.key_tile_ * b.ld_)),
          dscores(arena.Take(b.key_tile_ * b.ld_)),
          lse(arena.Take(b.ld_)),
          delta(arena.Take(b.ld_)),
          bounds{arena.Take(b.ld_), arena.Take(b.ld_)} {}

    Arena<T> arena;
    T* keys;       // [n, padded D]
    T* values;     // [n, padded D]
    T* dkeys;      // [n, padded D]
    T* dvalues;    // [n, padded D]
    T* queries;    // [m, padded D]
    T* douts;      // [m, padded D]
    T* queries_t;  // [D, ld]: scale * q
    T* douts_t;    // [D, ld]
    T* dqueries;   // [m, padded D]
    T* weights;    // [n, ld]: scores, then P = exp(score - lse)
    T* dscores;    // [n, ld]: dP, then dS * scale
    T* lse;        // [ld]
    T* delta;      // [ld]
    LaneBounds<T> bounds;
  };

  // Query rows of the plan as intervals of rows of q.
  template <class Visit>
  void ForEachQueryInterval(Visit&& visit) {
    for (int64_t s = 0; s < plan_.num_segments; ++s) {
      if (!keys_only_[s]) {
        visit(plan_.segments[s].begin - forward_.query_row_begin,
              plan_.segments[s].end - forward_.query_row_begin);
      }
    }
  }

  // delta, the sink's gradient, and the counters of one head.
  void Prepare(int64_t head) {
    std::fill_n(workspace_.turns + head * plan_.num_query_tiles, plan_.num_query_tiles, 0);
    const T* lse = static_cast<const T*>(forward_.lse) + head * forward_.query_rows;
    const T* dlse = static_cast<const T*>(params_.dlse);
    T* delta = workspace_.delta + head * forward_.query_rows;
    const T sink = forward_.sinks == nullptr ? T(0) : static_cast<const T*>(forward_.sinks)[head];
    T dsink = 0;
    ForEachQueryInterval([&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const Element* out = RowsOfHead<Element>(forward_.out, row, head).data;
        const Element* dout = RowsOfHead<Element>(params_.dout, row, head).data;
        T sum = Dot(out, dout);
        if (dlse != nullptr) {
          sum -= dlse[head * forward_.query_rows + row];
        }
        delta[row] = sum;
        dsink -= std::exp(sink - lse[row]) * sum;
      }
    });
    if (params_.dsinks != nullptr) {
      static_cast<T*>(params_.dsinks)[head] = dsink;
    }
  }

  // Summed in the order in which Gemm sums dP: a row that sees one key gets dP - delta = 0 to the last bit.
  T Dot(const Element* a, const Element* b) {
    const hn::CappedTag<T, 1> one;
    T total = 0;
    for (int64_t begin = 0; begin < dim_; begin += kChain) {
      auto sum = hn::Zero(one);
      for (int64_t d = begin; d < std::min(begin + kChain, dim_); ++d) {
        T x, y;
        Convert(a[d], x);
        Convert(b[d], y);
        sum = hn::MulAdd(hn::Set(one, x), hn::Set(one, y), sum);
      }
      total += hn::GetLane(sum);
    }
    return total;
  }

  void RunTile(Scratch& s, const dualkv_tile& tile, int64_t kv_head) {
    const int64_t keys = tile.end - tile.begin;
    CopyRows(RowsOfHead<Element>(forward_.k, tile.begin, kv_head), keys, dim_, s.keys, padded_dim_);
    CopyRows(RowsOfHead<Element>(forward_.v, tile.begin, kv_head), keys, dim_, s.values, padded_dim_);
    std::fill_n(s.dkeys, keys * padded_dim_, T(0));
    std::fill_n(s.dvalues, keys * padded_dim_, T(0));

    for (int64_t head = kv_head * group_; head < (kv_head + 1) * group_; ++head) {
      for (int32_t r = tile.run_begin; r < tile.run_end; ++r) {
        const dualkv_run& run = plan_.backward.runs[r];
        int64_t query_tile = plan_.first_query_tile[r];
        for (int32_t begin = run.begin; begin < run.end; begin += plan_.backward.query_tile, ++query_tile) {
          const int64_t rows = std::min(run.end - begin, plan_.backward.query_tile);
          Visit(s, tile, run, head, begin, rows);
          AddToQueryGradient(s, head, begin, rows, query_tile, plan_.turn[r]);
        }
      }
    }
    StoreRows(s.dkeys, tile.begin, keys, kv_head, params_.dk);
    StoreRows(s.dvalues, tile.begin, keys, kv_head, params_.dv);
  }

  // One key tile and one query tile: adds to dK and dV, leaves the tile's share of dQ in s.dqueries.
  void Visit(Scratch& s, const dualkv_tile& tile, const dualkv_run& run, int64_t head, int32_t row_begin,
             int64_t rows) {
    const int64_t keys = tile.end - tile.begin;
    const int64_t width = RoundUpToLanes<T>(rows);
    const int64_t row = row_begin - forward_.query_row_begin;
    CopyRows(RowsOfHead<Element>(forward_.q, row, head), rows, dim_, s.queries, padded_dim_);
    CopyRows(RowsOfHead<Element>(params_.dout, row, head), rows, dim_, s.douts, padded_dim_);
    const T scale = static_cast<T>(forward_.scale);
    Transpose(s.queries, padded_dim_, rows, dim_, scale, s.queries_t, ld_, width);
    Transpose(s.douts, padded_dim_, rows, dim_, T(1), s.douts_t, ld_, width);
    const int64_t stats = head * forward_.query_rows + row;
    std::copy_n(static_cast<const T*>(forward_.lse) + stats, rows, s.lse);
    std::copy_n(workspace_.delta + stats, rows, s.delta);
    std::fill(s.lse + rows, s.lse + width, T(0));
    std::fill(s.delta + rows, s.delta + width, T(0));

    // scores = K (scale Q)^T and dP = V dO^T: [keys, rows]
    Gemm<T>(false, keys, width, dim_, {s.keys, padded_dim_, 1}, s.queries_t, ld_, s.weights, ld_);
    Gemm<T>(false, keys, width, dim_, {s.values, padded_dim_, 1}, s.douts_t, ld_, s.dscores, ld_);
    if (run.masked) {
      s.bounds.Set(plan_, row_begin, rows, width, run.segment, tile.begin, keys);
      SoftmaxBackward<true>(s, keys, width, scale);
    } else {
      SoftmaxBackward<false>(s, keys, width, scale);
    }
    // dV += P dO and dK += dS Q: [keys, D]; dQ = dS^T K: [rows, D]
    Gemm<T>(true, keys, padded_dim_, rows, {s.weights, ld_, 1}, s.douts, padded_dim_, s.dvalues, padded_dim_);
    Gemm<T>(true, keys, padded_dim_, rows, {s.dscores, ld_, 1}, s.queries, padded_dim_, s.dkeys, padded_dim_);
    Gemm<T>(false, rows, padded_dim_, keys, {s.dscores, 1, ld_}, s.keys, padded_dim_, s.dqueries,
            padded_dim_);
  }

  // P = exp(score - lse), dS = P (dP - delta) times the score's derivative. A hidden pair has P = dS = 0, its
  // score is not looked at: exp(score - lse) may overflow there.
  template <bool kMasked>
  void SoftmaxBackward(Scratch& s, int64_t keys, int64_t width, T scale) {
    const hn::ScalableTag<T> d;
    const auto one = hn::Set(d, T(1));
    for (int64_t i = 0; i < width; i += hn::Lanes(d)) {
      const auto low = kMasked ? hn::LoadU(d, s.bounds.low + i) : hn::Zero(d);
      const auto high = kMasked ? hn::LoadU(d, s.bounds.high + i) : hn::Zero(d);
      const auto lse = hn::LoadU(d, s.lse + i);
      const auto delta = hn::LoadU(d, s.delta + i);
      for (int64_t j = 0; j < keys; ++j) {
        T* weight_at = s.weights + j * ld_ + i;
        T* dscore_at = s.dscores + j * ld_ + i;
        auto score = hn::LoadU(d, weight_at);
        auto derivative = hn::Set(d, scale);
        if (softcap_.active()) {
          const auto tanh = softcap_.Tanh(d, score);
          score = hn::Mul(hn::Set(d, softcap_.cap), tanh);
          derivative = hn::Mul(derivative, hn::NegMulAdd(tanh, tanh, one));
        }
        auto weight = ExpOrNan(d, hn::Sub(score, lse));
        auto dscore = hn::Mul(hn::Mul(weight, hn::Sub(hn::LoadU(d, dscore_at), delta)), derivative);
        if constexpr (kMasked) {
          const auto seen = SeenBy(d, low, high, j);
          weight = hn::IfThenElseZero(seen, weight);
          dscore = hn::IfThenElseZero(seen, dscore);
        }
        hn::StoreU(weight, d, weight_at);
        hn::StoreU(dscore, d, dscore_at);
      }
    }
  }

  // Adds s.dqueries to dQ when it is this visit's turn. Tasks start in schedule order, and turns follow it:
  // the visit waited for always belongs to a task that has started.
  void AddToQueryGradient(Scratch& s, int64_t head, int32_t row_begin, int64_t rows, int64_t query_tile,
                          int32_t turn) {
    std::atomic_ref<int32_t> turns(workspace_.turns[head * plan_.num_query_tiles + query_tile]);
    for (int32_t now; (now = turns.load(std::memory_order_acquire)) != turn;) {
      turns.wait(now, std::memory_order_acquire);
    }
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t row = row_begin + i - forward_.query_row_begin;
      T* HWY_RESTRICT dq = workspace_.dq + (row * forward_.num_heads + head) * dim_;
      const T* HWY_RESTRICT add = s.dqueries + i * padded_dim_;
      if (turn == 0) {
        std::copy_n(add, dim_, dq);
      } else {
        for (int64_t d = 0; d < dim_; ++d) {
          dq[d] += add[d];
        }
      }
    }
    turns.store(turn + 1, std::memory_order_release);
    turns.notify_all();
  }

  void StoreRows(const T* rows, int64_t row_begin, int64_t count, int64_t head, const dualkv_tensor& tensor) {
    for (int64_t i = 0; i < count; ++i) {
      Element* to = static_cast<Element*>(tensor.data) + (row_begin + i) * tensor.row_stride +
                    head * tensor.head_stride;
      for (int64_t d = 0; d < dim_; ++d) {
        Convert(rows[i * padded_dim_ + d], to[d]);
      }
    }
  }

  // dq of one head in the output type; 0 for rows that are no queries.
  void WriteQueryGradients(int64_t head) {
    auto row_of = [&](int64_t row) {
      return static_cast<Element*>(params_.dq.data) + row * params_.dq.row_stride +
             head * params_.dq.head_stride;
    };
    int64_t next = 0;
    auto clear_to = [&](int64_t end) {
      for (; next < end; ++next) {
        std::fill_n(row_of(next), dim_, Element{});
      }
    };
    ForEachQueryInterval([&](int64_t begin, int64_t end) {
      clear_to(begin);
      for (; next < end; ++next) {
        const T* from = workspace_.dq + (next * forward_.num_heads + head) * dim_;
        Element* to = row_of(next);
        for (int64_t d = 0; d < dim_; ++d) {
          Convert(from[d], to[d]);
        }
      }
    });
    clear_to(forward_.query_rows);
  }

  void ClearKeysPastTheEnd() {
    for (const dualkv_tensor& tensor : {params_.dk, params_.dv}) {
      for (int64_t row = plan_.total_tokens; row < forward_.key_rows; ++row) {
        for (int64_t head = 0; head < forward_.num_kv_heads; ++head) {
          std::fill_n(
              static_cast<Element*>(tensor.data) + row * tensor.row_stride + head * tensor.head_stride, dim_,
              Element{});
        }
      }
    }
  }

  const dualkv_attention_backward_params& params_;
  const dualkv_attention_params& forward_;
  const dualkv_plan_view plan_;
  const std::vector<uint8_t>& keys_only_;
  const BackwardWorkspace<T> workspace_;
  const int64_t dim_;
  const int64_t padded_dim_;  // D in whole vectors
  const int64_t group_;       // query heads of a KV head
  const int64_t ld_;          // columns of the transposed buffers: the query tile in whole vectors
  const int32_t key_tile_;
  const Softcap<T> softcap_;
};

void AttentionBackwardTarget(const dualkv_attention_backward_params& params, const core::Plan& plan) {
  VisitDtype(params.forward.dtype, [&]<class Element> { Backward<Element>(params, plan).Run(); });
}

}  // namespace dualkv::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace dualkv::cpu {

HWY_EXPORT(AttentionBackwardTarget);

void AttentionBackward(const dualkv_attention_backward_params& params, const core::Plan& plan) {
  HWY_DYNAMIC_DISPATCH(AttentionBackwardTarget)(params, plan);
}

size_t AttentionBackwardWorkspace(const dualkv_attention_backward_params& params, const core::Plan& plan) {
  size_t bytes = 0;
  VisitDtype(params.forward.dtype, [&]<class Element> {
    bytes = BackwardWorkspace<AccumulatorOf<Element>>(params.forward, plan, nullptr).bytes;
  });
  return bytes;
}

}  // namespace dualkv::cpu
#endif  // HWY_ONCE
