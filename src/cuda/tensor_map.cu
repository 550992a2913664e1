#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <span>
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

// One dimension of a tensor, and how much of it a copy takes. The stride, in elements, means nothing if
// extent is 1.
struct MapDimension {
  int64_t extent;
  int64_t stride;
  int64_t box;
};

// The innermost dimension, of stride 1, comes first, and that of the rows last.
CUtensorMap Encode(const dualkv_attention_params& params, const dualkv_tensor& x,
                   std::span<const MapDimension> dimensions) {
  static const PFN_cuTensorMapEncodeTiled_v12000 encode = EncodeTiled();
  // Without rows there may be no address, which a map has to have; nothing is read from it then.
  const void* data = dimensions.back().extent > 0 ? x.data : params.device_plan;
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
      &map,
      params.dtype == DUALKV_BFLOAT16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
      static_cast<cuuint32_t>(dimensions.size()), const_cast<void*>(data), extents, strides, boxes, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error(core::Concat("cuTensorMapEncodeTiled failed with CUDA error ", result));
  }
  return map;
}

constexpr int64_t kBoxColumns = 64;

}  // namespace

CUtensorMap MapQueries(const dualkv_attention_params& params, const dualkv_tensor& x, int32_t packed,
                       int32_t rows) {
  return Encode(params, x,
                std::array<MapDimension, 4>{{{params.head_dim, 1, kBoxColumns},
                                             {packed, x.head_stride, packed},
                                             {params.num_heads / packed, x.head_stride * packed, 1},
                                             {params.query_rows, x.row_stride, rows}}});
}

CUtensorMap MapKeys(const dualkv_attention_params& params, const dualkv_tensor& x, int32_t rows) {
  return Encode(params, x,
                std::array<MapDimension, 3>{{{params.head_dim, 1, kBoxColumns},
                                             {params.num_kv_heads, x.head_stride, 1},
                                             {params.key_rows, x.row_stride, rows}}});
}

}  // namespace dualkv::cuda
