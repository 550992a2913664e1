#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "linear_logprob_problem.h"

namespace dualkv::testing {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::FloatNear;
using ::testing::Pointwise;

template <class Value>
bool SameBits(const std::vector<Value>& a, const std::vector<Value>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(Value)) == 0);
}

template <class Element>
void ExpectSameBits(const LogprobOutputs<Element>& a, const LogprobOutputs<Element>& b) {
  EXPECT_TRUE(SameBits(a.logprob, b.logprob));
  EXPECT_TRUE(SameBits(a.entropy, b.entropy));
  EXPECT_TRUE(SameBits(a.lse, b.lse));
  EXPECT_TRUE(SameBits(a.dhidden, b.dhidden));
  EXPECT_TRUE(SameBits(a.dweight, b.dweight));
  EXPECT_TRUE(SameBits(a.dbias, b.dbias));
}

template <class Element>
void CheckAgainstOracle(const LogprobOptions& options, uint64_t seed) {
  SCOPED_TRACE(options.ToString() + " seed " + std::to_string(seed));
  const LogprobProblem<Element> problem(options, seed);
  ExpectLikeOracle(problem, problem.Run());
}

template <class Element>
class LinearLogprobOfType : public ::testing::Test {};
using Elements = ::testing::Types<double, float, BFloat16, Float16>;
TYPED_TEST_SUITE(LinearLogprobOfType, Elements);

TYPED_TEST(LinearLogprobOfType, MatchesOracle) {
  uint64_t seed = 1;
  for (const int64_t vocab : {1, 7, 33, 1000}) {
    for (const int64_t dim : {1, 5, 64, 300}) {
      for (const int64_t targets : {0, 1, 65, 200}) {
        // Every option meets every other; rows repeat more or less.
        const bool bias = seed % 2, capped = seed / 2 % 2, tempered = seed / 4 % 2;
        CheckAgainstOracle<TypeParam>({.rows = seed % 3 == 0 ? 7 : 150,
                                       .dim = dim,
                                       .vocab = vocab,
                                       .targets = targets,
                                       .bias = bias,
                                       .temperature = tempered ? 0.7 : 1,
                                       .softcap = capped ? 3.0 : 0,
                                       .gap = static_cast<int64_t>(seed % 5),
                                       .ignored = seed % 7 < 3 ? 0.2 : 0,
                                       .num_threads = static_cast<int32_t>(1 + seed % 3)},
                                      seed);
        ++seed;
      }
    }
  }
}

// More rows than one worker holds, in several blocks, and more of the vocabulary than a slab.
TYPED_TEST(LinearLogprobOfType, MatchesOracleOnManyRows) {
  CheckAgainstOracle<TypeParam>({.rows = 2000,
                                 .dim = 8,
                                 .vocab = 1100,
                                 .targets = 1600,
                                 .bias = true,
                                 .ignored = 0.1,
                                 .num_threads = 1},
                                90);
}

TYPED_TEST(LinearLogprobOfType, SameBitsForAnyNumberOfThreads) {
  LogprobOptions options = {
      .rows = 2000, .dim = 70, .vocab = 1300, .targets = 1700, .bias = true, .softcap = 5, .ignored = 0.1};
  const auto expected = LogprobProblem<TypeParam>(options, 91).Run();
  for (const int32_t threads : {1, 2, 3, 5}) {
    SCOPED_TRACE(threads);
    options.num_threads = threads;
    ExpectSameBits(LogprobProblem<TypeParam>(options, 91).Run(), expected);
  }
}

TYPED_TEST(LinearLogprobOfType, BitsOfATargetDoNotDependOnTheOthers) {
  const LogprobOptions options = {.rows = 300, .dim = 70, .vocab = 1300, .targets = 400};
  const LogprobProblem<TypeParam> batch(options, 92);
  const auto expected = batch.Run();
  for (const int64_t m : {0, 7, 399}) {
    SCOPED_TRACE(m);
    LogprobProblem<TypeParam> alone = batch;
    alone.options.targets = 1;
    alone.rows = {batch.rows[m]};
    alone.targets = {batch.targets[m]};
    const auto got = alone.Run();
    EXPECT_EQ(got.logprob[0], expected.logprob[m]);
    EXPECT_EQ(got.entropy[0], expected.entropy[m]);
    EXPECT_EQ(got.lse[0], expected.lse[m]);
  }
}

