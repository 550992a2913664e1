#include "cuda/attention_backward/kernel.cuh"
#include "cuda/attention_backward/launch.h"

namespace dualkv::cuda::attention_backward {

void LaunchHeadDim64(bool bfloat16, const PrepareParams& prepare, const Params& params,
                     const FinishParams& finish, const SinkParams& sinks, cudaStream_t stream) {
  (bfloat16 ? LaunchFor<__nv_bfloat16, 64> : LaunchFor<__half, 64>)(prepare, params, finish, sinks, stream);
}

}  // namespace dualkv::cuda::attention_backward
