// Descriptions of tensors for the tensor memory accelerator.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "dualkv/dualkv.h"

namespace dualkv::cuda {

// Both: of 2-byte elements, to be copied to shared memory in boxes of 64 columns with the swizzle of 128
// bytes. What a box covers outside the tensor reads as 0.

// Queries or what is of their shape: [query_rows, H / packed, packed, D], in boxes of `rows` rows of a pack
// of heads.
CUtensorMap MapQueries(const dualkv_attention_params& params, const dualkv_tensor& x, int32_t packed,
                       int32_t rows);

// Keys or values: [key_rows, Hk, D], in boxes of `rows` rows of a head.
CUtensorMap MapKeys(const dualkv_attention_params& params, const dualkv_tensor& x, int32_t rows);

}  // namespace dualkv::cuda
