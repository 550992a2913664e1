#include <stdexcept>
#include <string>

#include "core/error.h"
#include "cuda/launch.h"

namespace dualkv::cuda {

void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) {
    return;
  }
  const std::string message = core::Concat(what, " failed: ", cudaGetErrorString(error));
  if (error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver) {
    throw core::Unsupported(message);
  }
  throw std::runtime_error(message);
}

namespace {

int Attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  Check(cudaGetDevice(&device), "cudaGetDevice");
  Check(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
  return value;
}

}  // namespace

void RequireHopper() {
  const int major = Attribute(cudaDevAttrComputeCapabilityMajor);
  const int minor = Attribute(cudaDevAttrComputeCapabilityMinor);
  if (major != 9 || minor != 0) {
    throw core::Unsupported(
        core::Concat("the CUDA kernels need a GPU of compute capability 9.0 (H100, H200), got ", major, ".",
                     minor, ": move the tensors to the CPU"));
  }
}

int NumMultiprocessors() { return Attribute(cudaDevAttrMultiProcessorCount); }

void Launch(const void* kernel, int blocks, int threads, size_t shared_bytes, cudaStream_t stream,
            void** arguments) {
  Check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(shared_bytes)),
        "cudaFuncSetAttribute");
  Check(cudaLaunchKernel(kernel, dim3(blocks), dim3(threads), arguments, shared_bytes, stream),
        "a kernel's launch");
}

}  // namespace dualkv::cuda
