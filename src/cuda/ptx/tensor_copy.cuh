// Copies of tensor tiles from device to shared memory by the tensor memory accelerator (TMA).
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/ptx/barrier.cuh"

namespace dualkv::cuda::ptx {

// Copies the box at coordinates (x, y, ..) of a tensor; its bytes arrive on `barrier`. What lies outside the
// tensor arrives as zeros. One thread calls.
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

// Copies 4 bytes from device to shared memory, or writes 0 if not `valid`; `source` is not read then.
__device__ __forceinline__ void CopyWord(void* shared, const void* source, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(SharedAddress(shared)), "l"(source),
               "r"(valid ? 4 : 0)
               : "memory");
}

// Arrives on `barrier` when this thread's copies of words have arrived. It counts as one of its arrivals.
__device__ __forceinline__ void ArriveAfterCopies(Mbarrier* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(SharedAddress(barrier))
               : "memory");
}

// Makes this thread's ordinary stores to shared memory visible to the tensor cores and the TMA. A barrier
// must follow.
__device__ __forceinline__ void FenceProxyAsync() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace dualkv::cuda::ptx
