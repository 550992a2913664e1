// Host side of the forward: from the parameters of the C interface to those of the kernel.
#include <algorithm>
#include <limits>

#include "core/error.h"
#include "core/plan.h"
#include "cuda/attention.h"
#include "cuda/attention_forward/config.cuh"
#include "cuda/attention_forward/launch.h"
#include "cuda/launch.h"
#include "cuda/packed_heads.h"
#include "cuda/scores.h"
#include "cuda/tensor_map.h"

namespace dualkv::cuda {
namespace {

using namespace attention_forward;

struct TileShape {
  int32_t products;  // rows of the products: query rows x packed heads
  int32_t keys;
};

// The kernel for a head dim is that of the next larger tile.
TileShape ShapeFor(int32_t head_dim) {
  return head_dim <= 64 ? TileShape{kQueryTile<64>, Config<64>::kKeyTile}
                        : TileShape{kQueryTile<128>, Config<128>::kKeyTile};
}

// As many as have keys and values that the L2 holds, beside queries and results, while all query tiles pass.
int32_t PacksAbreast(const dualkv_attention_params& params, const core::Plan& plan,
                     int32_t packs_per_kv_head) {
  constexpr int64_t kBytes = 16 << 20;  // of 50 MB
  int64_t keys = 0;
  if (!plan.forward.tiles.empty()) {
    const dualkv_tile& heaviest = plan.forward.tiles.front();
    for (int32_t r = heaviest.run_begin; r < heaviest.run_end; ++r) {
      keys += plan.forward.runs[r].end - plan.forward.runs[r].begin;
    }
  }
  const int64_t bytes_per_kv_head = std::max<int64_t>(keys * params.head_dim * 2 * 2, 1);
  return LargestDivisor(params.num_kv_heads, kBytes / bytes_per_kv_head) * packs_per_kv_head;
}

}  // namespace

core::TileSizes AttentionForwardTiles(int32_t num_heads, int32_t num_kv_heads, int32_t head_dim) {
  const TileShape shape = ShapeFor(head_dim);
  return {.query = shape.products / PackedHeads(num_heads / num_kv_heads, shape.products), .key = shape.keys};
}

void AttentionForward(const dualkv_attention_params& params, const core::Plan& plan) {
  RequireHopper();
  if (params.query_rows == 0) {
    return;
  }
  const TileShape shape = ShapeFor(params.head_dim);
  const int32_t group = params.num_heads / params.num_kv_heads;
  const int32_t packed = PackedHeads(group, shape.products);
  const int32_t rows_per_tile = plan.forward.tile_sizes.query;
  const int64_t items = static_cast<int64_t>(plan.forward.tiles.size()) * (params.num_heads / packed);
  core::Require(items <= std::numeric_limits<int32_t>::max(), "the plan has too many tiles for num_heads ",
                params.num_heads, " on CUDA: ", plan.forward.tiles.size());
  const Params kernel_params = {.queries = MapQueries(params, params.q, packed, rows_per_tile),
                                .keys = MapKeys(params, params.k, shape.keys),
                                .values = MapKeys(params, params.v, shape.keys),
                                .plan = static_cast<const core::PlanImageHeader*>(params.device_plan),
                                .out = params.out,
                                .lse = static_cast<float*>(params.lse),
                                .sinks = static_cast<const float*>(params.sinks),
                                .query_rows = static_cast<int32_t>(params.query_rows),
                                .query_row_begin = static_cast<int32_t>(params.query_row_begin),
                                .num_heads = params.num_heads,
                                .head_dim = params.head_dim,
                                .packed = packed,
                                .packs_per_kv_head = group / packed,
                                .rows_per_tile = rows_per_tile,
                                .packs_abreast = PacksAbreast(params, plan, group / packed),
                                .softcap = MakeSoftcap(params)};
  auto* launch = params.head_dim <= 64 ? LaunchHeadDim64 : LaunchHeadDim128;
  launch(params.dtype == DUALKV_BFLOAT16, kernel_params, static_cast<cudaStream_t>(params.stream));
}

}  // namespace dualkv::cuda
