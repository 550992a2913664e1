// Attention on CUDA. Arguments have been validated (src/api/attention.cpp); `plan` is that of the parameters.
// Each function throws core::Unsupported where this build or the current device has no kernels.
#pragma once

#include "core/plan.h"
#include "dualkv/dualkv.h"

namespace dualkv::cuda {

// Tile sizes that the forward's plan must have. head_dim is a multiple of 8 up to kMaxHeadDim.
core::TileSizes AttentionForwardTiles(int32_t num_heads, int32_t num_kv_heads, int32_t head_dim);

// Tile sizes and backward_parts that the backward's plan must have.
core::TileSizes AttentionBackwardTiles(int32_t num_heads, int32_t num_kv_heads, int32_t head_dim);
int32_t AttentionBackwardParts(int32_t num_kv_heads);

void AttentionForward(const dualkv_attention_params& params, const core::Plan& plan);

// Bytes of the workspace; its address is not looked at.
size_t AttentionBackwardWorkspace(const dualkv_attention_backward_params& params, const core::Plan& plan);
void AttentionBackward(const dualkv_attention_backward_params& params, const core::Plan& plan);

inline constexpr int32_t kMaxHeadDim = 128;

}  // namespace dualkv::cuda
