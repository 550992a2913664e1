// What the tests of attention on CUDA share.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "attention_problem.h"
#include "device.h"

namespace dualkv::testing {

// NaN in the rows that take no part: of keys and values those past the forest, of queries and output
// gradients those that are none.
template <class Element>
void PoisonUnusedRows(AttentionProblem<Element>& p) {
  auto poison = [](Tensor<Element>& x, int64_t row) {
    for (int64_t h = 0; h < x.heads(); ++h) {
      for (int64_t d = 0; d < x.dim(); ++d) {
        Convert(std::numeric_limits<double>::quiet_NaN(), x.at(row, h, d));
      }
    }
  };
  const BruteForce truth(p.spec);
  for (int64_t row = 0; row < p.key_rows; ++row) {
    const bool in_forest = row < truth.rows();
    if (!in_forest) {
      poison(p.k, row);
      poison(p.v, row);
    }
    const bool is_query =
        in_forest && (p.options.keys_only.empty() || !p.options.keys_only[truth.segment(row)]);
    if (!is_query && row >= p.options.query_row_begin) {
      poison(p.q, row - p.options.query_row_begin);
      poison(p.dout, row - p.options.query_row_begin);
    }
  }
}

template <class From, class To>
void CopyElements(const Tensor<From>& from, Tensor<To>& to) {
  for (int64_t t = 0; t < from.rows(); ++t) {
    for (int64_t h = 0; h < from.heads(); ++h) {
      for (int64_t d = 0; d < from.dim(); ++d) {
        Convert(from.get(t, h, d), to.at(t, h, d));
      }
    }
  }
}

template <class T>
bool SameBits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

inline AttentionOptions RandomOptions(std::mt19937_64& rng, const ForestSpec& forest) {
  auto pick = [&](auto... values) { return Pick(rng, values...); };
  AttentionOptions options;
  options.num_kv_heads = static_cast<int64_t>(pick(1, 2, 3));
  options.num_heads = options.num_kv_heads * static_cast<int64_t>(pick(1, 2, 3, 4, 7, 8, 16));
  options.head_dim = static_cast<int64_t>(8 * (1 + rng() % 16));
  options.scale = pick(1 / std::sqrt(options.head_dim), 0.5, -0.125, 0);
  options.window_left = static_cast<int64_t>(pick(-1, -1, 0, 5, 40, 1e9));
  options.softcap = pick(0, 0, 2);
  options.sinks = rng() % 2;
  options.gap = static_cast<int64_t>(pick(0, 8));
  options.extra_rows = static_cast<int64_t>(pick(0, 0, 5));
  options.dlse = rng() % 2;
  const bool some_keys_only = rng() % 4 == 0;
  for (size_t s = 0; some_keys_only && s < forest.lengths.size(); ++s) {
    options.keys_only.push_back(rng() % 3 == 0);
  }
  return options;
}

}  // namespace dualkv::testing
