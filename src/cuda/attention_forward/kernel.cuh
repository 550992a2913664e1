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

template <class Element, int kHeadDim, bool kGeneralScores>
__global__ void __launch_bounds__(kThreads<kHeadDim>, 1) Kernel(const __grid_constant__ Params params) {
  using Tiles = Config<kHeadDim>;
  using Memory = SharedMemory<Element, kHeadDim>;
  extern __shared__ std::byte unaligned[];
  Memory& memory = *reinterpret_cast<Memory*>((reinterpret_cast<uintptr_t>(unaligned) + 1023) / 1024 * 1024);

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
  __syncthreads();

  const uint32_t warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    ptx::DecreaseRegisters<Tiles::kProducerRegisters>();
    if (threadIdx.x == 0) {
      Producer<Element, kHeadDim>(params, memory).Run();
    } else if (threadIdx.x >= 32) {
      ClearRows<Element>(params, blockIdx.x * 3 + threadIdx.x / 32 - 1, gridDim.x * 3);
    }
  } else {
    ptx::IncreaseRegisters<Tiles::kConsumerRegisters>();
    Consumer<Element, kHeadDim, kGeneralScores>(params, memory, warpgroup - 1).Run();
  }
}

// Launches the kernel for these parameters.
template <class Element, int kHeadDim>
void Launch(const Params& params, cudaStream_t stream) {
  constexpr size_t kBytes = sizeof(SharedMemory<Element, kHeadDim>) + 1023;
  const bool general = params.softcap > 0 || params.scale <= 0;
  LaunchPersistent(general ? Kernel<Element, kHeadDim, true> : Kernel<Element, kHeadDim, false>,
                   kThreads<kHeadDim>, kBytes, stream, params);
}

}  // namespace dualkv::cuda::attention_forward
