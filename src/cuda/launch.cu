#include <stdexcept>

#include "core/error.h"
#include "cuda/launch.h"

namespace dualkv::cuda {

void Check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error(core::Concat(what, " failed: ", cudaGetErrorString(error)));
  }
}

int RequireHopper() {
  auto get = [device = [] {
    int current = 0;
    Check(cudaGetDevice(&current), "cudaGetDevice");
    return current;
  }()](cudaDeviceAttr attribute) {
    int value = 0;
    Check(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
    return value;
  };
  const int major = get(cudaDevAttrComputeCapabilityMajor), minor = get(cudaDevAttrComputeCapabilityMinor);
  if (major != 9 || minor != 0) {
    throw core::Unsupported(
        core::Concat("the CUDA kernels need a GPU of compute capability 9.0 (H100, H200), got ", major, ".",
                     minor, ": move the tensors to the CPU"));
  }
  return get(cudaDevAttrMultiProcessorCount);
}

void LaunchOnce(const void* kernel, int blocks, int threads, size_t shared_bytes, cudaStream_t stream,
                void** arguments) {
  Check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(shared_bytes)),
        "cudaFuncSetAttribute");
  Check(cudaLaunchKernel(kernel, dim3(blocks), dim3(threads), arguments, shared_bytes, stream),
        "a kernel's launch");
}

}  // namespace dualkv::cuda
