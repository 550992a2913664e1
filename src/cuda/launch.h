// Checked calls of the CUDA runtime, and the one way in which kernels are launched.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace dualkv::cuda {

// Throws std::runtime_error with CUDA's description of the error.
void Check(cudaError_t error, const char* what);

// The current device's multiprocessors. Throws core::Unsupported unless its compute capability is 9.0.
int RequireHopper();

void LaunchOnce(const void* kernel, int blocks, int threads, size_t shared_bytes, cudaStream_t stream,
                void** arguments);

// One block for each multiprocessor of the current device.
template <class Params>
void LaunchPersistent(void (*kernel)(Params), int threads, size_t shared_bytes, cudaStream_t stream,
                      const Params& params) {
  void* arguments[] = {const_cast<Params*>(&params)};
  LaunchOnce(reinterpret_cast<const void*>(kernel), RequireHopper(), threads, shared_bytes, stream,
             arguments);
}

}  // namespace dualkv::cuda
