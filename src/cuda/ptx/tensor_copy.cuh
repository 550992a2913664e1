// Copies of tensor tiles from device to shared memory by the tensor memory accelerator (TMA).
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/ptx/barrier.cuh"

namespace dualkv::cuda::ptx {

// Copies the box at coordinates (x, y, z) of a 3-dimensional tensor; its bytes arrive on `barrier`. What lies
// outside the tensor arrives as zeros. One thread calls.
__device__ __forceinline__ void TensorCopy3d(void* shared, const CUtensorMap* map, Mbarrier* barrier,
                                             int32_t x, int32_t y, int32_t z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(SharedAddress(shared)),
      "l"(map), "r"(SharedAddress(barrier)), "r"(x), "r"(y), "r"(z)
      : "memory");
}

__device__ __forceinline__ void TensorCopy4d(void* shared, const CUtensorMap* map, Mbarrier* barrier,
                                             int32_t x, int32_t y, int32_t z, int32_t w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
      "%6}], "
      "[%2];" ::"r"(SharedAddress(shared)),
      "l"(map), "r"(SharedAddress(barrier)), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

// Makes this thread's ordinary stores to shared memory visible to the tensor cores and the TMA. A barrier
// must follow.
__device__ __forceinline__ void FenceProxyAsync() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace dualkv::cuda::ptx
