// The backward kernel: a persistent grid, one block for each multiprocessor, of a producer, a
// reducer and consumers.
#pragma once

#include "cuda/attention_backward/config.cuh"
#include "cuda/attention_backward/consumer.cuh"
#include "cuda/attention_backward/finish.cuh"
#include "cuda/attention_backward/launch.h"
#include "cuda/attention_backward/prepare.cuh"
#include "cuda/attention_backward/producer.cuh"
#include "cuda/attention_backward/reducer.cuh"
#include "cuda/launch.h"
#include "cuda/ptx/tensor_copy.cuh"
#include "cuda/ptx/warpgroup.cuh"

namespace dualkv::cuda::attention_backward {

template <class Element, int kHeadDim, bool kSoftcap>
__global__ void __launch_bounds__(kThreads, 1) Kernel(const __grid_constant__ Params params) {
  using Memory = SharedMemory<Element, kHeadDim>;
  extern __shared__ __align__(1024) std::byte shared[];
  Memory& memory = *reinterpret_cast<Memory*>(shared);

  if (threadIdx.x == 0) {
    constexpr uint32_t kConsumerWarps = 4 * kConsumers;
    auto init = [](auto& barriers, uint32_t arrivals) {
      for (auto& barrier : barriers) {
        ptx::MbarrierInit(&barrier, arrivals);
      }
    };
    init(memory.items_full, 1);
    init(memory.items_empty, kConsumerWarps + kReducerWarps + 2 + 32);  // and the threads of ForItems
    ptx::MbarrierInit(&memory.next_item_due, 1);
    init(memory.keys_full, 1);
    init(memory.keys_empty, kConsumerWarps + kReducerWarps);
    init(memory.steps_full, 1);
    init(memory.queries_full, 1 + 1 + 32);  // each lane of the warp that copies rows, for words on their way
    init(memory.queries_empty, kConsumerWarps);
    init(memory.dscores_full, kConsumerWarps);
    init(memory.dscores_empty, kReducerWarps);
    memory.zero = 0;
    ptx::FenceMbarrierInit();
  }
  // Rows that no copy reaches, if the packed heads do not fill the tile, stay 0.
  for (int32_t row = threadIdx.x; row < Memory::kRows; row += kThreads) {
    if (row >= params.rows_per_tile * params.packed) {
      for (int i = 0; i < Memory::kStages * Memory::kBoxes * 8; ++i) {
        const int stage = i / 8 / Memory::kBoxes, box = i / 8 % Memory::kBoxes;
        reinterpret_cast<int4*>(memory.queries[stage][box][row])[i % 8] = int4{};
        reinterpret_cast<int4*>(memory.douts[stage][box][row])[i % 8] = int4{};
      }
    }
  }
  ptx::FenceProxyAsync();
  __syncthreads();

  const uint32_t warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    ptx::DecreaseRegisters<kProducerRegisters>();
    Producer<Element, kHeadDim>(params, memory).Run();
  } else if (warpgroup == 1) {
    ptx::DecreaseRegisters<kReducerRegisters>();
    Reducer<Element, kHeadDim>(params, memory).Run();
  } else {
    ptx::IncreaseRegisters<kConsumerRegisters>();
    Consumer<Element, kHeadDim, kSoftcap>(params, memory, warpgroup - 2).Run();
  }
}

// The whole backward: the three passes, and the sinks' gradient if there are sinks.
template <class Element, int kHeadDim>
void LaunchFor(const PrepareParams& prepare, const Params& params, const FinishParams& finish,
               const SinkParams& sinks, cudaStream_t stream) {
  constexpr int kSmallBlock = 256, kBlocksPerMultiprocessor = 8;
  const int blocks = kBlocksPerMultiprocessor * NumMultiprocessors();
  Launch(Prepare<Element, kHeadDim>, blocks, kSmallBlock, 0, stream, prepare);
  using Memory = SharedMemory<Element, kHeadDim>;
  constexpr size_t kBytes = offsetof(Memory, end);
  static_assert(kBytes <= 227 * 1024);
  Launch(params.softcap.exponent_cap > 0 ? Kernel<Element, kHeadDim, true> : Kernel<Element, kHeadDim, false>,
         NumMultiprocessors(), kThreads, kBytes, stream, params);
  Launch(Finish<Element, kHeadDim>, blocks, kSmallBlock, 0, stream, finish);
  if (sinks.sinks != nullptr) {
    Launch(DifferentiateSinks, params.num_heads, 1024, 0, stream, sinks);
  }
}

}  // namespace dualkv::cuda::attention_backward
