// Accesses to device memory that blocks share.
#pragma once

#include <cstdint>

namespace dualkv::cuda::ptx {

// Stores four neighbouring floats, aligned to 16 bytes.
__device__ __forceinline__ void StoreRelaxed(float* target, float4 x) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(target), "f"(x.x), "f"(x.y),
               "f"(x.z), "f"(x.w)
               : "memory");
}

// Adds to four neighbouring floats, aligned to 16 bytes; to each by itself, in no order.
__device__ __forceinline__ void ReduceAdd(float* target, float4 x) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(target), "f"(x.x), "f"(x.y),
               "f"(x.z), "f"(x.w)
               : "memory");
}

// The same address, but the compiler does not know in which memory it is. A warp calls.
__device__ __forceinline__ const int32_t* UnknownAddress(const int32_t* address) {
  return reinterpret_cast<const int32_t*>(__shfl_sync(0xffffffff, reinterpret_cast<uint64_t>(address), 0));
}

// Loads behind the accesses to memory before it, global ones too, if the address is an unknown one: they
// could be to the same place. For pace only, as they are not ordered for anyone else.
__device__ __forceinline__ int32_t LoadInOrder(const int32_t* source) {
  int32_t value;
  asm volatile("ld.volatile.s32 %0, [%1];" : "=r"(value) : "l"(source) : "memory");
  return value;
}

__device__ __forceinline__ int32_t LoadRelaxed(const int32_t* source) {
  int32_t value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(source) : "memory");
  return value;
}

__device__ __forceinline__ int32_t LoadAcquire(const int32_t* source) {
  int32_t value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(source) : "memory");
  return value;
}

// Between this thread's accesses before and after, as other blocks see them.
__device__ __forceinline__ void FenceGpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Adds 1 if `valid`.
__device__ __forceinline__ void CountOne(bool valid, int32_t* target) {
  asm volatile(
      "{\n"
      ".reg .pred valid;\n"
      "setp.ne.b32 valid, %0, 0;\n"
      "@valid red.relaxed.gpu.global.add.s32 [%1], 1;\n"
      "}\n" ::"r"(static_cast<int32_t>(valid)),
      "l"(target)
      : "memory");
}

}  // namespace dualkv::cuda::ptx
