// Warpgroup matrix products (wgmma): D [64, N] += A [64, 16] B [16, N], 2-byte operands, fp32 accumulators.
//
// A warpgroup's 128 threads call together; the products run on while they go on. Lane l of warp w holds of D
// the rows 16 w + l / 4 and 8 below, in d[4 j + {0, 1}] and d[4 j + {2, 3}] the columns 8 j + 2 (l % 4) + {0,
// 1}. Packed to pairs, the columns 16 k to 16 k + 15 of such a fragment are the A operand of a product, in
// that order.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/ptx/barrier.cuh"

namespace dualkv::cuda::ptx {

// Orders this warpgroup's accesses to registers before the products that follow.
__device__ __forceinline__ void WgmmaFence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Closes a group of products.
__device__ __forceinline__ void WgmmaCommit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kPending groups are unfinished.
template <int kPending>
__device__ __forceinline__ void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving uses of accumulators across this point: after a wait, before the first use.
template <int kCount>
__device__ __forceinline__ void Pin(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    asm volatile("" : "+f"(values[i])::"memory");
  }
}

// Operands in shared memory lie in atoms of 8 rows of 128 bytes, with the TMA's swizzle of 128 bytes; atoms
// are aligned to 1024 bytes. An operand is K-major if its rows hold consecutive k, MN-major if they hold
// consecutive m or n.
//
// `stride` is the distance in bytes from 8 rows to the next 8, `leading` (MN-major only) from 64 columns to
// the next 64.
__device__ __forceinline__ uint64_t SharedOperand(const void* shared, uint32_t stride,
                                                  uint32_t leading = 16) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  return kSwizzle128 | uint64_t{stride >> 4} << 32 | uint64_t{leading >> 4} << 16 |
         ((SharedAddress(shared) & 0x3FFFF) >> 4);
}

// The operand `bytes` further on.
__device__ __forceinline__ uint64_t Advance(uint64_t operand, uint32_t bytes) {
  return operand + (bytes >> 4);
}

// Shared: A and B from shared memory, both K-major.
// SharedTransposed: A and B from shared memory, both MN-major.
// Registers: A from registers, B from shared memory, MN-major.
// d: N / 2 accumulators; accumulate: add to them, or overwrite them.
template <class Element, int kN>
struct Wgmma;

// Accumulators as operands of an instruction, and their places in its text.
#define DUALKV_OUT_8(i)                                                                       \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define DUALKV_OUT_32(i) DUALKV_OUT_8(i), DUALKV_OUT_8(i + 8), DUALKV_OUT_8(i + 16), DUALKV_OUT_8(i + 24)
#define DUALKV_PLACES_0_TO_31                                              \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define DUALKV_PLACES_32_TO_63                                                       \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

#define DUALKV_WGMMA_SHARED_64(TYPE, TRANSPOSED)                                             \
  asm volatile(                                                                              \
      "{\n"                                                                                  \
      ".reg .pred p;\n"                                                                      \
      "setp.ne.b32 p, %34, 0;\n"                                                             \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" DUALKV_PLACES_0_TO_31 \
      "}, %32, %33, p, 1, 1, " TRANSPOSED ", " TRANSPOSED                                    \
      ";\n"                                                                                  \
      "}\n"                                                                                  \
      : DUALKV_OUT_32(0)                                                                     \
      : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)))
#define DUALKV_WGMMA_REGISTERS_64(TYPE)                                                      \
  asm volatile(                                                                              \
      "{\n"                                                                                  \
      ".reg .pred p;\n"                                                                      \
      "setp.ne.b32 p, %37, 0;\n"                                                             \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" DUALKV_PLACES_0_TO_31 \
      "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1;\n"                                          \
      "}\n"                                                                                  \
      : DUALKV_OUT_32(0)                                                                     \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int32_t>(accumulate)))
template <class Element>
struct Wgmma<Element, 64> {
  static __device__ __forceinline__ void Shared(float* d, uint64_t a, uint64_t b, bool accumulate) {
    if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
      DUALKV_WGMMA_SHARED_64("bf16", "0");
    } else {
      DUALKV_WGMMA_SHARED_64("f16", "0");
    }
  }
  static __device__ __forceinline__ void SharedTransposed(float* d, uint64_t a, uint64_t b, bool accumulate) {
    if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
      DUALKV_WGMMA_SHARED_64("bf16", "1");
    } else {
      DUALKV_WGMMA_SHARED_64("f16", "1");
    }
  }
  static __device__ __forceinline__ void Registers(float* d, const uint32_t* a, uint64_t b, bool accumulate) {
    if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
      DUALKV_WGMMA_REGISTERS_64("bf16");
    } else {
      DUALKV_WGMMA_REGISTERS_64("f16");
    }
  }
};
#undef DUALKV_WGMMA_SHARED_64
#undef DUALKV_WGMMA_REGISTERS_64

#define DUALKV_WGMMA_SHARED_128(TYPE)                                                         \
  asm volatile(                                                                               \
      "{\n"                                                                                   \
      ".reg .pred p;\n"                                                                       \
      "setp.ne.b32 p, %66, 0;\n"                                                              \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" DUALKV_PLACES_0_TO_31 \
      ", " DUALKV_PLACES_32_TO_63                                                             \
      "}, %64, %65, p, 1, 1, 0, 0;\n"                                                         \
      "}\n"                                                                                   \
      : DUALKV_OUT_32(0), DUALKV_OUT_32(32)                                                   \
      : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)))
#define DUALKV_WGMMA_REGISTERS_128(TYPE)                                                      \
  asm volatile(                                                                               \
      "{\n"                                                                                   \
      ".reg .pred p;\n"                                                                       \
      "setp.ne.b32 p, %69, 0;\n"                                                              \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" DUALKV_PLACES_0_TO_31 \
      ", " DUALKV_PLACES_32_TO_63                                                             \
      "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n"                                           \
      "}\n"                                                                                   \
      : DUALKV_OUT_32(0), DUALKV_OUT_32(32)                                                   \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int32_t>(accumulate)))
template <class Element>
struct Wgmma<Element, 128> {
  static __device__ __forceinline__ void Shared(float* d, uint64_t a, uint64_t b, bool accumulate) {
    if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
      DUALKV_WGMMA_SHARED_128("bf16");
    } else {
      DUALKV_WGMMA_SHARED_128("f16");
    }
  }
  static __device__ __forceinline__ void Registers(float* d, const uint32_t* a, uint64_t b, bool accumulate) {
    if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
      DUALKV_WGMMA_REGISTERS_128("bf16");
    } else {
      DUALKV_WGMMA_REGISTERS_128("f16");
    }
  }
};
#undef DUALKV_WGMMA_SHARED_128
#undef DUALKV_WGMMA_REGISTERS_128
#undef DUALKV_PLACES_32_TO_63
#undef DUALKV_PLACES_0_TO_31
#undef DUALKV_OUT_32
#undef DUALKV_OUT_8

}  // namespace dualkv::cuda::ptx
