// Benchmarks of the C++ side: plan, packing and CPU attention. `make bench` runs them.
#include <benchmark/benchmark.h>

#include <cmath>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "dualkv/dualkv.hpp"

namespace {

using dualkv::Check;
using dualkv::Forest;
using dualkv::Group;
using dualkv::Params;
using dualkv::Plan;

std::vector<Group> Groups(int64_t groups, int64_t prompt, int64_t responses, int64_t response) {
  return std::vector<Group>(groups, {prompt, std::vector<int64_t>(responses, response)});
}

// Arguments: groups, prompt length, responses a group, response length.
void PlanCreate(benchmark::State& state) {
  const Forest forest =
      Forest::FromGroups(Groups(state.range(0), state.range(1), state.range(2), state.range(3)));
  for (auto _ : state) {
    benchmark::DoNotOptimize(Plan(forest).get());
  }
}
BENCHMARK(PlanCreate)->Args({1, 8192, 16, 1024})->Args({64, 4096, 16, 1024})->Unit(benchmark::kMillisecond);

// 200,000 tokens in 1,000 sequences.
void Pack(benchmark::State& state) {
  const std::vector<int64_t> prompts(125, 320), counts(125, 8), responses(1000, 160);
  const std::vector<int64_t> prompt_tokens(125 * 320, 7), response_tokens(1000 * 160, 9);
  auto params = Params<dualkv_pack_params>();
  params.num_groups = 125;
  params.prompt_lengths = prompts.data();
  params.response_counts = counts.data();
  params.response_lengths = responses.data();
  params.prompt_tokens = prompt_tokens.data();
  params.response_tokens = response_tokens.data();
  for (auto _ : state) {
    benchmark::DoNotOptimize(dualkv::Batch(params).View());
  }
}
BENCHMARK(Pack)->Unit(benchmark::kMillisecond);

// P 2048, N 8, R 256, H 8, Hk 2, D 64, fp32. Arguments: threads, backward. Counter: useful FLOP/s, 4 D H
// pairs in the forward and 2.5 times that in the backward.
void Attention(benchmark::State& state) {
  constexpr int kHeads = 8, kKvHeads = 2, kDim = 64;
  const Forest forest = Forest::FromGroups(Groups(1, 2048, 8, 256));
  const Plan plan(forest);
  const int64_t rows = forest.total_tokens();
  std::mt19937 rng(0);
  auto random = [&](int64_t heads) {
    std::normal_distribution<float> normal;
    std::vector<float> values(rows * heads * kDim);
    for (float& value : values) {
      value = normal(rng);
    }
    return values;
  };
  std::vector<float> q = random(kHeads), k = random(kKvHeads), v = random(kKvHeads), dout = random(kHeads);
  std::vector<float> out(q.size()), lse(rows * kHeads), dq(q.size()), dk(k.size()), dv(v.size());
  auto params = Params<dualkv_attention_backward_params>();
  dualkv_attention_params& forward = params.forward;
  forward.dtype = DUALKV_FLOAT32;
  forward.num_threads = static_cast<int32_t>(state.range(0));
  forward.num_heads = kHeads;
  forward.num_kv_heads = kKvHeads;
  forward.head_dim = kDim;
  forward.plan = plan.get();
  forward.query_rows = forward.key_rows = rows;
  forward.scale = 1 / std::sqrt(kDim);
  auto queries = [](std::vector<float>& data) { return dualkv_tensor{data.data(), kHeads * kDim, kDim}; };
  auto keys = [](std::vector<float>& data) { return dualkv_tensor{data.data(), kKvHeads * kDim, kDim}; };
  forward.q = queries(q);
  forward.k = keys(k);
  forward.v = keys(v);
  forward.out = queries(out);
  forward.lse = lse.data();
  params.dout = queries(dout);
  params.dq = queries(dq);
  params.dk = keys(dk);
  params.dv = keys(dv);
  Check(dualkv_attention_backward_workspace(&params, &params.workspace_bytes));
  std::unique_ptr<void, void (*)(void*)> workspace(std::aligned_alloc(64, params.workspace_bytes), std::free);
  params.workspace = workspace.get();

  Check(dualkv_attention_forward(&forward));
  const bool backward = state.range(1) != 0;
  for (auto _ : state) {
    Check(backward ? dualkv_attention_backward(&params) : dualkv_attention_forward(&forward));
  }
  const double flops = (backward ? 10.0 : 4.0) * kDim * kHeads * static_cast<double>(forest.VisiblePairs());
  state.counters["useful"] =
      benchmark::Counter(flops * static_cast<double>(state.iterations()), benchmark::Counter::kIsRate);
}
BENCHMARK(Attention)
    ->ArgNames({"threads", "backward"})
    ->ArgsProduct({{1, 2}, {0, 1}})
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);

}  // namespace
