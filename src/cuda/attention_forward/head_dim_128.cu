#include "cuda/attention_forward/kernel.cuh"
#include "cuda/attention_forward/launch.h"

namespace dualkv::cuda::attention_forward {

void LaunchHeadDim128(bool bfloat16, const Params& params, cudaStream_t stream) {
  (bfloat16 ? LaunchFor<__nv_bfloat16, 128> : LaunchFor<__half, 128>)(params, stream);
}

}  // namespace dualkv::cuda::attention_forward
