// Validation of the attention calls, and dispatch to the device.
#include "cpu/attention.h"

#include "api/checks.h"
#include "api/guard.h"
#include "api/objects.h"

using dualkv::api::Guard;
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
// Offsets into a tensor and the bytes of the workspace are computed in 64 bits.
constexpr int64_t kMaxElements = int64_t{1} << 56;

// Everything but the pointers to data.
const Plan& CheckShapes(const dualkv_attention_params& params) {
  RequirePointer(params.plan, "plan");
  const Plan& plan = params.plan->plan;
  RequireDtype(params.dtype);
  Require(params.num_threads >= 0, "num_threads must be >= 0, got ", params.num_threads);
  Require(params.num_kv_heads >= 1, "num_kv_heads must be >= 1, got ", params.num_kv_heads);
  Require(params.num_heads >= 1 && params.num_heads % params.num_kv_heads == 0,
          "num_heads must be a multiple of num_kv_heads, got ", params.num_heads, " and ",
          params.num_kv_heads);
  Require(params.head_dim >= 1 && params.head_dim <= kMaxHeadDim, "head_dim must be 1 to ", kMaxHeadDim,
          ", got ", params.head_dim);
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

const Plan& CheckForward(const dualkv_attention_params& params) {
  const Plan& plan = CheckShapes(params);
  RequireData(params.q.data, params.query_rows, "q.data");
  RequireData(params.k.data, params.key_rows, "k.data");
  RequireData(params.v.data, params.key_rows, "v.data");
  RequireData(params.out.data, params.query_rows, "out.data");
  return plan;
}

}  // namespace

const char* dualkv_cpu_target(void) { return dualkv::cpu::TargetName(); }

dualkv_status dualkv_attention_forward(const dualkv_attention_params* params) {
  return Guard([&] {
    RequireStruct(params, "params");
    dualkv::cpu::AttentionForward(*params, CheckForward(*params));
  });
}

dualkv_status dualkv_attention_backward_workspace(const dualkv_attention_backward_params* params,
                                                  size_t* bytes) {
  return Guard([&] {
    RequireStruct(params, "params");
    RequireStruct(&params->forward, "params.forward");
    RequirePointer(bytes, "bytes");
    *bytes = dualkv::cpu::AttentionBackwardWorkspace(*params, CheckShapes(params->forward));
  });
}

dualkv_status dualkv_attention_backward(const dualkv_attention_backward_params* params) {
  return Guard([&] {
    RequireStruct(params, "params");
    RequireStruct(&params->forward, "params.forward");
    const dualkv_attention_params& forward = params->forward;
    const Plan& plan = CheckForward(forward);
    RequireData(params->dout.data, forward.query_rows, "dout.data");
    RequireData(params->dq.data, forward.query_rows, "dq.data");
    RequireData(params->dk.data, forward.key_rows, "dk.data");
    RequireData(params->dv.data, forward.key_rows, "dv.data");
    Require(forward.lse != nullptr || forward.query_rows == 0, "lse must not be NULL in the backward");
    Require((params->dsinks != nullptr) == (forward.sinks != nullptr),
            "dsinks must be given if and only if sinks is");
    Require(params->reserved == 0, "reserved must be 0, got ", params->reserved);
    Require(params->deterministic == 0 || params->deterministic == 1, "deterministic must be 0 or 1, got ",
            params->deterministic);
    const size_t needed = dualkv::cpu::AttentionBackwardWorkspace(*params, plan);
    Require(params->workspace_bytes >= needed, "workspace_bytes must be at least ", needed, ", got ",
            params->workspace_bytes);
    Require(needed == 0 ||
                (params->workspace != nullptr && reinterpret_cast<uintptr_t>(params->workspace) % 64 == 0),
            "workspace must be aligned to 64 bytes, got ", params->workspace);
    dualkv::cpu::AttentionBackward(*params, plan);
  });
}
