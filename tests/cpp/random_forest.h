// Forests for tests: every small one, and random ones.
#pragma once

#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "dualkv/dualkv.hpp"

namespace dualkv::testing {

// Segments in preorder, as the library takes them.
struct ForestSpec {
  std::vector<int64_t> lengths;
  std::vector<int64_t> parents;

  Forest Build() const { return Forest::FromSegments(lengths, parents); }

  std::string ToString() const {
    std::string text = "segments (length, parent):";
    for (size_t s = 0; s < lengths.size(); ++s) {
      text += " (" + std::to_string(lengths[s]) + ", " + std::to_string(parents[s]) + ")";
    }
    return text;
  }
};

// Calls visit(spec) for each forest of exactly `segments` segments of the given lengths.
inline void ForEachForest(int segments, const std::vector<int64_t>& lengths,
                          const std::function<void(const ForestSpec&)>& visit) {
  ForestSpec spec;
  std::function<void()> extend = [&] {
    if (static_cast<int>(spec.lengths.size()) == segments) {
      visit(spec);
      return;
    }
    // The parent of the next segment: none, the last segment, or one of its ancestors.
    std::vector<int64_t> parents = {-1};
    if (!spec.parents.empty()) {
      for (int64_t s = static_cast<int64_t>(spec.parents.size()) - 1; s >= 0; s = spec.parents[s]) {
        parents.push_back(s);
      }
    }
    for (const int64_t parent : parents) {
      for (const int64_t length : lengths) {
        spec.lengths.push_back(length);
        spec.parents.push_back(parent);
        extend();
        spec.lengths.pop_back();
        spec.parents.pop_back();
      }
    }
  };
  extend();
}

// One of the values.
template <class... Values>
double Pick(std::mt19937_64& rng, Values... values) {
  const double list[] = {static_cast<double>(values)...};
  return list[rng() % sizeof...(values)];
}

// Up to max_segments segments of up to max_length rows; shapes from plain batches over groups to deep trees.
inline ForestSpec RandomForest(std::mt19937_64& rng, int max_segments, int64_t max_length) {
  auto uniform = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(rng);
  };
  ForestSpec spec;
  const int64_t segments = uniform(1, max_segments);
  const int64_t root_odds = uniform(0, 4), deeper_odds = uniform(0, 4);
  for (int64_t s = 0; s < segments; ++s) {
    int64_t parent = s - 1;
    if (s == 0 || uniform(0, 9) < root_odds) {
      parent = -1;
    } else {
      while (parent >= 0 && spec.parents[parent] >= 0 && uniform(0, 4) >= deeper_odds) {
        parent = spec.parents[parent];
      }
    }
    spec.parents.push_back(parent);
    spec.lengths.push_back(uniform(0, 5) == 0 ? uniform(0, 1) : uniform(0, max_length));
  }
  return spec;
}

}  // namespace dualkv::testing
