// Validation of the linear log-prob calls, and dispatch to the device.
#include "cpu/linear_logprob.h"

#include <cmath>

#include "api/guard.h"

using dualkv::api::Guard;
using dualkv::api::RequireStruct;
using dualkv::core::Require;
using dualkv::core::Unsupported;

namespace {

void CheckArray(const void* data, int64_t count, const char* name) {
  Require(data != nullptr || count == 0, name, " must not be NULL for ", count, " entries");
}

void CheckMatrix(const void* data, int64_t rows, int64_t columns, int64_t row_stride, const char* name) {
  Require(data != nullptr || rows == 0, name, " must not be NULL for ", rows, " rows");
  Require(rows <= 1 || row_stride >= columns, name, "_row_stride must be >= hidden_dim, got ", row_stride,
          " and ", columns);
}

void CheckSizes(const dualkv_linear_logprob_params& params) {
  Require(params.device == DUALKV_CPU || params.device == DUALKV_CUDA,
          "device must be DUALKV_CPU (0) or DUALKV_CUDA (1), got ", params.device);
  Require(params.dtype >= DUALKV_FLOAT64 && params.dtype <= DUALKV_FLOAT16,
          "dtype must be a dualkv_dtype, 0 to 3, got ", params.dtype);
  Require(params.num_threads >= 0, "num_threads must be >= 0, got ", params.num_threads);
  Require(params.hidden_rows >= 0, "hidden_rows must be >= 0, got ", params.hidden_rows);
  Require(params.hidden_dim >= 1, "hidden_dim must be >= 1, got ", params.hidden_dim);
  Require(params.vocab_size >= 0, "vocab_size must be >= 0, got ", params.vocab_size);
  Require(params.num_targets >= 0, "num_targets must be >= 0, got ", params.num_targets);
  Require(params.hidden_rows > 0 || params.num_targets == 0, "hidden_rows must be >= 1 for ",
          params.num_targets, " targets, got 0");
  Require(params.vocab_size > 0 || params.num_targets == 0, "vocab_size must be >= 1 for ",
          params.num_targets, " targets, got 0");
  Require(std::isfinite(params.temperature) && params.temperature > 0,
          "temperature must be finite and > 0, got ", params.temperature);
  Require(std::isfinite(params.softcap) && params.softcap >= 0, "softcap must be finite and >= 0, got ",
          params.softcap);
  if (params.device == DUALKV_CUDA) {
    throw Unsupported("this build has no CUDA kernels; move the tensors to the CPU or build with CUDA");
  }
}

// What the forward and the backward read.
void CheckInputs(const dualkv_linear_logprob_params& params) {
  CheckSizes(params);
  CheckMatrix(params.hidden, params.hidden_rows, params.hidden_dim, params.hidden_row_stride, "hidden");
  CheckMatrix(params.weight, params.vocab_size, params.hidden_dim, params.weight_row_stride, "weight");
  CheckArray(params.rows, params.num_targets, "rows");
  CheckArray(params.targets, params.num_targets, "targets");
  for (int64_t m = 0; m < params.num_targets; ++m) {
    Require(params.rows[m] >= 0 && params.rows[m] < params.hidden_rows, "rows[", m, "] must be 0 to ",
            params.hidden_rows - 1, ", got ", params.rows[m]);
    Require((params.targets[m] >= 0 && params.targets[m] < params.vocab_size) ||
                params.targets[m] == DUALKV_IGNORE_TARGET,
            "targets[", m, "] must be 0 to ", params.vocab_size - 1, ", or ", DUALKV_IGNORE_TARGET,
            " to ignore it, got ", params.targets[m]);
  }
  CheckArray(params.entropy, params.num_targets, "entropy");
}

}  // namespace

dualkv_status dualkv_linear_logprob_forward(const dualkv_linear_logprob_params* params) {
  return Guard([&] {
    RequireStruct(params, "params");
    CheckInputs(*params);
    CheckArray(params->logprob, params->num_targets, "logprob");
    dualkv::cpu::LinearLogprobForward(*params);
  });
}

dualkv_status dualkv_linear_logprob_backward(const dualkv_linear_logprob_backward_params* params) {
  return Guard([&] {
    RequireStruct(params, "params");
    RequireStruct(&params->forward, "params.forward");
    CheckInputs(params->forward);
    CheckArray(params->forward.lse, params->forward.num_targets, "lse");
    dualkv::cpu::LinearLogprobBackward(*params);
  });
}
