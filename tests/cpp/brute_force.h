// The meaning of a forest, spelt out pair by pair from parents and path positions, without the library's
// rule.
#pragma once

#include <cstdint>
#include <vector>

#include "random_forest.h"

namespace dualkv::testing {

class BruteForce {
 public:
  explicit BruteForce(const ForestSpec& spec) : parents_(spec.parents) {
    for (size_t s = 0; s < spec.lengths.size(); ++s) {
      int64_t before = 0;
      for (int64_t a = spec.parents[s]; a >= 0; a = spec.parents[a]) {
        before += spec.lengths[a];
      }
      for (int64_t i = 0; i < spec.lengths[s]; ++i) {
        segment_.push_back(static_cast<int64_t>(s));
        position_.push_back(before + i);
      }
    }
  }

  int64_t rows() const { return static_cast<int64_t>(segment_.size()); }
  int64_t segment(int64_t row) const { return segment_[row]; }
  int64_t position(int64_t row) const { return position_[row]; }

  // The key lies on the row's path, not after it and within the window (< 0: none).
  bool Sees(int64_t row, int64_t key, int64_t window_left) const {
    bool on_path = false;
    for (int64_t s = segment_[row]; s >= 0; s = parents_[s]) {
      on_path = on_path || s == segment_[key];
    }
    const int64_t distance = position_[row] - position_[key];
    return on_path && distance >= 0 && (window_left < 0 || distance <= window_left);
  }

 private:
  std::vector<int64_t> parents_;
  std::vector<int64_t> segment_;   // of each row
  std::vector<int64_t> position_;  // of each row
};

}  // namespace dualkv::testing
