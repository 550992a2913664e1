#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>

#include "core/error.h"
#include "cuda/launch.h"
#include "cuda/tensor_map.h"

namespace dualkv::cuda {
namespace {

// Asked of the driver at run time, so that the library loads on machines without one.
PFN_cuTensorMapEncodeTiled_v12000 EncodeTiled() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  Check(
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
      "cudaGetDriverEntryPointByVersion");
  if (found != cudaDriverEntryPointSuccess) {
    throw core::Unsupported(
        "the CUDA driver is too old for dualkv's kernels: it must be of CUDA 12.0 or later");
  }
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
}

}  // namespace

CUtensorMap EncodeTensorMap(const void* data, dualkv_dtype dtype, std::span<const MapDimension> dimensions) {
  static const PFN_cuTensorMapEncodeTiled_v12000 encode = EncodeTiled();
  constexpr size_t kMaxRank = 5, kElementBytes = 2;
  cuuint64_t extents[kMaxRank], strides[kMaxRank];  // strides in bytes, from the second dimension on
  cuuint32_t boxes[kMaxRank], steps[kMaxRank];
  for (size_t i = 0; i < dimensions.size(); ++i) {
    extents[i] = std::max<int64_t>(dimensions[i].extent, 1);
    boxes[i] = static_cast<cuuint32_t>(dimensions[i].box);
    steps[i] = 1;
    if (i > 0) {
      strides[i - 1] = dimensions[i].extent > 1 ? dimensions[i].stride * kElementBytes : 16;
    }
  }
  CUtensorMap map;
  const CUresult result = encode(
      &map, dtype == DUALKV_BFLOAT16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
      static_cast<cuuint32_t>(dimensions.size()), const_cast<void*>(data), extents, strides, boxes, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error(core::Concat("cuTensorMapEncodeTiled failed with CUDA error ", result));
  }
  return map;
}

}  // namespace dualkv::cuda
