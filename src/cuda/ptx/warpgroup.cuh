// Registers of a warpgroup, and small arithmetic instructions.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace dualkv::cuda::ptx {

// Changes the registers that each thread of the warpgroup owns; a multiple of 8. All its warps call.
template <int kRegisters>
__device__ __forceinline__ void IncreaseRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void DecreaseRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// The thread's lane, asked for again at each call: what is computed from it is not kept in registers in
// between.
__device__ __forceinline__ int32_t FreshLane() {
  int32_t lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// 2^x; relative error 2^-22, 0 for -infinity.
__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float Reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two values rounded to a 2-byte type, `low` in the lower half.
template <class Element>
__device__ __forceinline__ uint32_t Pack(float low, float high) {
  uint32_t packed;
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

}  // namespace dualkv::cuda::ptx
