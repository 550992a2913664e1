// The backward on CUDA through the C interface: against the oracle, against the CPU backend, and run again.
// CudaAttentionBackwardSmall has every kernel and is small enough for compute-sanitizer.
#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "attention_cases.h"
#include "expect_error.h"
#include "within_budget.h"

namespace dualkv::testing {
namespace {

// Forward and backward; outputs and the workspace are poisoned before.
template <class Element>
void RunOnDevice(AttentionProblem<Element>& p, bool deterministic) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  for (Tensor<Element>* tensor : {&p.out, &p.dq, &p.dk, &p.dv}) {
    tensor->Poison();
  }
  std::fill(p.lse.begin(), p.lse.end(), kNan);
  std::fill(p.dsinks.begin(), p.dsinks.end(), kNan);
  DeviceArray<Element> q(p.q.data()), k(p.k.data()), v(p.v.data()), out(p.out.data()), dout(p.dout.data()),
      dq(p.dq.data()), dk(p.dk.data()), dv(p.dv.data());
  DeviceArray<float> lse(p.lse), dlse(p.dlse), sinks(p.sinks), dsinks(p.dsinks);
  DeviceArray<std::byte> image(p.plan->Image());
  dualkv_attention_backward_params params = p.MakeParams();
  dualkv_attention_params& forward = params.forward;
  forward.q.data = q.data();
  forward.k.data = k.data();
  forward.v.data = v.data();
  forward.out.data = out.data();
  forward.lse = lse.data();
  forward.sinks = p.options.sinks ? sinks.data() : nullptr;
  forward.device_plan = image.data();
  forward.device_plan_bytes = image.bytes();
  params.dout.data = dout.data();
  params.dlse = p.options.dlse ? dlse.data() : nullptr;
  params.dq.data = dq.data();
  params.dk.data = dk.data();
  params.dv.data = dv.data();
  params.dsinks = p.options.sinks ? dsinks.data() : nullptr;
  params.deterministic = deterministic;
  Check(dualkv_attention_forward(&forward));
  Check(dualkv_attention_backward_workspace(&params, &params.workspace_bytes));
  DeviceArray<std::byte> workspace(std::vector<std::byte>(params.workspace_bytes, std::byte{0xff}));
  params.workspace = workspace.data();
  Check(dualkv_attention_backward(&params));
  p.out.data() = out.ToHost();
  p.lse = lse.ToHost();
  p.dq.data() = dq.ToHost();
  p.dk.data() = dk.ToHost();
  p.dv.data() = dv.ToHost();
  p.dsinks = dsinks.ToHost();
}

// The results of the last run, which is deterministic, stay in the problem.
template <class Element>
void RunRepeatedly(AttentionProblem<Element>& p) {
  RunOnDevice(p, false);
  const Tensor<Element> dq_by_default = p.dq, dk = p.dk, dv = p.dv;
  const std::vector<float> dsinks = p.dsinks;
  RunOnDevice(p, true);
  const std::vector<double> in_any_order = Flat(dq_by_default), ordered = Flat(p.dq);
  double largest = 0, difference = 0;
  for (size_t i = 0; i < ordered.size(); ++i) {
    ASSERT_EQ(std::isfinite(in_any_order[i]), std::isfinite(ordered[i]));
    if (std::isfinite(ordered[i])) {
      largest = std::max(largest, std::abs(ordered[i]));
      difference = std::max(difference, std::abs(in_any_order[i] - ordered[i]));
    }
  }
  EXPECT_LE(difference, Type<Element>::kEpsilon * largest)
      << "dq has other bits by the order of its sums alone";
  EXPECT_TRUE(SameBits(p.dk.data(), dk.data()) && SameBits(p.dv.data(), dv.data()) &&
              SameBits(p.dsinks, dsinks))
      << "dk, dv and dsinks have the same bits in every run";
  const Tensor<Element> dq = p.dq;
  RunOnDevice(p, true);
  EXPECT_TRUE(SameBits(p.dq.data(), dq.data())) << "dq has the same bits in every deterministic run";
  EXPECT_TRUE(SameBits(p.dk.data(), dk.data()) && SameBits(p.dv.data(), dv.data()));
  p.dq.Poison();
  CopyElements(dq, p.dq);
  EXPECT_TRUE(SameBits(p.dq.data(), dq.data())) << "the gaps of dq are left alone";
}

template <class Element>
struct Gradients {
  explicit Gradients(const AttentionResult& r) : dq(r.dq), dk(r.dk), dv(r.dv), dsinks(r.dsinks) {}
  template <class OnCpu>
  explicit Gradients(const AttentionProblem<OnCpu>& p)
      : dq(Flat(p.dq)), dk(Flat(p.dk)), dv(Flat(p.dv)), dsinks(p.dsinks.begin(), p.dsinks.end()) {}

