// The caller's tensors, as kernels read and write them.
#pragma once

#include <cstdint>

#include "dualkv/dualkv.h"

namespace dualkv::cuda {

// A row and head: head_dim elements.
template <class Element>
__device__ __forceinline__ Element* RowOf(const dualkv_tensor& tensor, int64_t row, int64_t head) {
  return static_cast<Element*>(tensor.data) + row * tensor.row_stride + head * tensor.head_stride;
}

}  // namespace dualkv::cuda
