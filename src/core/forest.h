// The forest of segments: the one description of a packed batch that everything else reads.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "dualkv/dualkv.h"

namespace dualkv::core {

// Row and segment indices are int32; the limit leaves room to round them up to tiles.
inline constexpr int64_t kMaxRows = int64_t{1} << 30;

// Segments in preorder; see dualkv_segment for the fields. Immutable.
class Forest {
 public:
  // Throws InvalidArgument if the lengths and parents are not a forest in preorder of at most kMaxRows rows.
  static Forest FromSegments(std::span<const int64_t> lengths, std::span<const int64_t> parents);

  // A root for each group with its responses as leaves. response_lengths holds all groups' responses.
  static Forest FromGroups(std::span<const int64_t> prompt_lengths, std::span<const int64_t> response_counts,
                           std::span<const int64_t> response_lengths);

  std::span<const dualkv_segment> segments() const { return segments_; }
  int64_t total_tokens() const { return segments_.empty() ? 0 : segments_.back().end; }

  // Writes the position of every row: position_ids [total_tokens].
  template <class Int>
  void WritePositions(Int* position_ids) const {
    for (const dualkv_segment& segment : segments_) {
      for (int32_t row = segment.begin; row < segment.end; ++row) {
        position_ids[row] = segment.position + (row - segment.begin);
      }
    }
  }

  // Number of pairs (row, key) that see each other under a window of window_left earlier positions (< 0:
  // none).
  int64_t VisiblePairs(int64_t window_left) const;

 private:
  std::vector<dualkv_segment> segments_;
};

}  // namespace dualkv::core
