// Validation of the attention calls, and dispatch to the device.
#include "cpu/attention.h"

#include "api/checks.h"
#include "api/guard.h"
#include "api/objects.h"
#include "core/plan_image.h"
#include "cuda/attention.h"

using dualkv::api::Guard;
using dualkv::api::IsAligned;
using dualkv::api::kMaxElements;
using dualkv::api::RequireData;
using dualkv::api::RequireDevice;
using dualkv::api::RequireDtype;
using dualkv::api::RequireFinite;
using dualkv::api::RequirePointer;
using dualkv::api::RequireSoftcap;
using dualkv::api::RequireStruct;
using dualkv::core::Plan;
using dualkv::core::Require;

namespace {

constexpr int32_t kMaxHeadDim = 512;

void RequireCudaHeadDim(int32_t head_dim) {
  if (head_dim % 8 != 0 || head_dim > dualkv::cuda::kMaxHeadDim) {
    throw dualkv::core::Unsupported(dualkv::core::Concat(
        "head_dim must be a multiple of 8 up to ", dualkv::cuda::kMaxHeadDim, " on CUDA, got ", head_dim));
  }
}

// 16-byte accesses, and strides that fit in a tensor map. A stride that is never taken may have any value.
void CheckCudaTensor(const dualkv_tensor& tensor, int64_t rows, int64_t heads, const char* name) {
  Require(IsAligned(tensor.data, 16), name, ".data must be aligned to 16 bytes on CUDA, got ", tensor.data);
  constexpr int64_t kMaxStride = (int64_t{1} << 35) - 8;  // packed heads take up to 16 times as much
  auto require_stride = [&](int64_t stride, int64_t extent, const char* which) {
    Require(extent <= 1 || (stride > 0 && stride <= kMaxStride && stride % 8 == 0), name, ".", which,
            " must be a positive multiple of 8 up to ", kMaxStride, " on CUDA, got ", stride);
  };
  require_stride(tensor.row_stride, rows, "row_stride");
  require_stride(tensor.head_stride, heads, "head_stride");
}

void CheckHeads(int32_t num_heads, int32_t num_kv_heads, int32_t head_dim) {
  Require(num_kv_heads >= 1, "num_kv_heads must be >= 1, got ", num_kv_heads);
  Require(num_heads >= 1 && num_heads % num_kv_heads == 0,
          "num_heads must be a multiple of num_kv_heads, got ", num_heads, " and ", num_kv_heads);
  Require(head_dim >= 1 && head_dim <= kMaxHeadDim, "head_dim must be 1 to ", kMaxHeadDim, ", got ",
          head_dim);
}

// Everything but the pointers to data.
const Plan& CheckShapes(const dualkv_attention_params& params) {
  RequirePointer(params.plan, "plan");
  const Plan& plan = params.plan->plan;
  RequireDtype(params.dtype);
  Require(params.num_threads >= 0, "num_threads must be >= 0, got ", params.num_threads);
  CheckHeads(params.num_heads, params.num_kv_heads, params.head_dim);
  RequireFinite(params.dtype, params.scale, "scale");
  RequireSoftcap(params.dtype, params.softcap);

  const int64_t total = plan.forest.total_tokens();
  const int64_t first = params.query_row_begin;
  Require(params.key_rows >= total, "k and v must have at least the ", total, " rows of the forest, got ",
          params.key_rows);
  Require(first >= 0 && first <= total, "query_row_begin must be 0 to ", total, ", got ", first);
  Require(params.query_rows >= total - first, "q must have at least the ", total - first,
          " rows of the forest, got ", params.query_rows);
  const int64_t most = kMaxElements / params.num_heads / params.head_dim;
  Require(params.query_rows <= most && params.key_rows <= most, "query_rows and key_rows must be at most ",
          most, " for num_heads ", params.num_heads, " and head_dim ", params.head_dim, ", got ",
          params.query_rows, " and ", params.key_rows);
  const auto segments = plan.forest.segments();
  for (size_t s = 0; s < segments.size() && segments[s].begin < first; ++s) {
    Require(plan.keys_only[s] || segments[s].begin == segments[s].end,
            "query_row_begin must leave out keys-only rows alone, got ", first, ", past the first row ",
            segments[s].begin, " of segment ", s);
  }
  RequireDevice(params.device);
  return plan;
}

void RequireCudaTypes(const dualkv_attention_params& params) {
  if (params.dtype != DUALKV_BFLOAT16 && params.dtype != DUALKV_FLOAT16) {
    throw dualkv::core::Unsupported(dualkv::core::Concat(
        "dtype must be DUALKV_BFLOAT16 (2) or DUALKV_FLOAT16 (3) on CUDA, got ", params.dtype));
  }
  RequireCudaHeadDim(params.head_dim);
}

// What the CUDA kernels ask for beyond what the CPU's do.
void CheckCuda(const dualkv_attention_params& params, const Plan& plan) {
  RequireCudaTypes(params);
  const dualkv::core::TileSizes tiles =
      dualkv::cuda::AttentionForwardTiles(params.num_heads, params.num_kv_heads, params.head_dim);
  Require(plan.forward.tile_sizes == tiles, "plan must have the tiles of dualkv_plan_set_tiles, ",
          tiles.query, " x ", tiles.key, ", got ", plan.forward.tile_sizes.query, " x ",
          plan.forward.tile_sizes.key);
  const size_t needed = dualkv::core::PlanImageBytes(plan);
  Require(params.device_plan != nullptr && IsAligned(params.device_plan, 16),
          "device_plan must be aligned to 16 bytes and not NULL, got ", params.device_plan);
  Require(params.device_plan_bytes >= needed, "device_plan_bytes must be at least ", needed, ", got ",
          params.device_plan_bytes);
  constexpr int64_t kMaxRows =
      std::numeric_limits<int32_t>::max() - 1024;  // and a tile's more can be counted
  Require(params.query_rows <= kMaxRows && params.key_rows <= kMaxRows,
          "query_rows and key_rows must be at most ", kMaxRows, " on CUDA, got ", params.query_rows, " and ",
          params.key_rows);
  CheckCudaTensor(params.q, params.query_rows, params.num_heads, "q");
  CheckCudaTensor(params.k, params.key_rows, params.num_kv_heads, "k");
  CheckCudaTensor(params.v, params.key_rows, params.num_kv_heads, "v");
  CheckCudaTensor(params.out, params.query_rows, params.num_heads, "out");
  Require(IsAligned(params.sinks, alignof(float)), "sinks must be aligned to 4 bytes, got ", params.sinks);
  Require(IsAligned(params.lse, alignof(float)), "lse must be aligned to 4 bytes, got ", params.lse);
}

const Plan& CheckForward(const dualkv_attention_params& params) {
  const Plan& plan = CheckShapes(params);
  RequireData(params.q.data, params.query_rows, "q.data");
  RequireData(params.k.data, params.key_rows, "k.data");
  RequireData(params.v.data, params.key_rows, "v.data");
  RequireData(params.out.data, params.query_rows, "out.data");
  return plan;
}

// What the workspace depends on.
const Plan& CheckBackwardShapes(const dualkv_attention_backward_params& params) {
  const dualkv_attention_params& forward = params.forward;
  const Plan& plan = CheckShapes(forward);
  Require(params.deterministic == 0 || params.deterministic == 1, "deterministic must be 0 or 1, got ",
          params.deterministic);
  Require(params.any_plan == 0 || params.any_plan == 1, "any_plan must be 0 or 1, got ", params.any_plan);
  if (forward.device == DUALKV_CUDA) {
    RequireCudaTypes(forward);
    const dualkv::core::TileSizes tiles =
        dualkv::cuda::AttentionBackwardTiles(forward.num_heads, forward.num_kv_heads, forward.head_dim);
    const int32_t parts = dualkv::cuda::AttentionBackwardParts(forward.num_kv_heads);
    Require(plan.backward.tile_sizes == tiles && plan.backward_parts == parts,
            "plan must have the backward tiles and backward_parts of dualkv_plan_set_tiles, ", tiles.query,
            " x ", tiles.key, " and ", parts, ", got ", plan.backward.tile_sizes.query, " x ",
            plan.backward.tile_sizes.key, " and ", plan.backward_parts);
  } else {
    Require(plan.backward_parts == 0, "plan must have backward_parts 0 on the CPU, got ",
            plan.backward_parts);
  }
  return plan;
}

size_t BackwardWorkspace(const dualkv_attention_backward_params& params, const Plan& plan) {
  return params.forward.device == DUALKV_CUDA ? dualkv::cuda::AttentionBackwardWorkspace(params, plan)
                                              : dualkv::cpu::AttentionBackwardWorkspace(params, plan);
}

void CheckCudaBackward(const dualkv_attention_backward_params& params, const Plan& plan) {
  const dualkv_attention_params& forward = params.forward;
  CheckCuda(forward, plan);
  CheckCudaTensor(params.dout, forward.query_rows, forward.num_heads, "dout");
  CheckCudaTensor(params.dq, forward.query_rows, forward.num_heads, "dq");
  CheckCudaTensor(params.dk, forward.key_rows, forward.num_kv_heads, "dk");
  CheckCudaTensor(params.dv, forward.key_rows, forward.num_kv_heads, "dv");
  Require(IsAligned(params.dlse, alignof(float)), "dlse must be aligned to 4 bytes, got ", params.dlse);
  Require(IsAligned(params.dsinks, alignof(float)), "dsinks must be aligned to 4 bytes, got ", params.dsinks);
}

}  // namespace

