// An attention call with its tensors, and a reference that follows the definition pair by pair.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "brute_force.h"
#include "dualkv/dualkv.hpp"
#include "element_types.h"
#include "random_forest.h"

namespace dualkv::testing {

// A [rows, heads, dim] tensor with gaps between heads and rows, all of it NaN until written.
template <class Element>
class Tensor {
 public:
  Tensor(int64_t rows, int64_t heads, int64_t dim, int64_t gap)
      : rows_(rows),
        heads_(heads),
        dim_(dim),
        head_stride_(dim + gap),
        row_stride_(heads * head_stride_ + gap) {
    Poison();
  }

  void Poison() {
    Element nan;
    Convert(std::numeric_limits<double>::quiet_NaN(), nan);
    data_.assign(rows_ * row_stride_ + 1, nan);
  }
  void Randomize(std::mt19937_64& rng, double scale = 1) {
    std::normal_distribution<double> normal(0, scale);
    for (int64_t t = 0; t < rows_; ++t) {
      for (int64_t h = 0; h < heads_; ++h) {
        for (int64_t d = 0; d < dim_; ++d) {
          Convert(normal(rng), at(t, h, d));
        }
      }
    }
  }

  Element& at(int64_t t, int64_t h, int64_t d) { return data_[t * row_stride_ + h * head_stride_ + d]; }
  double get(int64_t t, int64_t h, int64_t d) const {
    return ToDouble(data_[t * row_stride_ + h * head_stride_ + d]);
  }
  dualkv_tensor view() { return {data_.data(), row_stride_, head_stride_}; }
  int64_t rows() const { return rows_; }
  int64_t heads() const { return heads_; }
  int64_t dim() const { return dim_; }
  std::vector<Element>& data() { return data_; }
  const std::vector<Element>& data() const { return data_; }

 private:
  int64_t rows_, heads_, dim_, head_stride_, row_stride_;
  std::vector<Element> data_;
};

// The elements of a tensor, without the gaps.
template <class Element>
std::vector<double> Flat(const Tensor<Element>& tensor) {
  std::vector<double> values;
  for (int64_t t = 0; t < tensor.rows(); ++t) {
    for (int64_t h = 0; h < tensor.heads(); ++h) {
      for (int64_t d = 0; d < tensor.dim(); ++d) {
        values.push_back(tensor.get(t, h, d));
      }
    }
  }
  return values;
}

struct AttentionOptions {
  dualkv_device device = DUALKV_CPU;
  int64_t num_heads = 1;
  int64_t num_kv_heads = 1;
  int64_t head_dim = 8;
  double scale = 1;
  int64_t window_left = -1;
  double softcap = 0;
  bool sinks = false;
  bool dlse = false;
  int64_t gap = 0;         // elements between heads and between rows
  int64_t extra_rows = 0;  // rows past the last segment
  std::vector<uint8_t> keys_only = {};
  int64_t query_row_begin = 0;
  int32_t num_threads = 1;

  std::string ToString() const {
    return "H " + std::to_string(num_heads) + " Hk " + std::to_string(num_kv_heads) + " D " +
           std::to_string(head_dim) + " scale " + std::to_string(scale) + " window " +
           std::to_string(window_left) + " softcap " + std::to_string(softcap) + " sinks " +
           std::to_string(sinks) + " dlse " + std::to_string(dlse) + " gap " + std::to_string(gap) +
           " extra rows " + std::to_string(extra_rows) + " query_row_begin " +
           std::to_string(query_row_begin);
  }
};

template <class Element>
class AttentionProblem {
 public:
  using T = typename Type<Element>::Accumulator;

