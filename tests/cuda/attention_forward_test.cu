// The forward on CUDA through the C interface: against the oracle, against the CPU backend, and run again.
// CudaAttentionSmall has every kernel and is small enough for compute-sanitizer.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "attention_cases.h"
#include "expect_error.h"
#include "within_budget.h"

namespace dualkv::testing {
namespace {

// Writes out and lse, poisoned before.
template <class Element>
void RunOnDevice(AttentionProblem<Element>& p, bool with_lse = true) {
  p.out.Poison();
  std::fill(p.lse.begin(), p.lse.end(), std::numeric_limits<float>::quiet_NaN());
  DeviceArray<Element> q(p.q.data()), k(p.k.data()), v(p.v.data()), out(p.out.data());
  DeviceArray<float> lse(p.lse), sinks(p.sinks);
  DeviceArray<std::byte> image(p.plan->Image());
  dualkv_attention_params params = p.MakeParams().forward;
  params.q.data = q.data();
  params.k.data = k.data();
  params.v.data = v.data();
  params.out.data = out.data();
  params.lse = with_lse ? lse.data() : nullptr;
  params.sinks = p.options.sinks ? sinks.data() : nullptr;
  params.device_plan = image.data();
  params.device_plan_bytes = image.bytes();
  Check(dualkv_attention_forward(&params));
  p.out.data() = out.ToHost();
  p.lse = lse.ToHost();
}

// The results of the first run stay in the problem.
template <class Element>
void RunRepeatedly(AttentionProblem<Element>& p) {
  RunOnDevice(p);
  const Tensor<Element> out = p.out;
  const std::vector<float> lse = p.lse;
  RunOnDevice(p, false);
  EXPECT_TRUE(SameBits(p.out.data(), out.data())) << "without lse";
  EXPECT_TRUE(std::all_of(p.lse.begin(), p.lse.end(), [](float x) { return std::isnan(x); }));
  RunOnDevice(p);
  EXPECT_TRUE(SameBits(p.out.data(), out.data()) && SameBits(p.lse, lse)) << "the same bits in every run";
  p.out.Poison();
  CopyElements(out, p.out);
  EXPECT_TRUE(SameBits(p.out.data(), out.data())) << "the gaps of out are left alone";
}

struct Expected {
  std::vector<double> out, lse;
};

template <class Element>
void ExpectRight(const AttentionProblem<Element>& p, const Expected& plain, const Expected& oracle) {
  const int64_t heads = p.options.num_heads, dim = p.options.head_dim;
  const std::vector<double> out = Flat(p.out), lse(p.lse.begin(), p.lse.end());
  ExpectWithinBudget("out", out, plain.out, oracle.out, Type<Element>::kEpsilon);
  auto largest = [](const std::vector<double>& values) {
    double result = 0;
    for (const double x : values) {
      result = std::isfinite(x) ? std::max(result, std::abs(x)) : result;
    }
    return result;
  };
  // A score is a sum of D terms. A tensor core adds up to 16 of them at the exponent of the largest, and cuts
  // off what lies below.
  const double terms = static_cast<double>(std::min<int64_t>(dim, 16)) * std::abs(p.options.scale) *
                       largest(Flat(p.q)) * largest(Flat(p.k));
  const double scores = std::max({terms, p.options.softcap, std::sqrt(dim) * largest(oracle.lse)});
  ExpectWithinBudget("lse", lse, plain.lse, oracle.lse, std::numeric_limits<float>::epsilon(), scores);
  for (int64_t i = 0; i < p.query_rows * heads * dim; ++i) {
    const int64_t row = i / dim / heads, head = i / dim % heads;
    if (std::isinf(oracle.lse[head * p.query_rows + row])) {
      ASSERT_EQ(out[i], 0) << "row " << row << " is no query";
    }
  }
}

constexpr auto kAgainstOracle = [](auto element, const ForestSpec& forest, AttentionOptions options,
                                   uint64_t seed) {
  using Element = decltype(element);
  options.device = DUALKV_CUDA;
  SCOPED_TRACE(options.ToString() + "; " + forest.ToString());
  AttentionProblem<Element> problem(forest, options, seed);
  PoisonUnusedRows(problem);
  RunRepeatedly(problem);
  const AttentionResult plain = ReferenceAttention<float>(problem);
  const AttentionResult oracle = ReferenceAttention<long double>(problem);
  ExpectRight(problem, {plain.out, plain.lse}, {oracle.out, oracle.lse});
};

// The CPU backend in the type of `p`, or in a wider one.
template <class OnCpu, class Element>
Expected RunOnCpu(const AttentionProblem<Element>& p) {
  AttentionOptions options = p.options;
  options.device = DUALKV_CPU;
  AttentionProblem<OnCpu> on_cpu(p.spec, options, 0);
  CopyElements(p.q, on_cpu.q);
  CopyElements(p.k, on_cpu.k);
  CopyElements(p.v, on_cpu.v);
  std::copy(p.sinks.begin(), p.sinks.end(), on_cpu.sinks.begin());
  auto params = on_cpu.MakeParams();
  Check(dualkv_attention_forward(&params.forward));
  return {Flat(on_cpu.out), std::vector<double>(on_cpu.lse.begin(), on_cpu.lse.end())};
}

constexpr auto kAgainstCpu = [](auto element, const ForestSpec& forest, AttentionOptions options,
                                uint64_t seed) {
  using Element = decltype(element);
  options.device = DUALKV_CUDA;
  options.num_threads = 0;
  SCOPED_TRACE(options.ToString() + "; " + forest.ToString());
  AttentionProblem<Element> problem(forest, options, seed);
  PoisonUnusedRows(problem);
  RunRepeatedly(problem);
  ExpectRight(problem, RunOnCpu<Element>(problem), RunOnCpu<double>(problem));
};

using CudaAttentionSmall = CudaTest;
using CudaAttention = CudaTest;

TEST_F(CudaAttentionSmall, EveryKernel) { ForEveryKernel(kAgainstOracle); }
TEST_F(CudaAttentionSmall, WindowsAndKeysOnlySegments) { ForWindowsAndKeysOnlySegments(kAgainstOracle); }
TEST_F(CudaAttentionSmall, BlocksTakeSeveralTiles) { ForBlocksWithSeveralTiles(kAgainstOracle); }
TEST_F(CudaAttentionSmall, EmptyBatches) { ForEmptyBatches(kAgainstOracle); }

TEST_F(CudaAttentionSmall, RowsWithoutKeys) {
  AttentionProblem<BFloat16> problem({{0}, {-1}}, {.device = DUALKV_CUDA, .extra_rows = 3}, 1);
  problem.key_rows = 0;
  problem.k.data().clear();  // NULL
  problem.v.data().clear();
  RunOnDevice(problem);
  EXPECT_EQ(Flat(problem.out), std::vector<double>(3 * 8, 0));
  EXPECT_EQ(problem.lse, std::vector<float>(3, -std::numeric_limits<float>::infinity()));
}

TEST_F(CudaAttention, MatchesTheOracleOnRandomForests) { ForRandomForests(0, 8, 90, 20, kAgainstOracle); }
TEST_F(CudaAttention, MatchesTheCpuOnRandomForests) { ForRandomForests(100, 12, 700, 200, kAgainstCpu); }
TEST_F(CudaAttention, EveryHeadDimIsRight) { ForEveryHeadDim(kAgainstOracle); }
TEST_F(CudaAttention, EveryRatioOfHeadsIsRight) { ForEveryRatioOfHeads(kAgainstCpu); }
TEST_F(CudaAttention, ManyTreesOfOneRow) { ForManyTreesOfOneRow(kAgainstCpu); }

// 32 tiles of 2^26 heads. It is refused before a tensor is touched.
TEST_F(CudaAttention, RefusesTooManyTiles) {
  const ForestSpec forest{std::vector<int64_t>(32, 1), std::vector<int64_t>(32, -1)};
  AttentionProblem<BFloat16> problem(forest, {.device = DUALKV_CUDA}, 1);
  DeviceArray<std::byte> image(problem.plan->Image());
  dualkv_attention_params params = problem.MakeParams().forward;
  params.num_heads = params.num_kv_heads = 1 << 26;
  params.device_plan = image.data();
  params.device_plan_bytes = image.bytes();
  ExpectInvalid(dualkv_attention_forward(&params), {"too many tiles", "num_heads 67108864", "32"});
}

}  // namespace
}  // namespace dualkv::testing