const char* dualkv_cpu_target(void) { return dualkv::cpu::TargetName(); }

dualkv_status dualkv_plan_set_tiles(dualkv_plan_params* params, int32_t device, int32_t num_heads,
                                    int32_t num_kv_heads, int32_t head_dim) {
  return Guard([&] {
    RequireStruct(params, "params");
    RequireDevice(device);
    CheckHeads(num_heads, num_kv_heads, head_dim);
    dualkv::core::TileSizes forward = dualkv::core::kCpuTiles;
    dualkv::core::TileSizes backward = dualkv::core::kCpuTiles;
    int32_t parts = 0;
    if (device == DUALKV_CUDA) {
      RequireCudaHeadDim(head_dim);
      forward = dualkv::cuda::AttentionForwardTiles(num_heads, num_kv_heads, head_dim);
      backward = dualkv::cuda::AttentionBackwardTiles(num_heads, num_kv_heads, head_dim);
      parts = dualkv::cuda::AttentionBackwardParts(num_kv_heads);
    }
    params->forward_query_tile = forward.query;
    params->forward_key_tile = forward.key;
    params->backward_query_tile = backward.query;
    params->backward_key_tile = backward.key;
    params->backward_parts = parts;
  });
}

dualkv_status dualkv_attention_forward(const dualkv_attention_params* params) {
  return Guard([&] {
    RequireStruct(params, "params");
    const Plan& plan = CheckForward(*params);
    if (params->device == DUALKV_CUDA) {
      CheckCuda(*params, plan);
      dualkv::cuda::AttentionForward(*params, plan);
    } else {
      dualkv::cpu::AttentionForward(*params, plan);
    }
  });
}

