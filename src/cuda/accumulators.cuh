// Rows of results, out of the products' accumulators.
#pragma once

#include <cstdint>

#include "cuda/ptx/warpgroup.cuh"

namespace dualkv::cuda {

// words[b] of lane q goes to words[q] of lane b, within each four lanes.
__device__ __forceinline__ void TransposeInQuad(int32_t lane, uint32_t (&words)[4]) {
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
    const bool upper = lane & bit;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      if (!(b & bit)) {
        const uint32_t received = __shfl_xor_sync(0xffffffff, upper ? words[b] : words[b | bit], bit);
        (upper ? words[b] : words[b | bit]) = received;
      }
    }
  }
}

// Writes row i (0 or 1) of this thread's rows of the accumulators, times `factor`, as `columns` elements, a
// multiple of 8, if `valid`. All lanes of the warp call.
template <class Element, int kCount>
__device__ __forceinline__ void StoreRow(Element* row, const float (&sums)[kCount], int i, float factor,
                                         int32_t columns, bool valid, int32_t lane) {
#pragma unroll
  for (int block = 0; block < kCount / 4; block += 4) {
    // Lane q of the quad has columns 2 q and 2 q + 1 of four blocks; it gets all 8 columns of block q.
    uint32_t words[4];
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const float* pair = sums + 4 * (block + b) + 2 * i;
      words[b] = ptx::Pack<Element>(pair[0] * factor, pair[1] * factor);
    }
    TransposeInQuad(lane, words);
    const int32_t column = block + lane % 4;
    if (valid && 8 * column < columns) {
      reinterpret_cast<uint4*>(row)[column] = {words[0], words[1], words[2], words[3]};
    }
  }
}

}  // namespace dualkv::cuda
