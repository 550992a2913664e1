#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "attention_problem.h"
#include "expect_error.h"
#include "within_budget.h"

namespace dualkv::testing {
namespace {

template <class Element>
void CheckAgainstOracle(const ForestSpec& forest, const AttentionOptions& options, uint64_t seed) {
  SCOPED_TRACE(options.ToString() + "; " + forest.ToString());
  AttentionProblem<Element> problem(forest, options, seed);
  problem.Run();
  const AttentionResult oracle = ReferenceAttention<long double>(problem);
  const AttentionResult plain = ReferenceAttention<typename Type<Element>::Accumulator>(problem);
  const double epsilon = Type<Element>::kEpsilon;
  const double accumulator_epsilon = std::numeric_limits<typename Type<Element>::Accumulator>::epsilon();
  auto flat = [](const auto& values) { return std::vector<double>(values.begin(), values.end()); };
  ExpectWithinBudget("out", Flat(problem.out), plain.out, oracle.out, epsilon);
  ExpectWithinBudget("lse", flat(problem.lse), plain.lse, oracle.lse, accumulator_epsilon);
  ExpectWithinBudget("dq", Flat(problem.dq), plain.dq, oracle.dq, epsilon);
  ExpectWithinBudget("dk", Flat(problem.dk), plain.dk, oracle.dk, epsilon);
  ExpectWithinBudget("dv", Flat(problem.dv), plain.dv, oracle.dv, epsilon);
  if (options.sinks) {
    // delta is summed from the rounded out, as every flash attention does.
    ExpectWithinBudget("dsinks", flat(problem.dsinks), plain.dsinks, oracle.dsinks, epsilon,
                       oracle.dsinks_terms);
  }
}

AttentionOptions RandomOptions(std::mt19937_64& rng, const ForestSpec& forest) {
  auto pick = [&](auto... values) { return Pick(rng, values...); };
  AttentionOptions options;
  options.num_kv_heads = static_cast<int64_t>(pick(1, 2, 3));
  options.num_heads = options.num_kv_heads * static_cast<int64_t>(pick(1, 2, 3, 7));
  options.head_dim = static_cast<int64_t>(pick(1, 3, 8, 16, 40, 64));
  options.scale = pick(1 / std::sqrt(options.head_dim), 0.5, -0.125, 0);
  options.window_left = static_cast<int64_t>(pick(-1, -1, 0, 5, 40, 1e9));
  options.softcap = pick(0, 0, 2);
  options.sinks = rng() % 2;
  options.dlse = rng() % 2;
  options.gap = static_cast<int64_t>(pick(0, 3));
  options.extra_rows = static_cast<int64_t>(pick(0, 0, 5));
  options.num_threads = static_cast<int32_t>(pick(1, 2, 3));
  if (rng() % 4 == 0) {
    for (size_t s = 0; s < forest.lengths.size(); ++s) {
      options.keys_only.push_back(rng() % 3 == 0);
    }
  }
  return options;
}

TEST(Attention, MatchesTheOracleOnRandomForests) {
  for (uint64_t seed = 0; seed < 80; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 rng(seed);
    const ForestSpec forest = RandomForest(rng, 8, seed % 4 == 0 ? 90 : 20);
    const AttentionOptions options = RandomOptions(rng, forest);
    switch (seed % 4) {
      case 0:
        CheckAgainstOracle<float>(forest, options, seed);
        break;
      case 1:
        CheckAgainstOracle<double>(forest, options, seed);
        break;
      case 2:
        CheckAgainstOracle<BFloat16>(forest, options, seed);
        break;
      default:
        CheckAgainstOracle<Float16>(forest, options, seed);
    }
    if (HasFailure()) {
      return;
    }
  }
}

TEST(Attention, EveryHeadDimIsRight) {
  for (int64_t dim = 1; dim <= 512; dim += dim < 70 ? 1 : 61) {
    CheckAgainstOracle<float>({{9, 20, 0, 30}, {-1, 0, 0, 0}},
                              {.num_heads = 2, .head_dim = dim, .scale = 1 / std::sqrt(dim)}, dim);
  }
  CheckAgainstOracle<float>({{9, 20, 40}, {-1, 0, 0}}, {.head_dim = 512, .scale = 0.05}, 1);
}

TEST(Attention, SameBitsForAnyNumberOfThreads) {
  const ForestSpec forest{{300, 70, 1, 200, 0, 130, 64}, {-1, 0, 0, 0, 0, -1, 5}};
  AttentionOptions options{.num_heads = 4, .num_kv_heads = 2, .head_dim = 24, .scale = 0.2, .sinks = true};
  AttentionProblem<float> first(forest, options, 1);
  first.Run();
  for (const int32_t threads : {2, 3, 8}) {
    options.num_threads = threads;
    AttentionProblem<float> problem(forest, options, 1);
    for (int repeat = 0; repeat < 5; ++repeat) {
      problem.Run();
      EXPECT_EQ(Flat(problem.out), Flat(first.out)) << threads << " threads";
      EXPECT_EQ(problem.lse, first.lse) << threads << " threads";
      EXPECT_EQ(Flat(problem.dq), Flat(first.dq)) << threads << " threads";
      EXPECT_EQ(Flat(problem.dk), Flat(first.dk)) << threads << " threads";
      EXPECT_EQ(Flat(problem.dv), Flat(first.dv)) << threads << " threads";
      EXPECT_EQ(problem.dsinks, first.dsinks) << threads << " threads";
    }
  }
}

// The rows of `segment` in the batch get the bits that they get when their path is all there is.
TEST(Attention, ARowHasTheSameBitsInAnyBatch) {
  for (uint64_t seed = 0; seed < 30; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 rng(seed);
    const ForestSpec forest = RandomForest(rng, 8, 200);
    AttentionOptions options{.num_heads = 2, .num_kv_heads = 1, .head_dim = 20, .scale = 0.3};
    options.window_left = seed % 2 == 0 ? -1 : 77;
    options.softcap = seed % 3 == 0 ? 1.5 : 0;
    AttentionProblem<float> batch(forest, options, seed);
    batch.Run();
    const auto segments = batch.forest.segments();
    for (size_t s = 0; s < segments.size(); ++s) {
      ForestSpec path;
      std::vector<int64_t> rows;
      std::vector<size_t> ancestors;
      for (int64_t a = static_cast<int64_t>(s); a >= 0; a = segments[a].parent) {
        ancestors.insert(ancestors.begin(), a);
      }
      for (const size_t a : ancestors) {
        path.parents.push_back(static_cast<int64_t>(path.lengths.size()) - 1);
        path.lengths.push_back(forest.lengths[a]);
        for (int32_t row = segments[a].begin; row < segments[a].end; ++row) {
          rows.push_back(row);
        }
      }
      AttentionProblem<float> alone(path, options, 0);
      for (size_t i = 0; i < rows.size(); ++i) {
        for (int64_t d = 0; d < options.head_dim; ++d) {
          for (int64_t h = 0; h < 2; ++h) {
            alone.q.at(i, h, d) = batch.q.at(rows[i], h, d);
          }
          alone.k.at(i, 0, d) = batch.k.at(rows[i], 0, d);
          alone.v.at(i, 0, d) = batch.v.at(rows[i], 0, d);
        }
      }
      alone.Run();
      for (size_t i = 0; i < rows.size(); ++i) {
        for (int64_t h = 0; h < 2; ++h) {
          ASSERT_EQ(alone.lse[h * alone.query_rows + i], batch.lse[h * batch.query_rows + rows[i]])
              << "row " << rows[i];
          for (int64_t d = 0; d < options.head_dim; ++d) {
            ASSERT_EQ(alone.out.get(i, h, d), batch.out.get(rows[i], h, d)) << "row " << rows[i];
          }
        }
      }
    }
  }
}

TEST(Attention, KeysOnlySegmentsNeedNoQueries) {
  const ForestSpec forest{{70, 33, 90}, {-1, 0, 0}};
  AttentionOptions options{.num_heads = 2, .head_dim = 16, .scale = 0.25};
  options.keys_only = {1, 0, 0};
  options.query_row_begin = 70;
  CheckAgainstOracle<float>(forest, options, 3);
  options.query_row_begin = 0;
  CheckAgainstOracle<float>(forest, options, 3);
}

TEST(Attention, TheWidestWindowHidesNothing) {
  const ForestSpec forest{{9, 20, 5, 30}, {-1, 0, 1, 0}};
  CheckAgainstOracle<float>(forest, {.head_dim = 16, .scale = 0.25, .window_left = INT64_MAX}, 1);
}

TEST(Attention, EmptyBatches) {
  CheckAgainstOracle<float>({{}, {}}, {}, 1);
  CheckAgainstOracle<float>({{0, 0}, {-1, 0}}, {.extra_rows = 3}, 1);
  CheckAgainstOracle<double>({{5, 0, 0}, {-1, 0, 0}}, {.sinks = true}, 1);
}

TEST(Attention, NanScoresAreNotSilent) {
  AttentionProblem<float> problem({{4, 2, 2}, {-1, 0, 0}}, {.head_dim = 4}, 1);
  problem.k.at(5, 0, 1) = std::numeric_limits<float>::quiet_NaN();  // the last key of the first response
  problem.Run();
  for (int64_t row = 0; row < 8; ++row) {
    EXPECT_EQ(std::isnan(problem.out.get(row, 0, 0)), row == 5) << "row " << row;
  }
}

class AttentionErrors : public ::testing::Test {
 protected:
  AttentionErrors() : problem_({{6, 2}, {-1, 0}}, {.num_heads = 4, .num_kv_heads = 2}, 1) {
    params_ = problem_.MakeParams();
  }
  void ExpectForward(std::initializer_list<const char*> parts) {
    ExpectInvalid(dualkv_attention_forward(&params_.forward), parts);
    EXPECT_TRUE(std::isnan(problem_.out.get(0, 0, 0))) << "nothing is computed";
  }

