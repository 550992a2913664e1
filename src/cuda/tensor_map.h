// Descriptions of tensors for the tensor memory accelerator.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <span>

#include "dualkv/dualkv.h"

namespace dualkv::cuda {

// One dimension of a tensor, and how much of it a copy takes. The stride, in elements, means nothing if
// extent is 1.
struct MapDimension {
  int64_t extent;
  int64_t stride;
  int64_t box;
};

// A tensor of 2-byte elements, its innermost dimension (of stride 1) first, to be copied to shared memory in
// boxes with the swizzle of 128 bytes. What a box covers outside the tensor reads as 0.
CUtensorMap EncodeTensorMap(const void* data, dualkv_dtype dtype, std::span<const MapDimension> dimensions);

}  // namespace dualkv::cuda