TYPED_TEST(LinearLogprobOfType, ComputesOnlyWhatIsWanted) {
  const LogprobOptions options = {.rows = 20, .dim = 70, .vocab = 130, .targets = 40, .bias = true};
  const LogprobProblem<TypeParam> problem(options, 93);
  const auto expected = problem.Run();
  for (int wanted = 0; wanted < 8; ++wanted) {
    SCOPED_TRACE(wanted);
    auto out = problem.PoisonedOutputs();
    auto unwritten = out;
    auto params = problem.MakeParams(out);
    ASSERT_EQ(dualkv_linear_logprob_forward(&params.forward), DUALKV_OK) << dualkv_last_error();
    params.forward.logprob = nullptr;
    params.dhidden = wanted & 1 ? params.dhidden : nullptr;
    params.dweight = wanted & 2 ? params.dweight : nullptr;
    params.dbias = wanted & 4 ? params.dbias : nullptr;
    ASSERT_EQ(dualkv_linear_logprob_backward(&params), DUALKV_OK) << dualkv_last_error();
    EXPECT_TRUE(SameBits(out.dhidden, wanted & 1 ? expected.dhidden : unwritten.dhidden));
    EXPECT_TRUE(SameBits(out.dweight, wanted & 2 ? expected.dweight : unwritten.dweight));
    EXPECT_TRUE(SameBits(out.dbias, wanted & 4 ? expected.dbias : unwritten.dbias));
  }
  auto out = problem.PoisonedOutputs();
  auto params = problem.MakeParams(out);
  params.forward.lse = nullptr;
  ASSERT_EQ(dualkv_linear_logprob_forward(&params.forward), DUALKV_OK) << dualkv_last_error();
  EXPECT_TRUE(SameBits(out.logprob, expected.logprob));
  EXPECT_TRUE(SameBits(out.entropy, expected.entropy));
}

TEST(LinearLogprob, MissingUpstreamGradientsAreZeros) {
  const LogprobOptions options = {.rows = 20, .dim = 9, .vocab = 30, .targets = 40, .bias = true};
  LogprobProblem<double> problem(options, 94);
  for (auto* gradient : {&problem.dlogprob, &problem.dentropy}) {
    const auto kept = *gradient;
    std::fill(gradient->begin(), gradient->end(), 0.0);
    const auto expected = problem.Run();
    auto out = expected;
    auto params = problem.MakeParams(out);
    (gradient == &problem.dlogprob ? params.dlogprob : params.dentropy) = nullptr;
    ASSERT_EQ(dualkv_linear_logprob_backward(&params), DUALKV_OK) << dualkv_last_error();
    EXPECT_EQ(out.dhidden, expected.dhidden);
    EXPECT_EQ(out.dweight, expected.dweight);
    EXPECT_EQ(out.dbias, expected.dbias);
    *gradient = kept;
  }
}

// Central differences of the loss sum(dlogprob * logprob + dentropy * entropy). With steps of 2^-17 they are
// off by about 1e-10 through curvature and 1e-10 through rounding.
TEST(LinearLogprob, GradientsMatchFiniteDifferences) {
  const LogprobOptions options = {
      .rows = 3, .dim = 4, .vocab = 5, .targets = 7, .bias = true, .temperature = 0.8, .softcap = 2};
  LogprobProblem<double> problem(options, 95);
  const auto loss = [&] {
    const auto out = problem.Run();
    return std::inner_product(out.logprob.begin(), out.logprob.end(), problem.dlogprob.begin(), 0.0) +
           std::inner_product(out.entropy.begin(), out.entropy.end(), problem.dentropy.begin(), 0.0);
  };
  const auto check = [&](const char* name, std::vector<double>& input, const std::vector<double>& gradient) {
    constexpr double kStep = 0x1p-17;
    for (size_t i = 0; i < input.size(); ++i) {
      const double kept = input[i];
      input[i] = kept + kStep;
      const double above = loss();
      input[i] = kept - kStep;
      const double below = loss();
      input[i] = kept;
      EXPECT_NEAR((above - below) / (2 * kStep), gradient[i], 1e-8) << name << "[" << i << "]";
    }
  };
  const auto out = problem.Run();
  check("hidden", problem.hidden, out.dhidden);
  check("weight", problem.weight, out.dweight);
  check("bias", problem.bias, out.dbias);
}

