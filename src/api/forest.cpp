#include "core/forest.h"

#include "api/guard.h"
#include "api/objects.h"

using dualkv::api::Guard;
using dualkv::api::RequirePointer;
using dualkv::api::RequireStruct;
using dualkv::core::Forest;
using dualkv::core::Require;

namespace {

// A span of `count` values; NULL is accepted for none.
std::span<const int64_t> Span(const int64_t* values, int64_t count, const char* name) {
  if (count > 0) {
    RequirePointer(values, name);
  }
  return {values, static_cast<size_t>(count)};
}

}  // namespace

dualkv_status dualkv_forest_create(int64_t num_segments, const int64_t* lengths, const int64_t* parents,
                                   dualkv_forest** forest) {
  return Guard([&] {
    RequirePointer(forest, "forest");
    Require(num_segments >= 0, "num_segments must be >= 0, got ", num_segments);
    *forest = new dualkv_forest{
        Forest::FromSegments(Span(lengths, num_segments, "lengths"), Span(parents, num_segments, "parents"))};
  });
}

dualkv_status dualkv_forest_create_from_groups(int64_t num_groups, const int64_t* prompt_lengths,
                                               const int64_t* response_counts,
                                               const int64_t* response_lengths, dualkv_forest** forest) {
  return Guard([&] {
    RequirePointer(forest, "forest");
    Require(num_groups >= 0 && num_groups <= dualkv::core::kMaxRows, "num_groups must be 0 to ",
            dualkv::core::kMaxRows, ", got ", num_groups);
    const auto counts = Span(response_counts, num_groups, "response_counts");
    int64_t num_responses = 0;
    for (size_t g = 0; g < counts.size(); ++g) {
      Require(counts[g] >= 0 && counts[g] <= dualkv::core::kMaxRows - num_responses, "response_counts[", g,
              "] must be >= 0 and add up to at most ", dualkv::core::kMaxRows, ", got ", counts[g]);
      num_responses += counts[g];
    }
    *forest =
        new dualkv_forest{Forest::FromGroups(Span(prompt_lengths, num_groups, "prompt_lengths"), counts,
                                             Span(response_lengths, num_responses, "response_lengths"))};
  });
}

void dualkv_forest_destroy(dualkv_forest* forest) { delete forest; }

dualkv_status dualkv_forest_get_view(const dualkv_forest* forest, dualkv_forest_view* view) {
  return Guard([&] {
    RequirePointer(forest, "forest");
    RequireStruct(view, "view");
    view->num_segments = static_cast<int64_t>(forest->forest.segments().size());
    view->total_tokens = forest->forest.total_tokens();
    view->segments = forest->forest.segments().data();
  });
}

dualkv_status dualkv_forest_position_ids(const dualkv_forest* forest, int64_t* position_ids) {
  return Guard([&] {
    RequirePointer(forest, "forest");
    if (forest->forest.total_tokens() > 0) {
      RequirePointer(position_ids, "position_ids");
    }
    forest->forest.WritePositions(position_ids);
  });
}

dualkv_status dualkv_forest_visible_pairs(const dualkv_forest* forest, int64_t window_left, int64_t* pairs) {
  return Guard([&] {
    RequirePointer(forest, "forest");
    RequirePointer(pairs, "pairs");
    Require(window_left >= DUALKV_NO_WINDOW, "window_left must be >= 0 or DUALKV_NO_WINDOW, got ",
            window_left);
    *pairs = forest->forest.VisiblePairs(window_left);
  });
}
