// Host side of the backward: from the parameters of the C interface to those of the kernels.
#include <algorithm>
#include <limits>

#include "core/error.h"
#include "core/plan.h"
#include "cuda/attention.h"
#include "cuda/attention_backward/config.cuh"
#include "cuda/attention_backward/finish.cuh"
#include "cuda/attention_backward/launch.h"
#include "cuda/attention_backward/prepare.cuh"
#include "cuda/launch.h"
#include "cuda/packed_heads.h"
#include "cuda/scores.h"
#include "cuda/tensor_map.h"

namespace dualkv::cuda {
namespace {

using namespace attention_backward;

// The kernel for a head dim is that of the next larger tile.
int32_t KernelHeadDim(int32_t head_dim) { return head_dim <= 64 ? 64 : 128; }
int32_t ProductRows(int32_t head_dim) { return head_dim <= 64 ? kQueryTile<64> : kQueryTile<128>; }

// Multiprocessors of the GPUs that the kernels are for. Plans do not ask the device: they are made for
// several.
constexpr int32_t kMultiprocessors = 132;

// Fewer KV heads side by side have fewer rows for the L2 to hold. But there must be enough for two waves of
// the longest band, one that comes down and one that goes up.
int32_t HeadsAbreast(const core::Plan& plan, int32_t num_kv_heads) {
  constexpr int32_t kTwoWaves = 256;  // almost: a power of two, as prompts' lengths often are
  const int64_t items = int64_t{num_kv_heads} * plan.longest_band;
  const int32_t sections = LargestDivisor(num_kv_heads, items / kTwoWaves);
  return num_kv_heads / sections;
}

// The caller's workspace.
struct Workspace {
  int32_t* next_item;
  int32_t* turns;   // [H / packed, row_pitch], for results that repeat
  float* lse_log2;  // [H / packed, row_pitch]
  float* delta;     // [H / packed, row_pitch]
  float* dq;        // [H / packed * row_pitch, kernel's D]
  float* partials;  // [parts, Hk, 2, kKeyTile, kernel's D]
  int64_t row_pitch;
  int64_t num_counters;
  size_t bytes;

