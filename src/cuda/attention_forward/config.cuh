// Tiles, roles, shared memory and parameters of the forward kernel.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "core/plan_image.h"
#include "cuda/ptx/barrier.cuh"
#include "cuda/softcap.cuh"

namespace dualkv::cuda::attention_forward {

// A query tile is 64 rows of the products for each consumer warpgroup; a row of a product is a query row and
// a head: heads that share keys are packed side by side.
//
// A warp's softmax takes as long as its products, and one exponential at a time keeps the warp from issuing
// anything else. So it takes three or four consumers to keep the tensor cores busy, and their registers bound
// the key tile. Registers are for each thread; docs/hopper_forward.md has the budget.
template <int kHeadDim>
struct Config;

template <>
struct Config<128> {
  static constexpr int kKeyTile = 64;
  static constexpr int kConsumers = 3;
  static constexpr int kProducerRegisters = 32;
  static constexpr int kConsumerRegisters = 160;  // 64 sums, 32 scores, 16 of packed weights
};

template <>
struct Config<64> {
  static constexpr int kKeyTile = 64;
  static constexpr int kConsumers = 4;
  static constexpr int kProducerRegisters = 32;
  static constexpr int kConsumerRegisters = 112;  // 32 sums, 32 scores, 16 of packed weights
};

template <int kHeadDim>
inline constexpr int kQueryTile = 64 * Config<kHeadDim>::kConsumers;
template <int kHeadDim>
inline constexpr int kThreads = 128 * (1 + Config<kHeadDim>::kConsumers);

// Warpgroups exchange registers among those that the block was started with, or wait for ever.
template <int kHeadDim>
inline constexpr bool kRegistersSuffice = 128 * (Config<kHeadDim>::kProducerRegisters +
                                                 Config<kHeadDim>::kConsumers *
                                                     Config<kHeadDim>::kConsumerRegisters) <=
                                          65536 / kThreads<kHeadDim> / 8 * 8 * kThreads<kHeadDim>;

inline constexpr int kStages = 2;        // of keys and of values, each
inline constexpr int kQueryBuffers = 2;  // the next tile's queries are copied while this one's are in use

// What the consumers work on. The producer reads the plan and writes these beside the tiles.
struct QueryTile {
  int32_t row_begin;  // rows [row_begin, row_end)
  int32_t row_end;
  int32_t head_begin;  // its first head
};

// Which query row and head of its tile a row of the products is.
struct ProductRow {
  static constexpr int16_t kNone = INT16_MAX;
  int16_t row;  // kNone: the packed heads do not fill the tile
  int16_t head;
};

// A key tile for a query tile.
struct StepHead {
  enum Flag : int32_t {
    kFirst = 1,    // of its query tile
    kMasked = 2,   // some row does not see some key
    kPastEnd = 4,  // the key tile reaches past the forest
    kEnd = 8,      // this is no step: there are no more
  };
  int32_t flags;
  int32_t key_begin;
};
struct Step {
  StepHead head;
  dualkv_segment segment;  // of the keys
};

template <class Element, int kHeadDim>
struct SharedMemory {
  static constexpr int kBoxes = kHeadDim / 64;  // a row of a box is the 128 bytes that the swizzle works on
  static constexpr int kKeyTile = Config<kHeadDim>::kKeyTile;

  alignas(1024) Element queries[kQueryBuffers][kBoxes][kQueryTile<kHeadDim>][64];
  alignas(1024) Element keys[kStages][kBoxes][kKeyTile][64];
  alignas(1024) Element values[kStages][kBoxes][kKeyTile][64];
  ProductRow product_rows[kQueryTile<kHeadDim>];
  QueryTile query_tiles[kQueryBuffers];  // comes with the queries
  Step steps[kStages];                   // comes with the keys
  ptx::Mbarrier queries_full[kQueryBuffers], queries_empty[kQueryBuffers];
  ptx::Mbarrier keys_full[kStages], keys_empty[kStages];
  ptx::Mbarrier values_full[kStages], values_empty[kStages];
};

struct Params {
  CUtensorMap queries;  // [rows, H / packed, packed, D]
  CUtensorMap keys;     // [rows, Hk, D]
  CUtensorMap values;   // [rows, Hk, D]
  const core::PlanImageHeader* plan;
  dualkv_tensor out;   // [query_rows, H, D]
  float* lse;          // [H, query_rows], or null
  const float* sinks;  // [H], or null
  int32_t query_rows;
  int32_t query_row_begin;  // row of the forest that is row 0 of queries, out and lse
  int32_t num_heads;        // H
  int32_t head_dim;         // D, up to the kernel's: further columns are zero
  int32_t packed;           // heads in a query tile; divides H / Hk
  int32_t packs_per_kv_head;
  int32_t rows_per_tile;  // query rows; rows_per_tile * packed <= the query tile
  int32_t packs_abreast;  // of the H / packed, which it divides
  Softcap softcap;
};

}  // namespace dualkv::cuda::attention_forward
