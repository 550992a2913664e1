// Tiles, roles, shared memory and parameters of the forward kernel.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "core/plan_image.h"
#include "cuda/ptx/barrier.cuh"

namespace dualkv::cuda::attention_forward {

// A query tile is 64 rows of the products for each consumer warpgroup; a row of a product is a query row and
// a head: the heads that share keys are packed side by side. Registers are for each thread.
template <int kHeadDim>
struct Config;

// Of 232 registers: 64 sums, 64 scores, 32 packed probabilities.
template <>
struct Config<128> {
  static constexpr int kKeyTile = 128;
  static constexpr int kConsumers = 2;
  static constexpr int kProducerRegisters = 56;
  static constexpr int kConsumerRegisters = 224;
};

// The exponentials take as long as the products here: a third warpgroup keeps both units busy. Of 160
// registers: 32 sums, 64 scores, 32 packed probabilities.
template <>
struct Config<64> {
  static constexpr int kKeyTile = 128;
  static constexpr int kConsumers = 3;
  static constexpr int kProducerRegisters = 32;
  static constexpr int kConsumerRegisters = 160;
};

template <int kHeadDim>
inline constexpr int kQueryTile = 64 * Config<kHeadDim>::kConsumers;
template <int kHeadDim>
inline constexpr int kThreads = 128 * (1 + Config<kHeadDim>::kConsumers);

inline constexpr int kStages = 2;        // of keys and of values, each
inline constexpr int kQueryBuffers = 2;  // the next tile's queries are copied while this one's are in use

// One step of the consumers: a key tile for a query tile. The producer reads the plan and writes steps.
struct alignas(16) Step {
  enum Flag : int32_t {
    kFirst = 1,     // of its query tile; the fields of the tile are valid
    kLast = 2,      // of its query tile
    kMasked = 4,    // some row does not see some key
    kNarrow = 8,    // no row sees a key of the tile's second half
    kPastEnd = 16,  // the tile reaches past the forest
    kEnd = 32,      // there are no more steps; this is none
  };
  int32_t flags;
  int32_t key_begin;
  dualkv_segment segment;  // of the keys
  int32_t row_begin;       // query tile: rows [row_begin, row_end)
  int32_t row_end;
  int32_t head_begin;  // query tile: its first head
};

template <class Element, int kHeadDim>
struct SharedMemory {
  static constexpr int kBoxes = kHeadDim / 64;  // a row of a box is the 128 bytes that the swizzle works on
  static constexpr int kKeyTile = Config<kHeadDim>::kKeyTile;

  alignas(1024) Element queries[kQueryBuffers][kBoxes][kQueryTile<kHeadDim>][64];
  alignas(1024) Element keys[kStages][kBoxes][kKeyTile][64];
  alignas(1024) Element values[kStages][kBoxes][kKeyTile][64];
  Step steps[kStages];  // comes with the keys
  ptx::Mbarrier queries_full[kQueryBuffers], queries_empty[kQueryBuffers];
  ptx::Mbarrier keys_full[kStages], keys_empty[kStages];
  ptx::Mbarrier values_full[kStages], values_empty[kStages];
};

struct Params {
  CUtensorMap queries;  // [rows, H / packed, packed, D]
  CUtensorMap keys;     // [rows, Hk, D]
  CUtensorMap values;   // [rows, Hk, D]
  const core::PlanImageHeader* plan;
  void* out;  // [query_rows, H, D]
  int64_t out_row_stride;
  int64_t out_head_stride;
  float* lse;          // [H, query_rows], or null
  const float* sinks;  // [H], or null
  int32_t query_rows;
  int32_t query_row_begin;  // row of the forest that is row 0 of queries, out and lse
  int32_t num_heads;        // H
  int32_t head_dim;         // D, up to the kernel's: further columns are zero
  int32_t packed;           // heads in a query tile; divides H / Hk
  int32_t packs_per_kv_head;
  int32_t rows_per_tile;  // query rows; rows_per_tile * packed <= the query tile
  float scale;            // of the scores
  float softcap;          // 0: none
};

// Where a buffer of a ring is used for the n-th time, and the parity of its barriers' phase.
template <int kSize>
struct RingPosition {
  uint32_t index = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void Next() {
    if (++index == kSize) {
      index = 0;
      parity ^= 1;
    }
  }
};

}  // namespace dualkv::cuda::attention_forward
