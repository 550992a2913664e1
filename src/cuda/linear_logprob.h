// Log-probabilities of targets from chunks of logits, on CUDA. Arguments have been validated
// (src/api/linear_logprob.cpp). Both throw core::Unsupported where this build or the current device has no
// kernels.
#pragma once

#include "dualkv/dualkv.h"

namespace dualkv::cuda {

void LinearLogprobChunkForward(const dualkv_linear_logprob_chunk_params& params);

void LinearLogprobChunkBackward(const dualkv_linear_logprob_chunk_backward_params& params);

}  // namespace dualkv::cuda
