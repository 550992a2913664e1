// The passes after the backward kernel: one over the rows, and one for the sinks.
#pragma once

#include "cuda/attention_backward/config.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/tensor.cuh"

namespace dualkv::cuda::attention_backward {

struct FinishParams {
  const core::PlanImageHeader* plan;
  const float* accumulated;  // dq, see AccumulatedRow
  const float* partials;     // [num_partials, Hk, 2, kKeyTile, kernel's D]
  dualkv_tensor dq;          // [query_rows, H, D]
  dualkv_tensor dk;          // [key_rows, Hk, D]
  dualkv_tensor dv;          // [key_rows, Hk, D]
  int32_t query_rows;
  int32_t key_rows;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int64_t row_pitch;
  int32_t packed;
  float scale;
};

template <class Element>
__device__ __forceinline__ uint4 Pack8(const float (&x)[8]) {
  return {ptx::Pack<Element>(x[0], x[1]), ptx::Pack<Element>(x[2], x[3]), ptx::Pack<Element>(x[4], x[5]),
          ptx::Pack<Element>(x[6], x[7])};
}

// dq in the output type, dk and dv of the key tiles that were cut into parts, and zeros for keys past the
// forest.
template <class Element, int kHeadDim>
__global__ void __launch_bounds__(256) Finish(const FinishParams params) {
  const core::PlanImageHeader& plan = *params.plan;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;

  // A warp takes 8 rows and 64 columns of what has accumulated, four blocks, and a lane a quad of each. Lanes
  // that are neighbours swap halves of their quads: then each has four columns that are neighbours. The last
  // rows of a pack may be nobody's, and hold anything.
  const int64_t pitch = params.row_pitch / 8;
  const int32_t boxes = (params.head_dim + 63) / 64;
  const int64_t count = params.num_heads / params.packed * pitch * boxes;
  const int32_t lane = threadIdx.x % 32, quad = lane % 4;
  for (int64_t i = thread / 32; i < count; i += threads / 32) {
    const auto box = static_cast<int32_t>(i % boxes);
    const int64_t group = i / boxes;
    const auto pack = static_cast<int32_t>(group / pitch);
    const int64_t packed_row = group % pitch * 8 + lane / 4;
    const int64_t row = packed_row / params.packed;
    const int32_t head = pack * params.packed + static_cast<int32_t>(packed_row % params.packed);
    const float4* source = reinterpret_cast<const float4*>(params.accumulated) +
                           (group * (kHeadDim / 16) + 4 * box) * (kBlockFloats / 4) + lane;
    float4 quads[4];
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      quads[block] = source[block * (kBlockFloats / 4)];
    }
    Element* dq = RowOf<Element>(params.dq, row, head);
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      const float4 x = quads[block];
      const uint32_t low = ptx::Pack<Element>(x.x * params.scale, x.y * params.scale);
      const uint32_t high = ptx::Pack<Element>(x.z * params.scale, x.w * params.scale);
      const uint32_t other = __shfl_xor_sync(0xffffffff, quad % 2 ? low : high, 1);
      const int32_t column = 64 * box + 16 * block + quad % 2 * 8 + quad / 2 * 4;
      if (row < params.query_rows && column < params.head_dim) {
        *reinterpret_cast<uint2*>(dq + column) = quad % 2 ? uint2{other, high} : uint2{low, other};
      }
    }
  }

  // Eight columns of dk or dv at a time, of `tiles` tiles of up to kKeyTile rows.
  const int32_t columns = params.head_dim / 8;
  auto for_key_rows = [&](int32_t tiles, auto rows_of, auto add) {
    const int64_t per_tile = static_cast<int64_t>(kKeyTile) * params.num_kv_heads * 2 * columns;
    for (int64_t i = thread; i < tiles * per_tile; i += threads) {
      const auto tile = static_cast<int32_t>(i / per_tile);
      auto rest = static_cast<int32_t>(i % per_tile);
      const int32_t column = rest % columns, which = rest / columns % 2;
      const int32_t head = rest / columns / 2 % params.num_kv_heads;
      const int32_t offset = rest / columns / 2 / params.num_kv_heads;
      const core::Interval rows = rows_of(tile);
      const int64_t row = rows.begin + offset;
      if (row >= rows.end) {
        continue;
      }
      Element* target = RowOf<Element>(which == 0 ? params.dk : params.dv, row, head);
      float sums[8] = {};
      add(tile, ((static_cast<int64_t>(head) * 2 + which) * kKeyTile + offset) * kHeadDim + 8 * column, sums);
      reinterpret_cast<uint4*>(target)[column] = Pack8<Element>(sums);
    }
  };
  const auto* split = core::PartOfImage<core::ImageSplitTile>(&plan, plan.split_tiles);
  for_key_rows(
      plan.num_split_tiles,
      [&](int32_t tile) {
        return core::Interval{split[tile].begin, split[tile].end};
      },
      [&](int32_t tile, int64_t offset, float(&sums)[8]) {
        const int64_t stride = static_cast<int64_t>(params.num_kv_heads) * 2 * kKeyTile * kHeadDim;
        for (int32_t p = split[tile].partial_begin; p < split[tile].partial_end; ++p) {
          const auto* part = reinterpret_cast<const float4*>(params.partials + p * stride + offset);
          const float4 low = part[0], high = part[1];
          const float values[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            sums[j] += values[j];
          }
        }
      });
  // Rows past the forest.
  const int32_t padding = params.key_rows - plan.total_tokens;
  for_key_rows((padding + kKeyTile - 1) / kKeyTile,
               [&](int32_t tile) {
                 const int32_t begin = plan.total_tokens + tile * kKeyTile;
                 return core::Interval{begin, min(begin + kKeyTile, params.key_rows)};
               },
               [](int32_t, int64_t, float(&)[8]) {});
}

struct SinkParams {
  const float* sinks;  // [H]
  const float* lse;    // [H, query_rows]
  const float* delta;  // [H / packed, row_pitch]
  float* dsinks;       // [H]
  int64_t row_pitch;
  int32_t query_rows;
  int32_t packed;
};

// A block for each head. A sink's weight has no value to be multiplied with: its gradient is -weight * delta.
static __global__ void __launch_bounds__(1024) DifferentiateSinks(const SinkParams params) {
  __shared__ float sums[32];
  const float* lses = params.lse + static_cast<int64_t>(blockIdx.x) * params.query_rows;
  const float* deltas =
      params.delta + blockIdx.x / params.packed * params.row_pitch + blockIdx.x % params.packed;
  const float sink = params.sinks[blockIdx.x];
  float sum = 0;
  for (int32_t row = threadIdx.x; row < params.query_rows; row += blockDim.x) {
    const float lse = lses[row];
    if (lse != -INFINITY) {  // a row that is no query
      sum -= expf(sink - lse) * deltas[static_cast<int64_t>(row) * params.packed];
    }
  }
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) {
    sum += __shfl_xor_sync(0xffffffff, sum, bit);
  }
  if (threadIdx.x % 32 == 0) {
    sums[threadIdx.x / 32] = sum;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    float total = 0;
    for (int i = 0; i < 32; ++i) {
      total += sums[i];
    }
    params.dsinks[blockIdx.x] = total;
  }
}

}  // namespace dualkv::cuda::attention_backward
