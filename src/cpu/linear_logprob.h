// Log-probabilities of targets under a linear head, on the CPU. Arguments have been validated
// (src/api/linear_logprob.cpp).
#pragma once

#include "dualkv/dualkv.h"

namespace dualkv::cpu {

void LinearLogprobForward(const dualkv_linear_logprob_params& params);

void LinearLogprobBackward(const dualkv_linear_logprob_backward_params& params);

}  // namespace dualkv::cpu
