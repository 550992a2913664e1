// Stands in for the CUDA backend in a build without nvcc.
#include "core/error.h"
#include "cuda/attention.h"
#include "cuda/linear_logprob.h"

namespace dualkv::cuda {
namespace {

[[noreturn]] void Refuse() {
  throw core::Unsupported(
      "this build has no CUDA kernels: install CUDA's compiler (nvcc 12.5 or later) and build dualkv again, "
      "or move the tensors to the CPU");
}

}  // namespace

core::TileSizes AttentionForwardTiles(int32_t, int32_t, int32_t) { Refuse(); }
core::TileSizes AttentionBackwardTiles(int32_t, int32_t, int32_t) { Refuse(); }
int32_t AttentionBackwardParts(int32_t) { Refuse(); }
void AttentionForward(const dualkv_attention_params&, const core::Plan&) { Refuse(); }
size_t AttentionBackwardWorkspace(const dualkv_attention_backward_params&, const core::Plan&) { Refuse(); }
void AttentionBackward(const dualkv_attention_backward_params&, const core::Plan&) { Refuse(); }
void LinearLogprobChunkForward(const dualkv_linear_logprob_chunk_params&) { Refuse(); }
void LinearLogprobChunkBackward(const dualkv_linear_logprob_chunk_backward_params&) { Refuse(); }

}  // namespace dualkv::cuda