  AttentionProblem(const ForestSpec& spec, const AttentionOptions& options, uint64_t seed)
      : spec(spec),
        options(options),
        forest(spec.Build()),
        key_rows(forest.total_tokens() + options.extra_rows),
        query_rows(key_rows - options.query_row_begin),
        q(query_rows, options.num_heads, options.head_dim, options.gap),
        k(key_rows, options.num_kv_heads, options.head_dim, 2 * options.gap),
        v(key_rows, options.num_kv_heads, options.head_dim, 3 * options.gap),
        out(query_rows, options.num_heads, options.head_dim, options.gap),
        dout(query_rows, options.num_heads, options.head_dim, 4 * options.gap),
        dq(query_rows, options.num_heads, options.head_dim, options.gap),
        dk(key_rows, options.num_kv_heads, options.head_dim, options.gap),
        dv(key_rows, options.num_kv_heads, options.head_dim, 2 * options.gap),
        lse(query_rows * options.num_heads),
        dlse(lse.size()),
        sinks(options.num_heads),
        dsinks(options.num_heads) {
    auto params = Params<dualkv_plan_params>();
    params.forest = forest.get();
    params.window_left = options.window_left;
    params.keys_only = options.keys_only.empty() ? nullptr : options.keys_only.data();
    SetTiles(params, options.device, static_cast<int32_t>(options.num_heads),
             static_cast<int32_t>(options.num_kv_heads), static_cast<int32_t>(options.head_dim));
    plan = std::make_unique<Plan>(params);

    std::mt19937_64 rng(seed);
    q.Randomize(rng);
    k.Randomize(rng);
    v.Randomize(rng);
    dout.Randomize(rng);
    std::normal_distribution<T> normal;
    std::generate(dlse.begin(), dlse.end(), [&] { return normal(rng); });
    std::generate(sinks.begin(), sinks.end(), [&] { return normal(rng); });
  }

  dualkv_attention_backward_params MakeParams() {
    auto params = Params<dualkv_attention_backward_params>();
    dualkv_attention_params& forward = params.forward;
    forward.device = options.device;
    forward.dtype = Type<Element>::kDtype;
    forward.num_threads = options.num_threads;
    forward.num_heads = static_cast<int32_t>(options.num_heads);
    forward.num_kv_heads = static_cast<int32_t>(options.num_kv_heads);
    forward.head_dim = static_cast<int32_t>(options.head_dim);
    forward.plan = plan->get();
    forward.query_rows = query_rows;
    forward.query_row_begin = options.query_row_begin;
    forward.key_rows = key_rows;
    forward.scale = options.scale;
    forward.softcap = options.softcap;
    forward.q = q.view();
    forward.k = k.view();
    forward.v = v.view();
    forward.out = out.view();
    forward.lse = lse.data();
    params.dout = dout.view();
    params.dq = dq.view();
    params.dk = dk.view();
    params.dv = dv.view();
    if (options.sinks) {
      forward.sinks = sinks.data();
      params.dsinks = dsinks.data();
    }
    if (options.dlse) {
      params.dlse = dlse.data();
    }
    return params;
  }

  // Forward and backward with all outputs and the workspace poisoned first.
  void Run() {
    constexpr T kNan = std::numeric_limits<T>::quiet_NaN();
    for (Tensor<Element>* tensor : {&out, &dq, &dk, &dv}) {
      tensor->Poison();
    }
    std::fill(lse.begin(), lse.end(), kNan);
    std::fill(dsinks.begin(), dsinks.end(), kNan);
    auto params = MakeParams();
    Check(dualkv_attention_forward(&params.forward));
    Check(dualkv_attention_backward_workspace(&params, &params.workspace_bytes));
    std::unique_ptr<void, void (*)(void*)> workspace(std::aligned_alloc(64, params.workspace_bytes + 64),
                                                     std::free);
    std::memset(workspace.get(), 0xff, params.workspace_bytes);
    params.workspace = workspace.get();
    Check(dualkv_attention_backward(&params));
  }

