// Launches of the backward's kernels, one for each of the kernels' head dims, which is compiled in a file of
// its own.
#pragma once

#include <cuda_runtime.h>

namespace dualkv::cuda::attention_backward {

struct Params;
struct PrepareParams;
struct FinishParams;
struct SinkParams;

void LaunchHeadDim64(bool bfloat16, const PrepareParams& prepare, const Params& params,
                     const FinishParams& finish, const SinkParams& sinks, cudaStream_t stream);
void LaunchHeadDim128(bool bfloat16, const PrepareParams& prepare, const Params& params,
                      const FinishParams& finish, const SinkParams& sinks, cudaStream_t stream);

}  // namespace dualkv::cuda::attention_backward
