#include "core/forest.h"

#include "api/guard.h"
#include "api/objects.h"
#include "core/arguments.h"

using dualkv::api::Guard;
using dualkv::api::RequirePointer;
using dualkv::api::RequireStruct;
using dualkv::core::AddUp;
using dualkv::core::Forest;
using dualkv::core::Require;
using dualkv::core::Values;

dualkv_status dualkv_forest_create(int64_t num_segments, const int64_t* lengths, const int64_t* parents,
                                   dualkv_forest** forest) {
  return Guard([&] {
    RequirePointer(forest, "forest");
    Require(num_segments >= 0, "num_segments must be >= 0, got ", num_segments);
    *forest = new dualkv_forest{Forest::FromSegments(Values(lengths, num_segments, "lengths"),
                                                     Values(parents, num_segments, "parents"))};
  });
}

dualkv_status dualkv_forest_create_from_groups(int64_t num_groups, const int64_t* prompt_lengths,
                                               const int64_t* response_counts,
                                               const int64_t* response_lengths, dualkv_forest** forest) {
  return Guard([&] {
    RequirePointer(forest, "forest");
    Require(num_groups >= 0 && num_groups <= dualkv::core::kMaxRows, "num_groups must be 0 to ",
            dualkv::core::kMaxRows, ", got ", num_groups);
    const auto counts = Values(response_counts, num_groups, "response_counts");
    int64_t num_responses = 0;
    AddUp(counts, "response_counts", "responses", num_responses);
    *forest =
        new dualkv_forest{Forest::FromGroups(Values(prompt_lengths, num_groups, "prompt_lengths"), counts,
                                             Values(response_lengths, num_responses, "response_lengths"))};
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
