// Barriers: mbarriers in shared memory, on which copies and threads arrive, and named barriers of warps.
#pragma once

#include <cstdint>

namespace dualkv::cuda::ptx {

// Address of shared memory as instructions take it.
__device__ __forceinline__ uint32_t SharedAddress(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

using Mbarrier = uint64_t;

// One thread initialises; then FenceMbarrierInit and a block barrier before anyone uses it.
__device__ __forceinline__ void MbarrierInit(Mbarrier* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)), "r"(arrivals));
}

__device__ __forceinline__ void FenceMbarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void MbarrierArrive(Mbarrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(SharedAddress(barrier)) : "memory");
}

// Arrives, and makes the phase wait for `bytes` that copies will bring.
__device__ __forceinline__ void MbarrierArriveExpect(Mbarrier* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)),
               "r"(bytes)
               : "memory");
}

// Waits until the phase of this parity has completed. A fresh barrier's phase of parity 1 counts as
// completed. The thread may sleep until then, for up to 10 ms at a time.
__device__ __forceinline__ void MbarrierWait(Mbarrier* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "wait:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, 10000000;\n"
      "@done bra finished;\n"
      "bra wait;\n"
      "finished:\n"
      "}\n" ::"r"(SharedAddress(barrier)),
      "r"(parity)
      : "memory");
}

// Named barrier `id` (1 to 15) of `threads` threads.
__device__ __forceinline__ void NamedBarrierSync(uint32_t id, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace dualkv::cuda::ptx
