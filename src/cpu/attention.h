// Attention on the CPU. Arguments have been validated (src/api/attention.cpp); `plan` is that of the
// parameters.
#pragma once

#include <cstddef>

#include "core/plan.h"
#include "dualkv/dualkv.h"

namespace dualkv::cpu {

// Name of the instruction set in use.
const char* TargetName();

void AttentionForward(const dualkv_attention_params& params, const core::Plan& plan);

size_t AttentionBackwardWorkspace(const dualkv_attention_backward_params& params, const core::Plan& plan);
void AttentionBackward(const dualkv_attention_backward_params& params, const core::Plan& plan);

}  // namespace dualkv::cpu
