// The forward kernel: a persistent grid, one block for each multiprocessor, of a producer warpgroup and
// consumers.
#pragma once

#include "cuda/attention_forward/config.cuh"
#include "cuda/attention_forward/consumer.cuh"
#include "cuda/attention_forward/producer.cuh"
#include "cuda/launch.h"
#include "cuda/ptx/tensor_copy.cuh"
#include "cuda/ptx/warpgroup.cuh"

namespace dualkv::cuda::attention_forward {

template <class Element, int kHeadDim, bool kSoftcap>
__global__ void __launch_bounds__(kThreads<kHeadDim>, 1) Kernel(const __grid_constant__ Params params) {
  using Tiles = Config<kHeadDim>;
  static_assert(kRegistersSuffice<kHeadDim>);
  using Memory = SharedMemory<Element, kHeadDim>;
  extern __shared__ __align__(1024) std::byte shared[];
  Memory& memory = *reinterpret_cast<Memory*>(shared);

  if (threadIdx.x == 0) {
    constexpr uint32_t kConsumerWarps = 4 * Tiles::kConsumers;
    auto init = [](auto& full, auto& empty) {
      for (auto& barrier : full) {
        ptx::MbarrierInit(&barrier, 1);
      }
      for (auto& barrier : empty) {
        ptx::MbarrierInit(&barrier, kConsumerWarps);
      }
    };
    init(memory.queries_full, memory.queries_empty);
    init(memory.keys_full, memory.keys_empty);
    init(memory.values_full, memory.values_empty);
    ptx::FenceMbarrierInit();
  }
  // Rows that no copy reaches, if the packed heads do not fill the tile, stay 0.
  const int32_t filled = params.rows_per_tile * params.packed;
  for (int32_t row = threadIdx.x; row < kQueryTile<kHeadDim>; row += kThreads<kHeadDim>) {
    const bool used = row < filled;
    memory.product_rows[row] = {
        used ? static_cast<int16_t>(row / params.packed) : ProductRow::kNone,
        used ? static_cast<int16_t>(row % params.packed) : int16_t{0},
    };
    for (int i = 0; !used && i < kQueryBuffers * Memory::kBoxes * 8; ++i) {
      reinterpret_cast<int4*>(memory.queries[i / 8 / Memory::kBoxes][i / 8 % Memory::kBoxes][row])[i % 8] =
          int4{};
    }
  }
  ptx::FenceProxyAsync();
  __syncthreads();

  const uint32_t warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    ptx::DecreaseRegisters<Tiles::kProducerRegisters>();
    const uint32_t warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    if (warp == 0) {
      if (threadIdx.x % 32 == 0) {
        ProduceKeys(params, memory);
      }
    } else if (warp == 1) {
      if (threadIdx.x % 32 == 0) {
        ProduceValues(params, memory);
      }
    } else {
      ClearRows<Element>(params, blockIdx.x * 2 + warp - 2, gridDim.x * 2);
    }
  } else {
    ptx::IncreaseRegisters<Tiles::kConsumerRegisters>();
    Consumer<Element, kHeadDim, kSoftcap>(params, memory, warpgroup - 1).Run();
  }
}

// Launches the kernel for these parameters.
template <class Element, int kHeadDim>
void LaunchFor(const Params& params, cudaStream_t stream) {
  constexpr size_t kBytes = sizeof(SharedMemory<Element, kHeadDim>);
  Launch(params.softcap.exponent_cap > 0 ? Kernel<Element, kHeadDim, true> : Kernel<Element, kHeadDim, false>,
         NumMultiprocessors(), kThreads<kHeadDim>, kBytes, stream, params);
}

}  // namespace dualkv::cuda::attention_forward