  Workspace(const dualkv_attention_backward_params& params, const core::Plan& plan) {
    const dualkv_attention_params& forward = params.forward;
    auto* base = static_cast<std::byte*>(params.workspace);
    bytes = 0;
    auto take = [&](int64_t count) {
      void* taken = base == nullptr ? nullptr : base + bytes;
      bytes += (count * 4 + 255) / 256 * 256;
      return taken;
    };
    const int32_t packed =
        PackedHeads(forward.num_heads / forward.num_kv_heads, ProductRows(forward.head_dim));
    row_pitch = (forward.query_rows * packed + 7) / 8 * 8;
    const int64_t rows = forward.num_heads / packed * row_pitch;
    num_counters = 64 + (params.deterministic ? rows : 0);  // the counter of items has a line of its own
    next_item = static_cast<int32_t*>(take(num_counters));
    turns = params.deterministic && next_item != nullptr ? next_item + 64 : nullptr;
    lse_log2 = static_cast<float*>(take(rows));
    delta = static_cast<float*>(take(rows));
    dq = static_cast<float*>(take(rows * KernelHeadDim(forward.head_dim)));
    const int64_t parts = params.any_plan ? core::MostPartials(plan.backward_parts) : plan.num_partials;
    partials = static_cast<float*>(
        take(parts * forward.num_kv_heads * 2 * kKeyTile * KernelHeadDim(forward.head_dim)));
  }
};

}  // namespace

core::TileSizes AttentionBackwardTiles(int32_t num_heads, int32_t num_kv_heads, int32_t head_dim) {
  const int32_t products = ProductRows(head_dim);
  return {.query = products / PackedHeads(num_heads / num_kv_heads, products), .key = kKeyTile};
}

int32_t AttentionBackwardParts(int32_t num_kv_heads) {
  return (2 * kMultiprocessors + num_kv_heads - 1) / num_kv_heads;
}

size_t AttentionBackwardWorkspace(const dualkv_attention_backward_params& params, const core::Plan& plan) {
  return Workspace(params, plan).bytes;
}

void AttentionBackward(const dualkv_attention_backward_params& params, const core::Plan& plan) {
  RequireHopper();
  const dualkv_attention_params& forward = params.forward;
  const int64_t items = static_cast<int64_t>(plan.backward.tiles.size()) * forward.num_kv_heads;
  core::Require(items <= std::numeric_limits<int32_t>::max() / 2,
                "the plan has too many tiles for num_kv_heads ", forward.num_kv_heads,
                " on CUDA: ", plan.backward.tiles.size());
  const Workspace workspace(params, plan);
  const int32_t group = forward.num_heads / forward.num_kv_heads;
  const int32_t packed = PackedHeads(group, ProductRows(forward.head_dim));
  const int32_t rows_per_tile = plan.backward.tile_sizes.query;
  const auto* image = static_cast<const core::PlanImageHeader*>(forward.device_plan);
  const auto query_rows = static_cast<int32_t>(forward.query_rows);
  const auto query_row_begin = static_cast<int32_t>(forward.query_row_begin);
  const float scale = Narrow(forward.scale);
  const auto* lse = static_cast<const float*>(forward.lse);

  const PrepareParams prepare = {.plan = image,
                                 .out = forward.out,
                                 .dout = params.dout,
                                 .lse = lse,
                                 .dlse = static_cast<const float*>(params.dlse),
                                 .lse_log2 = workspace.lse_log2,
                                 .delta = workspace.delta,
                                 .row_pitch = workspace.row_pitch,
                                 .dq = workspace.dq,
                                 .counters = workspace.next_item,
                                 .num_counters = workspace.num_counters,
                                 .query_rows = query_rows,
                                 .query_row_begin = query_row_begin,
                                 .num_heads = forward.num_heads,
                                 .head_dim = forward.head_dim,
                                 .packed = packed,
                                 .deterministic = params.deterministic != 0};
  const Params main = {.queries = MapQueries(forward, forward.q, packed, rows_per_tile),
                       .douts = MapQueries(forward, params.dout, packed, rows_per_tile),
                       .keys = MapKeys(forward, forward.k, kKeyTile),
                       .values = MapKeys(forward, forward.v, kKeyTile),
                       .plan = image,
                       .lse_log2 = workspace.lse_log2,
                       .delta = workspace.delta,
                       .dq = workspace.dq,
                       .row_pitch = workspace.row_pitch,
                       .partials = workspace.partials,
                       .next_item = workspace.next_item,
                       .turns = workspace.turns,
                       .dk = params.dk,
                       .dv = params.dv,
                       .query_row_begin = query_row_begin,
                       .num_heads = forward.num_heads,
                       .num_kv_heads = forward.num_kv_heads,
                       .head_dim = forward.head_dim,
                       .packed = packed,
                       .packs_per_kv_head = group / packed,
                       .rows_per_tile = rows_per_tile,
                       .kv_heads_abreast = HeadsAbreast(plan, forward.num_kv_heads),
                       .scale = scale,
                       .softcap = MakeSoftcap(forward)};
  const FinishParams finish = {.plan = image,
                               .accumulated = workspace.dq,
                               .partials = workspace.partials,
                               .dq = params.dq,
                               .dk = params.dk,
                               .dv = params.dv,
                               .query_rows = query_rows,
                               .key_rows = static_cast<int32_t>(forward.key_rows),
                               .num_heads = forward.num_heads,
                               .num_kv_heads = forward.num_kv_heads,
                               .head_dim = forward.head_dim,
                               .row_pitch = workspace.row_pitch,
                               .packed = packed,
                               .scale = scale};
  const SinkParams sinks = {.sinks = static_cast<const float*>(forward.sinks),
                            .lse = lse,
                            .delta = workspace.delta,
                            .dsinks = static_cast<float*>(params.dsinks),
                            .row_pitch = workspace.row_pitch,
                            .query_rows = query_rows,
                            .packed = packed};
  auto* launch = forward.head_dim <= 64 ? LaunchHeadDim64 : LaunchHeadDim128;
  launch(forward.dtype == DUALKV_BFLOAT16, prepare, main, finish, sinks,
         static_cast<cudaStream_t>(forward.stream));
}

}  // namespace dualkv::cuda
