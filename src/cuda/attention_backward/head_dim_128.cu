#include "cuda/attention_backward/kernel.cuh"
#include "cuda/attention_backward/launch.h"

namespace dualkv::cuda::attention_backward {

void LaunchHeadDim128(bool bfloat16, const PrepareParams& prepare, const Params& params,
                      const FinishParams& finish, const SinkParams& sinks, cudaStream_t stream) {
  (bfloat16 ? LaunchFor<__nv_bfloat16, 128> : LaunchFor<__half, 128>)(prepare, params, finish, sinks, stream);
}

}  // namespace dualkv::cuda::attention_backward
