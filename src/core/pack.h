// Packing: token ids become a batch in which each prompt stands once, with its positions and targets.
#pragma once

#include <cstdint>
#include <vector>

#include "core/forest.h"
#include "dualkv/dualkv.h"

namespace dualkv::core {

// G groups with N responses in all, T rows, M targets; see dualkv_batch_view. Segment order: each group's
// prompt, then its responses.
struct Batch {
  Forest forest;                          // a root for each group, a leaf for each response
  std::vector<int64_t> input_ids;         // [T]
  std::vector<int64_t> position_ids;      // [T]
  std::vector<int64_t> target_rows;       // [M]
  std::vector<int64_t> target_ids;        // [M]
  std::vector<int64_t> response_counts;   // [G]
  std::vector<int64_t> target_begin;      // [N + 1]
  std::vector<int64_t> source_rows;       // [N], of a padded batch only
  std::vector<int64_t> source_positions;  // [M], of a padded batch only
};

// Both throw InvalidArgument before they copy anything if an argument is not as dualkv.h says.
Batch Pack(const dualkv_pack_params& params);
Batch PackPadded(const dualkv_pack_padded_params& params);

}  // namespace dualkv::core
