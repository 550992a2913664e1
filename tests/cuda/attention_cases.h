// Forests and options on which every pass of attention on CUDA is checked. check(Element{}, forest, options,
// seed) does it.
#pragma once

#include <cmath>
#include <random>
#include <string>

#include "attention_on_device.h"

namespace dualkv::testing {

// Each head dim that has kernels of its own, softcapped and not, in both types.
template <class Check>
void ForEveryKernel(Check check) {
  const ForestSpec forest{{70, 100, 0, 33, 90}, {-1, 0, 0, 0, -1}};
  for (const int64_t dim : {40, 128}) {
    for (const double softcap : {0, 2}) {
      const AttentionOptions options{.num_heads = 6,
                                     .num_kv_heads = 2,
                                     .head_dim = dim,
                                     .scale = 0.3,
                                     .softcap = softcap,
                                     .sinks = softcap > 0,
                                     .dlse = true,
                                     .gap = 8,
                                     .extra_rows = 3};
      check(BFloat16{}, forest, options, 1);
      check(Float16{}, forest, options, 2);
    }
  }
}

template <class Check>
void ForWindowsAndKeysOnlySegments(Check check) {
  const ForestSpec forest{{70, 133, 90}, {-1, 0, 0}};
  for (const int64_t dim : {64, 96}) {
    AttentionOptions options{.num_heads = 4, .head_dim = dim, .scale = 0.2, .window_left = 40};
    options.keys_only = {1, 0, 0};
    check(BFloat16{}, forest, options, 1);
    options.query_row_begin = 70;
    check(BFloat16{}, forest, options, 2);
  }
}

// More tiles than a GPU has multiprocessors, most of them small.
template <class Check>
void ForBlocksWithSeveralTiles(Check check) {
  ForestSpec forest{{100, 80}, {-1, 0}};
  forest.lengths.resize(40, 2);
  forest.parents.resize(40, -1);
  for (const int64_t dim : {64, 128}) {
    const AttentionOptions options{.num_heads = 8, .num_kv_heads = 8, .head_dim = dim, .scale = 0.2};
    check(BFloat16{}, forest, options, 1);
  }
}

// Many tiles that no row sees, so that each block has some of these one after the other.
template <class Check>
void ForTilesThatNoRowSees(Check check) {
  constexpr int kTiles = 500;
  ForestSpec forest{{200}, {-1}};
  forest.lengths.resize(1 + kTiles, 2);
  forest.parents.resize(1 + kTiles, -1);
  for (const int64_t dim : {64, 128}) {
    AttentionOptions options{.num_heads = 4, .num_kv_heads = 2, .head_dim = dim, .scale = 0.2};
    options.keys_only.assign(1 + kTiles, 1);
    options.keys_only[0] = 0;
    check(BFloat16{}, forest, options, 1);
  }
}

template <class Check>
void ForEmptyBatches(Check check) {
  check(BFloat16{}, ForestSpec{{}, {}}, AttentionOptions{}, 1);
  check(BFloat16{}, ForestSpec{{0, 0}, {-1, 0}}, AttentionOptions{.extra_rows = 3}, 1);
  AttentionOptions no_queries{.num_heads = 2};
  no_queries.keys_only = {1};
  check(Float16{}, ForestSpec{{5}, {-1}}, no_queries, 1);
  no_queries.query_row_begin = 5;
  check(Float16{}, ForestSpec{{5}, {-1}}, no_queries, 1);
}

// Up to `rows` rows a segment, in every fourth forest up to `many_rows`; stops at the first failure.
template <class Check>
void ForRandomForests(uint64_t first_seed, int64_t segments, int64_t many_rows, int64_t rows, Check check) {
  for (uint64_t seed = first_seed; seed < first_seed + 60 && !::testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 rng(seed);
    const ForestSpec forest = RandomForest(rng, segments, seed % 4 == 0 ? many_rows : rows);
    const AttentionOptions options = RandomOptions(rng, forest);
    if (seed % 2 == 0) {
      check(BFloat16{}, forest, options, seed);
    } else {
      check(Float16{}, forest, options, seed);
    }
  }
}

template <class Check>
void ForEveryHeadDim(Check check) {
  const ForestSpec forest{{100, 30, 0, 90}, {-1, 0, 0, 0}};
  for (int64_t dim = 8; dim <= 128; dim += 8) {
    const AttentionOptions options{.num_heads = 2, .head_dim = dim, .scale = 1 / std::sqrt(dim)};
    check(BFloat16{}, forest, options, dim);
    check(Float16{}, forest, options, dim);
  }
}

// Ratios of query heads to KV heads: those that fill a tile, those that leave some of it empty, and those
// that do not fit into one.
template <class Check>
void ForEveryRatioOfHeads(Check check) {
  const ForestSpec forest{{100, 30, 0, 90}, {-1, 0, 0, 0}};
  for (const int64_t ratio : {1, 2, 3, 4, 5, 7, 8, 10, 12, 14, 15, 16, 32}) {
    for (const int64_t dim : {64, 128}) {
      const AttentionOptions options{
          .num_heads = 2 * ratio, .num_kv_heads = 2, .head_dim = dim, .scale = 1 / std::sqrt(dim)};
      check(BFloat16{}, forest, options, ratio);
    }
  }
}

template <class Check>
void ForManyTreesOfOneRow(Check check) {
  ForestSpec forest{{400, 150, 7}, {-1, 0, 0}};
  forest.lengths.resize(3000, 1);
  forest.parents.resize(3000, -1);
  for (const int64_t dim : {64, 128}) {
    const AttentionOptions options{.num_heads = 8, .num_kv_heads = 2, .head_dim = dim, .scale = 0.1};
    check(BFloat16{}, forest, options, 1);
  }
}

}  // namespace dualkv::testing
