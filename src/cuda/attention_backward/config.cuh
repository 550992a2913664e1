// Tiles, roles, shared memory and parameters of the backward kernel.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "core/plan_image.h"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ring.cuh"
#include "cuda/softcap.cuh"

namespace dualkv::cuda::attention_backward {

// A block owns a tile of keys of a KV head, 64 keys for each consumer warpgroup, which keeps their dK and dV
// in registers. It walks the query rows that see the tile, for all query heads of the group: a step is a
// query tile, whose rows of the products are pairs of a query row and a head.
//
//   scores^T = K Q^T, dweights^T = V dO^T     [keys, rows]
//   weights = exp(scores - lse), dscores = weights * (dweights - delta)
//   dV += weights^T dO, dK += dscores^T Q     from registers
//   dQ += dscores K                           by the reducer warpgroup, through shared memory
//
// Registers are for each thread; docs/hopper_backward.md has the budget.
inline constexpr int kKeyTile = 128;
inline constexpr int kConsumers = 2;
inline constexpr int kThreads = 128 * (2 + kConsumers);  // the producer comes first, then the reducer
inline constexpr int kProducerRegisters = 24;
inline constexpr int kReducerRegisters = 72;    // 32 sums
inline constexpr int kConsumerRegisters = 208;  // 128 sums, 32 scores, 16 packed; or 64, 64 and 32
static_assert(128 * (kProducerRegisters + kReducerRegisters + kConsumers * kConsumerRegisters) <=
              65536 / kThreads / 8 * 8 * kThreads);

template <int kHeadDim>
inline constexpr int kQueryTile = kHeadDim <= 64 ? 128 : 64;  // rows of the products

// Buffers of queries and output gradients: as many as there is room for.
template <int kHeadDim>
inline constexpr int kStages = kHeadDim <= 64 ? 3 : 4;
inline constexpr int kScoreBuffers = 2;  // of dscores
inline constexpr int kReducerWarps = 4;
inline constexpr int kItems = 2;  // a block takes its next one while it works

// A key tile, or a part of one, of a KV head.
struct Item {
  core::ImageKeyTile tile;
  int32_t kv_head;  // -1: there are no more
  int32_t steps;
  int32_t ascending;  // 1: rows are visited from the first to the last, 0: from the last to the first
};

// A step of an item, as noted down beside the buffers of its queries.
struct alignas(16) Step {
  enum Flag : int32_t {
    kMasked = 1,   // some row does not see some key
    kPartial = 2,  // it has fewer rows than the query tile
  };
  int32_t row;   // query row, of the forest
  int32_t pack;  // of heads
  int32_t rows;  // of the products
  int32_t flags;
};

// What is added to dQ, or stored, and where; noted down with the step, and kept for longer.
struct alignas(16) Visit {
  int64_t first_row;  // of dq, lse and delta
  int32_t rows;
  int32_t turn;
};
static_assert(sizeof(Visit) == 16);

// Keys [begin, end), counted from the tile's first.
struct KeyInterval {
  uint8_t begin;
  uint8_t end;
};
static_assert(kKeyTile <= UINT8_MAX);

template <class Element, int kHeadDim>
struct SharedMemory {
  static constexpr int kBoxes = kHeadDim / 64;  // a row of a box is the 128 bytes that the swizzle works on
  static constexpr int kRows = kQueryTile<kHeadDim>;
  static constexpr int kStages = attention_backward::kStages<kHeadDim>;
  static constexpr int kVisits = 8;  // noted down with the steps, which the reducer is behind

  static_assert(kVisits >= kStages + kScoreBuffers);

  alignas(1024) Element keys[kBoxes][kKeyTile][64];
  alignas(1024) Element values[kBoxes][kKeyTile][64];
  alignas(1024) Element queries[kStages][kBoxes][kRows][64];
  alignas(1024) Element douts[kStages][kBoxes][kRows][64];
  alignas(1024) Element dscores[kScoreBuffers][kRows / 64][kKeyTile][64];  // [keys, rows]
  // Of each row of the products, beside the queries: lse_log2, delta, and the keys of the tile that the row
  // sees if the step is masked.
  alignas(16) float lse_log2[kStages][kRows];
  alignas(16) float delta[kStages][kRows];
  alignas(16) KeyInterval visible[kStages][kRows];
  Step steps[kStages];
  Visit visits[kVisits];
  Item items[kItems];
  int32_t zero;  // always; see Reducer::Add
  ptx::Mbarrier items_full[kItems], items_empty[kItems], next_item_due;
  ptx::Mbarrier keys_full[1], keys_empty[1];
  ptx::Mbarrier steps_full[kStages], queries_full[kStages], queries_empty[kStages];
  ptx::Mbarrier dscores_full[kScoreBuffers], dscores_empty[kScoreBuffers];
  std::byte end;  // what is allocated: its size is rounded up by the alignment
};

struct Params {
  CUtensorMap queries;  // [rows, H / packed, packed, D]
  CUtensorMap douts;    // [rows, H / packed, packed, D]
  CUtensorMap keys;     // [rows, Hk, D]
  CUtensorMap values;   // [rows, Hk, D]
  const core::PlanImageHeader* plan;
  const float* lse_log2;  // [H / packed, row_pitch], in the units of base-2 exponents
  const float* delta;     // [H / packed, row_pitch]
  float* dq;              // see AccumulatedRow
  int64_t row_pitch;      // rows of dq, lse and delta for each H / packed: query_rows * packed, rounded up
  float* partials;        // [num_partials, Hk, 2 (dK, dV), kKeyTile, kernel's D]
  int32_t* next_item;
  int32_t* turns;           // [H / packed, row_pitch]: visits that the tile with this first row
                            // has had, counted by each warp of the reducer; or null
  dualkv_tensor dk;         // [key_rows, Hk, D]
  dualkv_tensor dv;         // [key_rows, Hk, D]
  int32_t query_row_begin;  // row of the forest that is the first of queries, lse, delta and dq
  int32_t num_heads;        // H
  int32_t num_kv_heads;     // Hk
  int32_t head_dim;         // D, up to the kernel's: further columns are zero
  int32_t packed;           // heads in a query tile; divides H / Hk
  int32_t packs_per_kv_head;
  int32_t rows_per_tile;     // query rows; rows_per_tile * packed <= the query tile
  int32_t kv_heads_abreast;  // of Hk, which it divides
  float scale;
  Softcap softcap;
};

// dQ accumulates in blocks of 8 rows and 16 columns: [H / packed, rows / 8, D / 16, 8, 16], where a row is a
// pair of a query row and a packed head, and D is the kernel's. So what a warp adds at a time lies in one
// piece, or in two. In a block, a row has its columns in quads that neighbour each other in the accumulators
// of a product: quad q has the columns 2 q, 2 q + 1, 2 q + 8 and 2 q + 9.
//
// Where the row `row` after `first` begins; its next block of columns is kBlockFloats further on.
inline constexpr int kBlockFloats = 8 * 16;
__host__ __device__ __forceinline__ int64_t AccumulatedRow(int64_t first, uint32_t row, int32_t head_dim) {
  row += static_cast<uint32_t>(first) % 8;
  return first / 8 * (8 * head_dim) + row / 8 * 8 * head_dim + row % 8 * 16;
}

}  // namespace dualkv::cuda::attention_backward
