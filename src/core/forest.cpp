#include "core/forest.h"

#include <algorithm>

#include "core/error.h"

namespace dualkv::core {

Forest Forest::FromSegments(std::span<const int64_t> lengths, std::span<const int64_t> parents) {
  Require(lengths.size() == parents.size(), "lengths and parents must have as many entries, got ",
          lengths.size(), " and ", parents.size());
  Require(lengths.size() <= static_cast<size_t>(kMaxRows), "at most ", kMaxRows,
          " segments are supported, got ", lengths.size());

  Forest forest;
  forest.segments_.reserve(lengths.size());
  std::vector<int32_t> open;  // the path from the root to the last segment
  int64_t row = 0;

  // Ends the subtrees of all open segments below `depth`.
  auto close_to = [&](size_t depth) {
    for (; open.size() > depth; open.pop_back()) {
      forest.segments_[open.back()].tree_end = static_cast<int32_t>(row);
    }
  };

  for (size_t s = 0; s < lengths.size(); ++s) {
    Require(lengths[s] >= 0, "lengths[", s, "] must be >= 0, got ", lengths[s]);
    Require(lengths[s] <= kMaxRows - row, "lengths must add up to at most ", kMaxRows, " rows, got ", row,
            " + ", lengths[s], " at segment ", s);
    const int64_t parent = parents[s];
    Require(parent >= -1 && parent < static_cast<int64_t>(s), "parents[", s,
            "] must be -1 or an earlier segment, got ", parent);
    size_t depth = open.size();
    while (depth > 0 && open[depth - 1] != parent) {
      --depth;
    }
    Require(parent == -1 || depth > 0, "segments must be in preorder: parents[", s, "] is ", parent,
            ", whose subtree has already ended");
    close_to(depth);

    int32_t position = 0;
    if (parent >= 0) {
      const dualkv_segment& prefix = forest.segments_[parent];
      position = prefix.position + (prefix.end - prefix.begin);
    }
    forest.segments_.push_back({.begin = static_cast<int32_t>(row),
                                .end = static_cast<int32_t>(row + lengths[s]),
                                .tree_end = 0,
                                .position = position,
                                .parent = static_cast<int32_t>(parent)});
    row += lengths[s];
    open.push_back(static_cast<int32_t>(s));
  }
  close_to(0);
  return forest;
}

Forest Forest::FromGroups(std::span<const int64_t> prompt_lengths, std::span<const int64_t> response_counts,
                          std::span<const int64_t> response_lengths) {
  Require(prompt_lengths.size() == response_counts.size(),
          "prompt_lengths and response_counts must have as many entries, got ", prompt_lengths.size(),
          " and ", response_counts.size());
  std::vector<int64_t> lengths, parents;
  lengths.reserve(prompt_lengths.size() + response_lengths.size());
  parents.reserve(lengths.capacity());
  size_t next = 0;
  for (size_t g = 0; g < prompt_lengths.size(); ++g) {
    Require(prompt_lengths[g] >= 0, "prompt_lengths[", g, "] must be >= 0, got ", prompt_lengths[g]);
    Require(response_counts[g] >= 0, "response_counts[", g, "] must be >= 0, got ", response_counts[g]);
    Require(static_cast<uint64_t>(response_counts[g]) <= response_lengths.size() - next,
            "response_counts must add up to the ", response_lengths.size(),
            " response_lengths, got more at group ", g);
    const auto root = static_cast<int64_t>(lengths.size());
    lengths.push_back(prompt_lengths[g]);
    parents.push_back(-1);
    for (int64_t n = 0; n < response_counts[g]; ++n, ++next) {
      Require(response_lengths[next] >= 0, "response_lengths[", g, "][", n, "] must be >= 0, got ",
              response_lengths[next]);
      lengths.push_back(response_lengths[next]);
      parents.push_back(root);
    }
  }
  Require(next == response_lengths.size(), "response_counts must add up to the ", response_lengths.size(),
          " response_lengths, got ", next);
  return FromSegments(lengths, parents);
}

int64_t Forest::VisiblePairs(int64_t window_left) const {
  // The row at position p sees min(p, window) earlier positions and itself: a sum over the positions of each
  // segment.
  window_left = std::min(window_left, kMaxRows);         // as good as none, and safe to add to
  auto pairs_before = [window_left](int64_t position) {  // of the positions 0 to position - 1
    if (window_left < 0 || position <= window_left + 1) {
      return position * (position + 1) / 2;
    }
    return (window_left + 1) * (window_left + 2) / 2 + (position - window_left - 1) * (window_left + 1);
  };
  int64_t pairs = 0;
  for (const dualkv_segment& segment : segments_) {
    const int64_t first = segment.position;
    pairs += pairs_before(first + (segment.end - segment.begin)) - pairs_before(first);
  }
  return pairs;
}

}  // namespace dualkv::core
