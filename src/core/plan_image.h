// The image of a plan: what the kernels of a GPU read of it, in one piece and without addresses, so that it
// can be copied to device memory as it is. Host and device code.
//
//   PlanImageHeader | tiles | runs | cleared | positions     each part begins at a multiple of 16 bytes
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

// Offsets are in bytes from the header's first.
struct alignas(16) PlanImageHeader {
  uint64_t tiles;      // dualkv_tile [num_tiles], the forward schedule
  uint64_t runs;       // ImageRun
  uint64_t cleared;    // Interval [num_cleared]: rows of the forest that are no queries
  uint64_t positions;  // int32 [total_tokens] position of every row, with a window
  int32_t num_tiles;
  int32_t num_cleared;
  int32_t total_tokens;
  int32_t window_left;  // -1: none
};

size_t PlanImageBytes(const Plan& plan);
// image: PlanImageBytes(plan) bytes, aligned to 16.
void WritePlanImage(const Plan& plan, std::byte* image);

}  // namespace dualkv::core
