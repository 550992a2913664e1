// The pass over the rows before the backward kernel.
#pragma once

#include "cuda/attention_backward/config.cuh"
#include "cuda/cleared_rows.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/tensor.cuh"

namespace dualkv::cuda::attention_backward {

// The row of [H / packed, row_pitch] of a query row and a head.
__device__ __forceinline__ int64_t PackedRow(int64_t row, int32_t head, int32_t packed, int64_t row_pitch) {
  return head / packed * row_pitch + row * packed + head % packed;
}

struct PrepareParams {
  const core::PlanImageHeader* plan;
  dualkv_tensor out;   // [query_rows, H, D]
  dualkv_tensor dout;  // [query_rows, H, D]
  const float* lse;    // [H, query_rows]
  const float* dlse;   // [H, query_rows], or null
  float* lse_log2;     // [H / packed, row_pitch]: lse in the units of base-2 exponents
  float* delta;        // [H / packed, row_pitch]; rows are pairs of a query row and a packed head
  int64_t row_pitch;   // query_rows * packed, rounded up
  float* dq;           // [H * row_pitch / packed, kernel's D], see AccumulatedRow
  int32_t* counters;   // set to 0
  int64_t num_counters;
  int32_t query_rows;
  int32_t query_row_begin;  // row of the forest that is the first of out, dout, lse and dq
  int32_t num_heads;
  int32_t head_dim;
  int32_t packed;
  bool deterministic;  // the first visit to a row stores dq, the others add
};

// Of each row and head: lse as the kernel takes it, and delta = sum over d of out * dout, less dlse. Counters
// become 0, and so does dq that visits add to, or that none of them writes. A row and head take a lane for
// each 8 columns. As many bytes are set to 0 as are read, and both at the same time are faster.
template <class Element, int kHeadDim>
__global__ void __launch_bounds__(256) Prepare(const PrepareParams params) {
  constexpr int kLanes = kHeadDim / 8;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = thread; i < params.num_counters; i += threads) {
    params.counters[i] = 0;
  }
  const int32_t lane = threadIdx.x % kLanes;
  const int64_t count = static_cast<int64_t>(params.query_rows) * params.num_heads;
  const int64_t accumulated = params.row_pitch * (params.num_heads / params.packed);  // count, rounded up
  // All lanes of a warp go on as long as one does: they add up together.
  for (int64_t first = (thread & -32) / kLanes; first < accumulated; first += threads / kLanes) {
    const int64_t index = first + threadIdx.x % 32 / kLanes;
    const int64_t row = index / params.num_heads;
    const auto head = static_cast<int32_t>(index % params.num_heads);
    const bool valid = index < count && 8 * lane < params.head_dim;
    float sum = 0;
    if (valid) {
      auto load = [&](const dualkv_tensor& tensor) {
        return __ldg(reinterpret_cast<const uint4*>(RowOf<Element>(tensor, row, head)) + lane);
      };
      const uint4 out = load(params.out), dout = load(params.dout);
      const uint32_t a[4] = {out.x, out.y, out.z, out.w}, b[4] = {dout.x, dout.y, dout.z, dout.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 x = ptx::Unpack<Element>(a[i]), y = ptx::Unpack<Element>(b[i]);
        sum = fmaf(x.y, y.y, fmaf(x.x, y.x, sum));
      }
    }
    if (!params.deterministic) {
      auto* zeros = reinterpret_cast<float4*>(params.dq) + 2 * kLanes * first + threadIdx.x % 32;
      zeros[0] = zeros[32] = float4{0, 0, 0, 0};
    }
#pragma unroll
    for (int bit = 1; bit < kLanes; bit *= 2) {
      sum += __shfl_xor_sync(0xffffffff, sum, bit);
    }
    if (index < count && lane == 0) {
      const int64_t source = static_cast<int64_t>(head) * params.query_rows + row;
      const int64_t target = PackedRow(row, head, params.packed, params.row_pitch);
      params.lse_log2[target] = params.lse[source] * kLog2E;
      params.delta[target] = params.dlse == nullptr ? sum : sum - params.dlse[source];
    }
  }
  if (!params.deterministic) {
    return;
  }
  ForClearedRows(params.plan, params.query_row_begin, params.query_rows, [&](int64_t begin, int64_t end) {
    constexpr int kQuads = kHeadDim / 4;
    for (int64_t i = thread; i < (end - begin) * params.num_heads * kQuads; i += threads) {
      const auto quad = static_cast<int32_t>(i % kQuads);
      const auto head = static_cast<int32_t>(i / kQuads % params.num_heads);
      const int64_t row =
          PackedRow(begin + i / kQuads / params.num_heads, head, params.packed, params.row_pitch);
      float* zeros = params.dq + AccumulatedRow(row, 0, kHeadDim) + quad / 4 * kBlockFloats + quad % 4 * 4;
      *reinterpret_cast<float4*>(zeros) = float4{0, 0, 0, 0};
    }
  });
}

}  // namespace dualkv::cuda::attention_backward
