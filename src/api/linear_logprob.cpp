// Validation of the linear log-prob calls, and dispatch to the device.
#include "cpu/linear_logprob.h"

#include <cmath>

#include "api/checks.h"
#include "api/guard.h"

using dualkv::api::Guard;
using dualkv::api::RequireCpu;
using dualkv::api::RequireData;
using dualkv::api::RequireDtype;
using dualkv::api::RequireInvertible;
using dualkv::api::RequireSoftcap;
using dualkv::api::RequireStruct;
using dualkv::core::Require;

namespace {

void CheckSizes(const dualkv_linear_logprob_params& params) {
  RequireDtype(params.dtype);
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
  RequireInvertible(params.dtype, params.temperature, "temperature");
  RequireSoftcap(params.dtype, params.softcap);
  RequireCpu(params.device, "linear_logprob");
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
