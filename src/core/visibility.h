// The visibility rule, in its one place: which rows see which keys. Host and device code.
//
// Row i sees key j iff j <= i and i lies in the subtree of j's segment, and, under a sliding window, j's
// position is at most window_left before i's. For one row and one segment the visible keys are one interval,
// since inside a segment position is linear in the row; for one key and one segment the rows that see it are
// one interval too.
#pragma once

#include <cstdint>

#include "dualkv/dualkv.h"

#if defined(__CUDACC__)
#define DUALKV_HOST_DEVICE __host__ __device__ inline
#else
#define DUALKV_HOST_DEVICE inline
#endif

namespace dualkv::core {

// Rows [begin, end); empty if end <= begin.
struct Interval {
  int32_t begin;
  int32_t end;
};

// Does row `row` at position `position` see key `key` of `segment`? window_left < 0: no window.
DUALKV_HOST_DEVICE bool IsVisible(int32_t row, int32_t position, int32_t key, const dualkv_segment& segment,
                                  int64_t window_left) {
  const int32_t key_position = segment.position + (key - segment.begin);
  return key <= row && row < segment.tree_end &&
         (window_left < 0 || static_cast<int64_t>(position) - key_position <= window_left);
}

// The keys of `segment` that row `row` at position `position` sees.
DUALKV_HOST_DEVICE Interval VisibleKeys(int32_t row, int32_t position, const dualkv_segment& segment,
                                        int64_t window_left) {
  // Selections rather than branches: kernels evaluate this for each row of a masked tile.
  const bool inside = segment.begin <= row && row < segment.tree_end;
  int32_t end = row < segment.end ? row + 1 : segment.end;
  end = inside ? end : segment.begin;
  int64_t begin = segment.begin;
  if (window_left >= 0) {
    const int64_t window = window_left < INT32_MAX ? window_left : INT32_MAX;  // as good, safe to subtract
    const int64_t oldest = segment.begin + (static_cast<int64_t>(position) - window - segment.position);
    begin = oldest > begin ? oldest : begin;
  }
  return {static_cast<int32_t>(begin < end ? begin : end), end};
}

}  // namespace dualkv::core