// A problem with hidden [rows, dim], weight [vocab, dim] and one target for each of `targets`.
LogprobProblem<float> Given(int64_t dim, std::vector<float> hidden, std::vector<float> weight,
                            std::vector<int64_t> rows, std::vector<int64_t> targets) {
  LogprobOptions options = {.rows = static_cast<int64_t>(hidden.size()) / dim,
                            .dim = dim,
                            .vocab = static_cast<int64_t>(weight.size()) / dim,
                            .targets = static_cast<int64_t>(targets.size())};
  LogprobProblem<float> problem(options, 0);
  problem.hidden = std::move(hidden);
  problem.weight = std::move(weight);
  problem.rows = std::move(rows);
  problem.targets = std::move(targets);
  problem.dlogprob.assign(options.targets, 1);
  problem.dentropy.assign(options.targets, 0);
  return problem;
}

TEST(LinearLogprob, EachTargetTakesItsOwnUpstreamGradient) {
  auto problem = Given(2, {1, 0, 0, 1}, {1, 0, 0, 1}, {0, 1}, {0, 1});
  problem.dlogprob = {1, 3};
  EXPECT_THAT(problem.Run().dweight,
              Pointwise(FloatNear(1e-6f), {0.268941f, -0.806824f, -0.268941f, 0.806824f}));
  EXPECT_THAT(problem.Run().dhidden,
              Pointwise(FloatNear(1e-6f), {0.268941f, -0.268941f, -0.806824f, 0.806824f}));
  problem.dlogprob = {0, 1};
  EXPECT_THAT(problem.Run().dweight, Pointwise(FloatNear(1e-6f), {0.0f, -0.268941f, 0.0f, 0.268941f}));
  EXPECT_THAT(problem.Run().dhidden, Pointwise(FloatNear(1e-6f), {0.0f, 0.0f, -0.268941f, 0.268941f}));
}

TEST(LinearLogprob, TemperatureIsInLogprobEntropyAndGradient) {
  auto problem = Given(1, {1}, {2, 0}, {0, 0}, {0, 1});
  problem.dlogprob = {1, 0};
  auto out = problem.Run();
  EXPECT_THAT(out.logprob, Pointwise(FloatNear(1e-6f), {-0.126928f, -2.126928f}));
  EXPECT_THAT(out.entropy, Each(FloatNear(0.365334f, 1e-6f)));
  EXPECT_THAT(out.dbias, Pointwise(FloatNear(1e-6f), {0.119203f, -0.119203f}));
  problem.options.temperature = 0.5;
  out = problem.Run();
  EXPECT_THAT(out.logprob, Pointwise(FloatNear(1e-6f), {-0.0181499f, -4.0181499f}));
  EXPECT_THAT(out.entropy, Each(FloatNear(0.0900948f, 1e-6f)));
  EXPECT_THAT(out.dbias, Pointwise(FloatNear(1e-6f), {2 * 0.0179862f, -2 * 0.0179862f}));
}

TEST(LinearLogprob, IgnoredTargetsGiveZeroAndLeaveTheOthersAlone) {
  auto problem = Given(1, {1, 1, 1}, {0.1f, 0.2f, 0.3f, 0.4f, 0.5f, 0.6f, 0.7f}, {0, 1, 2}, {3, -100, 6});
  const float nan = std::numeric_limits<float>::quiet_NaN();
  problem.dlogprob = {1, nan, 2};
  problem.dentropy = {1, nan, 2};
  const auto out = problem.Run();
  EXPECT_EQ(out.logprob[1], 0);
  EXPECT_EQ(out.entropy[1], 0);
  EXPECT_EQ(out.lse[1], 0);
  EXPECT_EQ(out.dhidden[1], 0);

  auto kept = Given(1, {1, 1, 1}, problem.weight, {0, 2}, {3, 6});
  kept.dlogprob = {1, 2};
  kept.dentropy = {1, 2};
  const auto expected = kept.Run();
  EXPECT_THAT(out.logprob, ElementsAre(expected.logprob[0], 0, expected.logprob[1]));
  EXPECT_TRUE(SameBits(out.dhidden, expected.dhidden));
  EXPECT_TRUE(SameBits(out.dweight, expected.dweight));
}

TYPED_TEST(LinearLogprobOfType, AllIgnoredGivesZeros) {
  const LogprobOptions options = {.rows = 5, .dim = 3, .vocab = 4, .targets = 6, .bias = true, .ignored = 1};
  const auto out = LogprobProblem<TypeParam>(options, 97).Run();
  EXPECT_THAT(out.logprob, Each(0));
  EXPECT_THAT(out.entropy, Each(0));
  EXPECT_THAT(out.lse, Each(0));
  for (const auto* gradient : {&out.dhidden, &out.dweight, &out.dbias}) {
    for (const TypeParam value : *gradient) {
      EXPECT_EQ(ToDouble(value), 0);
    }
  }
}

