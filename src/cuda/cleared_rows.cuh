// The rows that are no queries.
#pragma once

#include "core/plan_image.h"

namespace dualkv::cuda {

// Calls clear(begin, end) for rows of keys-only segments and past the forest. They are counted from
// query_row_begin on, and are some of [0, query_rows); end <= begin if they are none.
template <class Clear>
__device__ __forceinline__ void ForClearedRows(const core::PlanImageHeader* plan, int32_t query_row_begin,
                                               int32_t query_rows, Clear clear) {
  const auto* cleared = core::PartOfImage<core::Interval>(plan, plan->cleared);
  auto clip = [&](int32_t begin, int32_t end) { clear(max(begin, 0), min(end, query_rows)); };
#pragma unroll 1
  for (int32_t i = 0; i < plan->num_cleared; ++i) {
    clip(cleared[i].begin - query_row_begin, cleared[i].end - query_row_begin);
  }
  clip(plan->total_tokens - query_row_begin, query_rows);
}

}  // namespace dualkv::cuda