  ForestSpec spec;
  AttentionOptions options;
  Forest forest;
  std::unique_ptr<Plan> plan;
  int64_t key_rows, query_rows;
  Tensor<Element> q, k, v, out, dout, dq, dk, dv;
  std::vector<T> lse, dlse, sinks, dsinks;
};

// Outputs and gradients in flat arrays: [rows, heads, dim], lse [H, rows].
struct AttentionResult {
  std::vector<double> out, lse, dq, dk, dv, dsinks;
  double dsinks_terms;  // largest sum of absolute terms of a sink's gradient, which its rounding error scales
                        // with
};

// Plain attention, pair by pair, computed in Real with outputs rounded to Element.
template <class Real, class Element>
AttentionResult ReferenceAttention(const AttentionProblem<Element>& p) {
  const AttentionOptions& o = p.options;
  const BruteForce truth(p.spec);
  const int64_t dim = o.head_dim, group = o.num_heads / o.num_kv_heads;
  std::vector<Real> out(p.query_rows * o.num_heads * dim),
      lse(p.query_rows * o.num_heads, -std::numeric_limits<Real>::infinity());
  std::vector<Real> dq(out.size()), dk(p.key_rows * o.num_kv_heads * dim), dv(dk.size()), dsinks(o.num_heads),
      dsinks_terms(o.num_heads);

  for (int64_t row = o.query_row_begin; row < truth.rows(); ++row) {
    if (!o.keys_only.empty() && o.keys_only[truth.segment(row)]) {
      continue;
    }
    const int64_t t = row - o.query_row_begin;
    for (int64_t h = 0; h < o.num_heads; ++h) {
      const int64_t g = h / group;
      std::vector<int64_t> keys;
      std::vector<Real> scores, slopes;
      for (int64_t key = 0; key <= row; ++key) {
        if (!truth.Sees(row, key, o.window_left)) {
          continue;
        }
        Real dot = 0;
        for (int64_t d = 0; d < dim; ++d) {
          dot += static_cast<Real>(p.q.get(t, h, d)) * static_cast<Real>(p.k.get(key, g, d));
        }
        Real score = dot * static_cast<Real>(o.scale), slope = static_cast<Real>(o.scale);
        if (o.softcap > 0) {
          const Real tanh = std::tanh(score / static_cast<Real>(o.softcap));
          score = static_cast<Real>(o.softcap) * tanh;
          slope *= 1 - tanh * tanh;
        }
        keys.push_back(key);
        scores.push_back(score);
        slopes.push_back(slope);
      }
      Real max = *std::max_element(scores.begin(), scores.end());
      const Real sink = static_cast<Real>(p.sinks[h]);
      max = o.sinks ? std::max(max, sink) : max;
      Real total = o.sinks ? std::exp(sink - max) : Real(0);
      for (const Real score : scores) {
        total += std::exp(score - max);
      }
      const Real row_lse = max + std::log(total);
      lse[h * p.query_rows + t] = row_lse;

      std::vector<Real> weights, dweights;
      Real delta = o.dlse ? -static_cast<Real>(p.dlse[h * p.query_rows + t]) : Real(0);
      for (size_t n = 0; n < keys.size(); ++n) {
        weights.push_back(std::exp(scores[n] - row_lse));
        Real dweight = 0;
        for (int64_t d = 0; d < dim; ++d) {
          const Real value = static_cast<Real>(p.v.get(keys[n], g, d)),
                     dout = static_cast<Real>(p.dout.get(t, h, d));
          out[(t * o.num_heads + h) * dim + d] += weights[n] * value;
          dv[(keys[n] * o.num_kv_heads + g) * dim + d] += weights[n] * dout;
          dweight += value * dout;
        }
        dweights.push_back(dweight);
        delta += weights[n] * dweight;
      }
      for (size_t n = 0; n < keys.size(); ++n) {
        const Real dscore = weights[n] * (dweights[n] - delta) * slopes[n];
        for (int64_t d = 0; d < dim; ++d) {
          dq[(t * o.num_heads + h) * dim + d] += dscore * static_cast<Real>(p.k.get(keys[n], g, d));
          dk[(keys[n] * o.num_kv_heads + g) * dim + d] += dscore * static_cast<Real>(p.q.get(t, h, d));
        }
      }
      if (o.sinks) {
        dsinks[h] -= std::exp(sink - row_lse) * delta;
        dsinks_terms[h] += std::exp(sink - row_lse) * std::abs(delta);
      }
    }
  }
  auto rounded = [](const std::vector<Real>& values) {
    std::vector<double> result;
    for (const Real value : values) {
      Element element;
      Convert(value, element);
      result.push_back(ToDouble(element));
    }
    return result;
  };
  auto kept = [](const std::vector<Real>& values) {
    return std::vector<double>(values.begin(), values.end());
  };
  const auto terms = static_cast<double>(*std::max_element(dsinks_terms.begin(), dsinks_terms.end()));
  if constexpr (std::is_same_v<Real, long double>) {  // the oracle
    return {kept(out), kept(lse), kept(dq), kept(dk), kept(dv), kept(dsinks), terms};
  } else {
    return {rounded(out), kept(lse), rounded(dq), rounded(dk), rounded(dv), kept(dsinks), terms};
  }
}

}  // namespace dualkv::testing