  std::vector<double> dq, dk, dv, dsinks;
};

template <class Element>
void ExpectRight(const AttentionProblem<Element>& p, const Gradients<Element>& plain,
                 const Gradients<Element>& oracle, double dsinks_terms) {
  constexpr double kEpsilon = Type<Element>::kEpsilon;
  const Gradients<Element> got(p);
  auto largest = [](const Tensor<Element>& x) {
    double result = 0;
    for (const double value : Flat(x)) {
      result = std::isfinite(value) ? std::max(result, std::abs(value)) : result;
    }
    return result;
  };
  // A score's gradient is a difference of two sums of D products, in float32: where they are equal, as for a
  // row that sees one key, it is their rounding.
  const double difference = std::numeric_limits<float>::epsilon() * static_cast<double>(p.options.head_dim) *
                            largest(p.dout) * largest(p.v) * std::abs(p.options.scale);
  ExpectWithinBudget("dq", got.dq, plain.dq, oracle.dq, kEpsilon, difference * largest(p.k) / kEpsilon);
  ExpectWithinBudget("dk", got.dk, plain.dk, oracle.dk, kEpsilon, difference * largest(p.q) / kEpsilon);
  ExpectWithinBudget("dv", got.dv, plain.dv, oracle.dv, kEpsilon);
  if (p.options.sinks) {
    ExpectWithinBudget("dsinks", got.dsinks, plain.dsinks, oracle.dsinks, kEpsilon, dsinks_terms);
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
  ExpectRight(problem, Gradients<Element>(plain), Gradients<Element>(oracle), oracle.dsinks_terms);
};

// The CPU backend in the type of `p`, or in a wider one.
template <class OnCpu, class Element>
AttentionProblem<OnCpu> RunOnCpu(const AttentionProblem<Element>& p) {
  AttentionOptions options = p.options;
  options.device = DUALKV_CPU;
  AttentionProblem<OnCpu> on_cpu(p.spec, options, 0);
  CopyElements(p.q, on_cpu.q);
  CopyElements(p.k, on_cpu.k);
  CopyElements(p.v, on_cpu.v);
  CopyElements(p.dout, on_cpu.dout);
  std::copy(p.sinks.begin(), p.sinks.end(), on_cpu.sinks.begin());
  std::copy(p.dlse.begin(), p.dlse.end(), on_cpu.dlse.begin());
  on_cpu.Run();
  return on_cpu;
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
  const auto oracle = RunOnCpu<double>(problem);
  double terms = 0;
  for (const double x : oracle.dsinks) {
    terms = std::max(terms, std::abs(x) * std::sqrt(static_cast<double>(problem.query_rows)));
  }
  ExpectRight(problem, Gradients<Element>(RunOnCpu<Element>(problem)), Gradients<Element>(oracle), terms);
};

using CudaAttentionBackwardSmall = CudaTest;
using CudaAttentionBackward = CudaTest;

TEST_F(CudaAttentionBackwardSmall, EveryKernel) { ForEveryKernel(kAgainstOracle); }
TEST_F(CudaAttentionBackwardSmall, WindowsAndKeysOnlySegments) {
  ForWindowsAndKeysOnlySegments(kAgainstOracle);
}
TEST_F(CudaAttentionBackwardSmall, BlocksTakeSeveralTiles) { ForBlocksWithSeveralTiles(kAgainstOracle); }
TEST_F(CudaAttentionBackwardSmall, TilesThatNoRowSees) { ForTilesThatNoRowSees(kAgainstOracle); }
TEST_F(CudaAttentionBackwardSmall, EmptyBatches) { ForEmptyBatches(kAgainstOracle); }

TEST_F(CudaAttentionBackward, MatchesTheOracleOnRandomForests) {
  ForRandomForests(0, 8, 90, 20, kAgainstOracle);
}
TEST_F(CudaAttentionBackward, MatchesTheCpuOnRandomForests) {
  ForRandomForests(100, 12, 700, 200, kAgainstCpu);
}
TEST_F(CudaAttentionBackward, EveryHeadDimIsRight) { ForEveryHeadDim(kAgainstOracle); }
TEST_F(CudaAttentionBackward, EveryRatioOfHeadsIsRight) { ForEveryRatioOfHeads(kAgainstCpu); }
TEST_F(CudaAttentionBackward, ManyTreesOfOneRow) { ForManyTreesOfOneRow(kAgainstCpu); }

}  // namespace
}  // namespace dualkv::testing
