// Checked calls of the CUDA runtime, and the one way in which kernels are launched.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace dualkv::cuda {

// Throws with CUDA's description of the error: core::Unsupported if there is no GPU or too old a driver, else
// std::runtime_error.
void Check(cudaError_t error, const char* what);

// Throws core::Unsupported unless the current device has compute capability 9.0.
void RequireHopper();

// Of the current device.
int NumMultiprocessors();

void Launch(const void* kernel, int blocks, int threads, size_t shared_bytes, cudaStream_t stream,
            void** arguments);

template <class Params>
void Launch(void (*kernel)(Params), int blocks, int threads, size_t shared_bytes, cudaStream_t stream,
            const Params& params) {
  void* arguments[] = {const_cast<Params*>(&params)};
  Launch(reinterpret_cast<const void*>(kernel), blocks, threads, shared_bytes, stream, arguments);
}

}  // namespace dualkv::cuda
