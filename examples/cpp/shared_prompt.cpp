// One prompt with three responses: the packed batch, its plan, and attention over it, checked against
// attention over the second response's sequence by itself.
#include <cstdio>
#include <random>
#include <vector>

#include "dualkv/dualkv.hpp"

namespace {

constexpr int kHeads = 4, kKvHeads = 2, kHeadDim = 64;

// q [T, H, D], k and v [T, Hk, D], contiguous.
struct Tensors {
  std::vector<float> q, k, v;
};

// out [T, H, D]
std::vector<float> Attention(const dualkv::Forest& forest, Tensors& tensors) {
  const dualkv::Plan plan(forest);
  std::vector<float> out(tensors.q.size());
  auto params = dualkv::Params<dualkv_attention_params>();
  params.device = DUALKV_CPU;
  params.dtype = DUALKV_FLOAT32;
  params.num_heads = kHeads;
  params.num_kv_heads = kKvHeads;
  params.head_dim = kHeadDim;
  params.plan = plan.get();
  params.query_rows = params.key_rows = forest.total_tokens();
  params.scale = 0.125;  // head_dim^-0.5
  params.q = {tensors.q.data(), kHeads * kHeadDim, kHeadDim};
  params.k = {tensors.k.data(), kKvHeads * kHeadDim, kHeadDim};
  params.v = {tensors.v.data(), kKvHeads * kHeadDim, kHeadDim};
  params.out = {out.data(), kHeads * kHeadDim, kHeadDim};
  dualkv::Check(dualkv_attention_forward(&params));
  return out;
}

// The rows [begin, end) of a tensor with `width` elements a row, appended to `to`.
void Append(const std::vector<float>& from, int64_t begin, int64_t end, int64_t width,
            std::vector<float>& to) {
  to.insert(to.end(), from.begin() + begin * width, from.begin() + end * width);
}

}  // namespace

int main() try {
  const auto forest = dualkv::Forest::FromGroups({{.prompt = 300, .responses = {40, 25, 60}}});
  const int64_t tokens = forest.total_tokens();
  std::printf("dualkv %s on %s: %lld rows instead of %d\n", dualkv_version(), dualkv_cpu_target(),
              static_cast<long long>(tokens), 3 * 300 + 40 + 25 + 60);

  std::mt19937 rng(0);
  std::normal_distribution<float> normal;
  Tensors packed;
  for (int64_t i = 0; i < tokens * kHeads * kHeadDim; ++i) packed.q.push_back(normal(rng));
  for (int64_t i = 0; i < tokens * kKvHeads * kHeadDim; ++i) packed.k.push_back(normal(rng));
  for (int64_t i = 0; i < tokens * kKvHeads * kHeadDim; ++i) packed.v.push_back(normal(rng));
  const std::vector<float> out = Attention(forest, packed);

  // The second response is segment 2 of the forest. Its own sequence is a root of prompt and response.
  const dualkv_segment& response = forest.segments()[2];
  Tensors alone;
  for (const auto& [begin, end] : {std::pair{0, 300}, std::pair{response.begin, response.end}}) {
    Append(packed.q, begin, end, kHeads * kHeadDim, alone.q);
    Append(packed.k, begin, end, kKvHeads * kHeadDim, alone.k);
    Append(packed.v, begin, end, kKvHeads * kHeadDim, alone.v);
  }
  const std::vector<float> expected =
      Attention(dualkv::Forest::FromGroups({{.prompt = 300, .responses = {25}}}), alone);
  std::vector<float> got, want;
  Append(out, response.begin, response.end, kHeads * kHeadDim, got);
  Append(expected, 300, 325, kHeads * kHeadDim, want);
  const bool same = got == want;
  std::printf("response 2: %s\n", same ? "the same bits as alone" : "DIFFERENT from alone");
  return same ? 0 : 1;
} catch (const dualkv::Error& error) {
  std::fprintf(stderr, "dualkv: %s\n", error.what());
  return 1;
}
