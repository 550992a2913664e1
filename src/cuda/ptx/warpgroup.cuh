// Registers of a warpgroup, and small arithmetic instructions.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
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

// The smaller one; NaN if one is.
__device__ __forceinline__ float MinOrNan(float x, float y) {
  float z;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
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

template <class Element>
__device__ __forceinline__ float2 Unpack(uint32_t packed) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u)};
  } else {
    __half2 halves;
    memcpy(&halves, &packed, sizeof(packed));
    return __half22float2(halves);
  }
}

// Stores four 8 x 8 matrices of 2-byte elements to shared memory: lane l has the address of row l % 8 of
// matrix l / 8, and of row l / 4 of matrix m, in packed[m], the elements 2 (l % 4) and the next.
__device__ __forceinline__ void StoreMatrices(uint32_t shared, const uint32_t* packed) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared),
               "r"(packed[0]), "r"(packed[1]), "r"(packed[2]), "r"(packed[3])
               : "memory");
}

}  // namespace dualkv::cuda::ptx
