// Validation of the linear log-prob calls, and dispatch to the device.
#include "cpu/linear_logprob.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "api/checks.h"
#include "api/guard.h"
#include "cuda/linear_logprob.h"

using dualkv::api::Guard;
using dualkv::api::IsAligned;
using dualkv::api::kMaxElements;
using dualkv::api::RequireData;
using dualkv::api::RequireDevice;
using dualkv::api::RequireDtype;
using dualkv::api::RequireInvertible;
using dualkv::api::RequireSoftcap;
using dualkv::api::RequireStruct;
using dualkv::core::Concat;
using dualkv::core::Require;
using dualkv::core::Unsupported;

namespace {

void CheckOptions(int32_t dtype, double temperature, double softcap) {
  Require(std::isfinite(temperature) && temperature > 0, "temperature must be finite and > 0, got ",
          temperature);
  RequireInvertible(dtype, temperature, "temperature");
  RequireSoftcap(dtype, softcap);
}

void CheckSizes(const dualkv_linear_logprob_params& params) {
  RequireDtype(params.dtype);
  Require(params.num_threads >= 0, "num_threads must be >= 0, got ", params.num_threads);
  Require(params.hidden_dim >= 1 && params.hidden_dim <= kMaxElements, "hidden_dim must be 1 to ",
          kMaxElements, ", got ", params.hidden_dim);
  const int64_t most = kMaxElements / params.hidden_dim;
  auto require_count = [](int64_t count, int64_t largest, const char* name) {
    Require(count >= 0 && count <= largest, name, " must be 0 to ", largest, ", got ", count);
  };
  require_count(params.hidden_rows, most, "hidden_rows");
  require_count(params.vocab_size, most, "vocab_size");
  require_count(params.num_targets, kMaxElements, "num_targets");
  Require(params.hidden_rows > 0 || params.num_targets == 0, "hidden_rows must be >= 1 for ",
          params.num_targets, " targets, got 0");
  Require(params.vocab_size > 0 || params.num_targets == 0, "vocab_size must be >= 1 for ",
          params.num_targets, " targets, got 0");
  CheckOptions(params.dtype, params.temperature, params.softcap);
  RequireDevice(params.device);
  if (params.device == DUALKV_CUDA) {
    throw Unsupported(
        "on CUDA logits are multiplied by the caller: see dualkv_linear_logprob_chunk_forward, or move the "
        "tensors to the CPU");
  }
}

// What the forward and the backward read.
void CheckInputs(const dualkv_linear_logprob_params& params) {
  CheckSizes(params);
  RequireData(params.hidden, params.hidden_rows, "hidden");
  RequireData(params.weight, params.vocab_size, "weight");
  RequireData(params.rows, params.num_targets, "rows");
  RequireData(params.targets, params.num_targets, "targets");
  for (int64_t m = 0; m < params.num_targets; ++m) {
    Require(params.rows[m] >= 0 && params.rows[m] < params.hidden_rows, "rows[", m, "] must be 0 to ",
            params.hidden_rows - 1, ", got ", params.rows[m]);
    Require((params.targets[m] >= 0 && params.targets[m] < params.vocab_size) ||
                params.targets[m] == DUALKV_IGNORE_TARGET,
            "targets[", m, "] must be 0 to ", params.vocab_size - 1, ", or ", DUALKV_IGNORE_TARGET,
            " to ignore it, got ", params.targets[m]);
  }
  RequireData(params.entropy, params.num_targets, "entropy");
}

// Device memory for `count` rows, of numbers of `bytes` each.
void RequireArray(const void* data, int64_t count, uintptr_t bytes, const char* name) {
  RequireData(data, count, name);
  Require(IsAligned(data, bytes), name, " must be aligned to ", bytes, " bytes, got ", data);
}

void CheckChunk(const dualkv_linear_logprob_chunk_params& params) {
  RequireDtype(params.dtype);
  RequireDevice(params.device);
  if (params.device == DUALKV_CPU) {
    throw Unsupported("chunks of logits are for CUDA: on the CPU call dualkv_linear_logprob_forward");
  }
  if (params.dtype == DUALKV_FLOAT64) {
    throw Unsupported(Concat("dtype must not be DUALKV_FLOAT64 (0) on CUDA, got ", params.dtype));
  }
  constexpr int64_t kMaxRows = std::numeric_limits<int32_t>::max();
  constexpr int64_t kMaxCount = int64_t{1} << 30;
  const int64_t rows = params.num_rows;
  Require(rows >= 0 && rows <= kMaxRows, "num_rows must be 0 to ", kMaxRows, ", got ", rows);
  Require(params.vocab_size >= 0, "vocab_size must be >= 0, got ", params.vocab_size);
  Require(params.vocab_begin >= 0 && params.vocab_begin <= params.vocab_size, "vocab_begin must be 0 to ",
          params.vocab_size, ", got ", params.vocab_begin);
  const int64_t most = std::min(kMaxCount, params.vocab_size - params.vocab_begin);
  Require(params.vocab_count >= 0 && params.vocab_count <= most, "vocab_count must be 0 to ", most, ", got ",
          params.vocab_count);
  CheckOptions(params.dtype, params.temperature, params.softcap);
  RequireArray(params.logits, rows, 16, "logits");
  Require(params.logits_row_stride >= params.vocab_count && params.logits_row_stride % 4 == 0,
          "logits_row_stride must be a multiple of 4 and at least ", params.vocab_count, ", got ",
          params.logits_row_stride);
  RequireArray(params.bias, 0, params.dtype == DUALKV_FLOAT32 ? 4 : 2, "bias");
  RequireArray(params.target_ranges, rows, 8, "target_ranges");
  RequireArray(params.targets, rows, 8, "targets");
  RequireArray(params.target_index, rows, 8, "target_index");
  RequireArray(params.entropy, rows, 4, "entropy");
  RequireArray(params.lse, rows, 4, "lse");
}

}  // namespace

dualkv_status dualkv_linear_logprob_forward(const dualkv_linear_logprob_params* params) {
  return Guard([&] {
    RequireStruct(params, "params");
    CheckInputs(*params);
    RequireData(params->logprob, params->num_targets, "logprob");
    dualkv::cpu::LinearLogprobForward(*params);
  });
}

dualkv_status dualkv_linear_logprob_backward(const dualkv_linear_logprob_backward_params* params) {
  return Guard([&] {
    RequireStruct(params, "params");
    RequireStruct(&params->forward, "params.forward");
    CheckInputs(params->forward);
    RequireData(params->forward.lse, params->forward.num_targets, "lse");
    dualkv::cpu::LinearLogprobBackward(*params);
  });
}

dualkv_status dualkv_linear_logprob_chunk_forward(const dualkv_linear_logprob_chunk_params* params) {
  return Guard([&] {
    RequireStruct(params, "params");
    CheckChunk(*params);
    RequireArray(params->statistics, params->num_rows, 4, "statistics");
    RequireArray(params->logprob, params->num_rows, 4, "logprob");
    dualkv::cuda::LinearLogprobChunkForward(*params);
  });
}

dualkv_status dualkv_linear_logprob_chunk_backward(
    const dualkv_linear_logprob_chunk_backward_params* params) {
  return Guard([&] {
    RequireStruct(params, "params");
    RequireStruct(&params->forward, "params.forward");
    CheckChunk(params->forward);
    RequireArray(params->dlogprob, 0, 4, "dlogprob");
    RequireArray(params->dentropy, 0, 4, "dentropy");
    dualkv::cuda::LinearLogprobChunkBackward(*params);
  });
}