  AttentionProblem<float> problem_;
  dualkv_attention_backward_params params_;
};

TEST_F(AttentionErrors, Plan) {
  params_.forward.plan = nullptr;
  ExpectForward({"plan", "NULL"});
}
TEST_F(AttentionErrors, Heads) {
  params_.forward.num_heads = 3;
  ExpectForward({"num_heads", "num_kv_heads", "3", "2"});
  params_.forward.num_heads = 0;
  ExpectForward({"num_heads", "0"});
  params_.forward.num_kv_heads = -1;
  ExpectForward({"num_kv_heads", "-1"});
}
TEST_F(AttentionErrors, HeadDim) {
  params_.forward.head_dim = 0;
  ExpectForward({"head_dim", "512", "got 0"});
  params_.forward.head_dim = 513;
  ExpectForward({"head_dim", "512", "got 513"});
}
TEST_F(AttentionErrors, Numbers) {
  params_.forward.scale = INFINITY;
  ExpectForward({"scale", "inf"});
  params_.forward.scale = NAN;
  ExpectForward({"scale", "nan"});
  params_.forward.scale = 1;
  params_.forward.softcap = -2;
  ExpectForward({"softcap", "-2"});
  params_.forward.softcap = NAN;
  ExpectForward({"softcap", "nan"});
  params_.forward.softcap = 1e-50;
  ExpectForward({"softcap", "accumulation type", "1e-50"});
  params_.forward.softcap = 0;
  params_.forward.scale = 1e300;
  ExpectForward({"scale", "accumulation type", "1e+300"});
}
TEST_F(AttentionErrors, Enumerations) {
  params_.forward.dtype = 4;
  ExpectForward({"dtype", "got 4"});
  params_.forward.dtype = DUALKV_FLOAT32;
  params_.forward.device = 7;
  ExpectForward({"device", "got 7"});
  params_.forward.device = DUALKV_CUDA;
  ExpectError(dualkv_attention_forward(&params_.forward), DUALKV_UNSUPPORTED, {"CUDA"});
  params_.forward.device = DUALKV_CPU;
  params_.forward.num_threads = -1;
  ExpectForward({"num_threads", "-1"});
}
TEST_F(AttentionErrors, Rows) {
  params_.forward.query_rows = 7;
  ExpectForward({"q", "8", "7"});
  params_.forward.query_rows = 8;
  params_.forward.key_rows = 5;
  ExpectForward({"k and v", "8", "5"});
  params_.forward.key_rows = 8;
  params_.forward.query_row_begin = 6;
  ExpectForward({"query_row_begin", "keys-only", "6"});
  params_.forward.query_row_begin = 9;
  ExpectForward({"query_row_begin", "8", "9"});
  params_.forward.query_row_begin = 0;
  size_t bytes = 0;
  for (int64_t* rows : {&params_.forward.query_rows, &params_.forward.key_rows}) {
    *rows = std::numeric_limits<int64_t>::max();
    ExpectInvalid(dualkv_attention_backward_workspace(&params_, &bytes),
                  {"query_rows and key_rows", "9223372036854775807"});
    *rows = 8;
  }
}
TEST_F(AttentionErrors, Pointers) {
  params_.forward.q.data = nullptr;
  ExpectForward({"q.data", "NULL"});
  params_.forward.size = 8;
  ExpectForward({"params.size", "8"});
}
TEST_F(AttentionErrors, KeyTilesInParts) {
  auto params = Params<dualkv_plan_params>();
  params.forest = problem_.forest.get();
  params.window_left = DUALKV_NO_WINDOW;
  params.backward_parts = 12;
  const Plan plan(params);
  params_.forward.plan = plan.get();
  size_t bytes = 0;
  const auto parts = {"plan must have backward_parts 0 on the CPU, got 12"};
  ExpectInvalid(dualkv_attention_backward_workspace(&params_, &bytes), parts);
  ExpectInvalid(dualkv_attention_backward(&params_), parts);
  EXPECT_EQ(dualkv_attention_forward(&params_.forward), DUALKV_OK);
}
TEST_F(AttentionErrors, Backward) {
  size_t bytes = 0;
  Check(dualkv_attention_backward_workspace(&params_, &bytes));
  std::unique_ptr<void, void (*)(void*)> memory(std::aligned_alloc(64, bytes + 64), std::free);
  params_.workspace = memory.get();
  params_.workspace_bytes = bytes - 1;
  ExpectInvalid(dualkv_attention_backward(&params_), {"workspace_bytes", std::to_string(bytes).c_str()});
  params_.workspace_bytes = bytes;
  params_.workspace = static_cast<char*>(memory.get()) + 4;
  ExpectInvalid(dualkv_attention_backward(&params_), {"workspace", "aligned"});
  params_.workspace = memory.get();
  params_.deterministic = 2;
  ExpectInvalid(dualkv_attention_backward(&params_), {"deterministic", "got 2"});
  params_.deterministic = 1;
  params_.dsinks = problem_.dsinks.data();
  ExpectInvalid(dualkv_attention_backward(&params_), {"dsinks", "sinks"});
  params_.dsinks = nullptr;
  params_.forward.lse = nullptr;
  ExpectInvalid(dualkv_attention_backward(&params_), {"lse", "NULL"});
  params_.dq.data = nullptr;
  ExpectInvalid(dualkv_attention_backward(&params_), {"dq.data", "NULL"});
}

TEST(Half, ConversionsRoundToNearestEven) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {  // every value survives the round trip
    const Float16 half{static_cast<uint16_t>(bits)};
    const BFloat16 brain{static_cast<uint16_t>(bits)};
    if (!std::isnan(core::ToFloat(half))) {
      ASSERT_EQ(core::ToFloat16(core::ToFloat(half)).bits, bits);
    } else {
      ASSERT_TRUE(std::isnan(core::ToFloat(core::ToFloat16(core::ToFloat(half)))));
    }
    if (!std::isnan(core::ToFloat(brain))) {
      ASSERT_EQ(core::ToBFloat16(core::ToFloat(brain)).bits, bits);
    } else {
      ASSERT_TRUE(std::isnan(core::ToFloat(core::ToBFloat16(core::ToFloat(brain)))));
    }
  }
  auto half = [](float x) { return core::ToFloat(core::ToFloat16(x)); };
  EXPECT_EQ(half(65519.0f), 65504.0f);
  EXPECT_EQ(half(65520.0f), INFINITY);
  EXPECT_EQ(half(1.0f + 0x1p-11f), 1.0f);  // a tie goes to the even neighbour
  EXPECT_EQ(half(1.0f + 3 * 0x1p-11f), 1.0f + 0x1p-9f);
  EXPECT_EQ(core::ToFloat(Float16{1}), 0x1p-24f);
  EXPECT_EQ(core::ToFloat(Float16{0x83ff}), -0x1.ff8p-15f);
  EXPECT_EQ(half(0x1p-25f), 0.0f);
  EXPECT_EQ(half(0x1.8p-25f), 0x1p-24f);
  EXPECT_EQ(half(-0x1p-14f + 0x1p-25f), -0x1p-14f);
  auto brain = [](float x) { return core::ToFloat(core::ToBFloat16(x)); };
  EXPECT_EQ(brain(1.0f + 0x1p-8f), 1.0f);
  EXPECT_EQ(brain(1.0f + 3 * 0x1p-8f), 1.0f + 0x1p-6f);
  EXPECT_EQ(brain(std::numeric_limits<float>::max()), INFINITY);
}

}  // namespace
}  // namespace dualkv::testing
