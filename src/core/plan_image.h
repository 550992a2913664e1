// The image of a plan: what the kernels of a GPU read of it, in one piece and without addresses, so that it
// can be copied to device memory as it is. Host and device code.
//
//   PlanImageHeader | tiles | runs | key_tiles | query_runs | split_tiles | cleared | positions
//
// Each part begins at a multiple of 16 bytes. Tiles and runs are the forward's, the next three the
// backward's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/visibility.h"
#include "dualkv/dualkv.h"

namespace dualkv::core {

struct Plan;

// dualkv_run with the segment that its keys belong to.
struct alignas(16) ImageRun {
  int32_t begin;
  int32_t end;
  int32_t masked;
  dualkv_segment segment;
};
static_assert(sizeof(ImageRun) == 32);

// A tile of the backward schedule with the segment that its keys belong to.
struct alignas(16) ImageKeyTile {
  int32_t begin;
  int32_t end;
  int32_t run_begin;
  int32_t run_end;
  dualkv_segment segment;
  int32_t partial;               // as in dualkv_plan_view
  int32_t band_begin, band_end;  // tiles [band_begin, band_end) are the band
};
static_assert(sizeof(ImageKeyTile) == 48);

// A run of the backward schedule with its turn.
struct alignas(16) ImageQueryRun {
  int32_t begin;
  int32_t end;
  int32_t masked;
  int32_t turn;
};
static_assert(sizeof(ImageQueryRun) == 16);

// Rows [begin, end) of a key tile that was cut, and the indices [partial_begin, partial_end) of its parts.
struct alignas(16) ImageSplitTile {
  int32_t begin;
  int32_t end;
  int32_t partial_begin;
  int32_t partial_end;
};
static_assert(sizeof(ImageSplitTile) == 16);

// Offsets are in bytes from the header's first.
struct alignas(16) PlanImageHeader {
  uint64_t tiles;        // dualkv_tile [num_tiles], the forward schedule
  uint64_t runs;         // ImageRun
  uint64_t key_tiles;    // ImageKeyTile [num_key_tiles], the backward schedule
  uint64_t query_runs;   // ImageQueryRun
  uint64_t split_tiles;  // ImageSplitTile [num_split_tiles], in the order of their parts
  uint64_t cleared;      // Interval [num_cleared]: rows of the forest that are no queries
  uint64_t positions;    // int32 [total_tokens] position of every row, with a window
  int32_t num_tiles;
  int32_t num_key_tiles;
  int32_t num_split_tiles;
  int32_t num_cleared;
  int32_t total_tokens;
  int32_t window_left;  // -1: none
};
static_assert(sizeof(PlanImageHeader) == 80);

// The part of the image at an offset from its header.
template <class T>
DUALKV_HOST_DEVICE const T* PartOfImage(const PlanImageHeader* header, uint64_t offset) {
  return reinterpret_cast<const T*>(reinterpret_cast<const std::byte*>(header) + offset);
}

size_t PlanImageBytes(const Plan& plan);
// image: PlanImageBytes(plan) bytes, aligned to 16.
void WritePlanImage(const Plan& plan, std::byte* image);

}  // namespace dualkv::core
