// Launches of the forward kernel, one for each of the kernels' head dims, which is compiled in a file of its
// own.
#pragma once

#include <cuda_runtime.h>

namespace dualkv::cuda::attention_forward {

struct Params;

void LaunchHeadDim64(bool bfloat16, const Params& params, cudaStream_t stream);
void LaunchHeadDim128(bool bfloat16, const Params& params, cudaStream_t stream);

}  // namespace dualkv::cuda::attention_forward