// Neither rows nor a vocabulary nor targets: nothing to do, nothing to fail at.
TEST(LinearLogprob, AcceptsNothing) {
  const auto out = LogprobProblem<float>({.rows = 0, .dim = 3, .vocab = 0, .targets = 0}, 98).Run();
  EXPECT_TRUE(out.dhidden.empty());
}

TEST(LinearLogprob, ExtremeLogitsStayFinite) {
  auto problem = Given(1, {1}, {1e4f, 1e4f, -1e4f, 0}, {0, 0, 0}, {0, 2, 3});
  problem.dentropy = {1, 1, 1};
  const auto out = problem.Run();
  // log-prob and entropy do not go through lse, whose spacing is 0.001 here.
  EXPECT_THAT(out.logprob, Pointwise(FloatNear(1e-6f), {-0.693147f, -20000.693f, -10000.693f}));
  EXPECT_THAT(out.entropy, Each(FloatNear(0.693147f, 1e-6f)));
  EXPECT_THAT(out.lse, Each(FloatNear(10000.693f, 1e-3f)));
  EXPECT_THAT(out.dbias, Pointwise(FloatNear(4e-3f), {-0.5f, -1.5f, 1.0f, 1.0f}));
}

// A bias of -inf takes an entry out of the vocabulary.
TEST(LinearLogprob, EntryWithLogitMinusInfinityDoesNotCount) {
  const float infinity = std::numeric_limits<float>::infinity();
  auto without = Given(1, {1, 2}, {1, 2}, {0, 1}, {0, 1});
  auto with = Given(1, {1, 2}, {1, 2, 3}, {0, 1}, {0, 1});
  without.dentropy = with.dentropy = {1, 2};
  with.options.bias = true;
  with.bias = {0, 0, -infinity};
  const auto expected = without.Run();
  const auto got = with.Run();
  EXPECT_EQ(got.logprob, expected.logprob);
  EXPECT_EQ(got.entropy, expected.entropy);
  EXPECT_EQ(got.dhidden, expected.dhidden);
  EXPECT_THAT(got.dbias, ElementsAre(expected.dbias[0], expected.dbias[1], 0));
}

TEST(LinearLogprob, NanStaysInItsRow) {
  for (const double softcap : {0.0, 3.0}) {
    SCOPED_TRACE(softcap);
    LogprobProblem<float> problem({.rows = 40, .dim = 5, .vocab = 1300, .targets = 80, .softcap = softcap},
                                  99);
    const auto expected = problem.Run();
    const int64_t row = problem.rows[3];
    problem.hidden[row * 5 + 2] = std::numeric_limits<float>::quiet_NaN();
    const auto got = problem.Run();
    for (size_t m = 0; m < problem.rows.size(); ++m) {
      SCOPED_TRACE(m);
      if (problem.rows[m] == row) {
        EXPECT_TRUE(std::isnan(got.logprob[m]) && std::isnan(got.entropy[m]) && std::isnan(got.lse[m]));
      } else {
        EXPECT_EQ(got.logprob[m], expected.logprob[m]);
        EXPECT_EQ(got.entropy[m], expected.entropy[m]);
      }
    }
    EXPECT_TRUE(std::isnan(got.dhidden[row * 5]));
    EXPECT_TRUE(std::isnan(got.dweight[0]));
  }
}

// One NaN among finite logits is enough, wherever it stands.
TEST(LinearLogprob, NanInTheWeightReachesEveryRow) {
  for (const double softcap : {0.0, 3.0}) {
    for (const int64_t token : {0, 130, 1299}) {
      SCOPED_TRACE("softcap " + std::to_string(softcap) + " token " + std::to_string(token));
      LogprobProblem<float> problem({.rows = 4, .dim = 5, .vocab = 1300, .targets = 4, .softcap = softcap},
                                    100);
      problem.weight[token * 5] = std::numeric_limits<float>::quiet_NaN();
      const auto out = problem.Run();
      for (const auto* result : {&out.logprob, &out.entropy, &out.lse}) {
        EXPECT_TRUE(std::all_of(result->begin(), result->end(), [](float x) { return std::isnan(x); }));
      }
    }
  }
}

}  // namespace
}  // namespace dualkv::testing