dualkv_status dualkv_attention_backward_workspace(const dualkv_attention_backward_params* params,
                                                  size_t* bytes) {
  return Guard([&] {
    RequireStruct(params, "params");
    RequireStruct(&params->forward, "params.forward");
    RequirePointer(bytes, "bytes");
    *bytes = BackwardWorkspace(*params, CheckBackwardShapes(*params));
  });
}

dualkv_status dualkv_attention_backward(const dualkv_attention_backward_params* params) {
  return Guard([&] {
    RequireStruct(params, "params");
    RequireStruct(&params->forward, "params.forward");
    const dualkv_attention_params& forward = params->forward;
    CheckBackwardShapes(*params);
    const Plan& plan = CheckForward(forward);
    RequireData(params->dout.data, forward.query_rows, "dout.data");
    RequireData(params->dq.data, forward.query_rows, "dq.data");
    RequireData(params->dk.data, forward.key_rows, "dk.data");
    RequireData(params->dv.data, forward.key_rows, "dv.data");
    Require(forward.lse != nullptr || forward.query_rows == 0, "lse must not be NULL in the backward");
    Require((params->dsinks != nullptr) == (forward.sinks != nullptr),
            "dsinks must be given if and only if sinks is");
    const size_t needed = BackwardWorkspace(*params, plan);
    Require(params->workspace_bytes >= needed, "workspace_bytes must be at least ", needed, ", got ",
            params->workspace_bytes);
    Require(needed == 0 || (params->workspace != nullptr && IsAligned(params->workspace, 64)),
            "workspace must be aligned to 64 bytes, got ", params->workspace);
    if (forward.device == DUALKV_CUDA) {
      CheckCudaBackward(*params, plan);
      dualkv::cuda::AttentionBackward(*params, plan);
    } else {
      dualkv::cpu::AttentionBackward(*params, plan);
    }
  });
}
