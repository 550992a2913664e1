#include <gtest/gtest.h>

#include <random>
#include <thread>

#include "brute_force.h"
#include "core/visibility.h"
#include "dualkv/dualkv.hpp"
#include "expect_error.h"
#include "random_forest.h"

namespace dualkv::testing {
namespace {

void CheckForest(const ForestSpec& spec) {
  SCOPED_TRACE(spec.ToString());
  const BruteForce truth(spec);
  const Forest forest = spec.Build();
  const auto segments = forest.segments();
  ASSERT_EQ(segments.size(), spec.lengths.size());
  ASSERT_EQ(forest.total_tokens(), truth.rows());

  const auto positions = forest.PositionIds();
  for (int64_t row = 0; row < truth.rows(); ++row) {
    ASSERT_EQ(positions[row], truth.position(row)) << "row " << row;
    const dualkv_segment& segment = segments[truth.segment(row)];
    ASSERT_TRUE(segment.begin <= row && row < segment.end) << "row " << row;
  }
  for (const int64_t window : {-1, 0, 1, 3, 1000}) {
    int64_t pairs = 0;
    for (int64_t row = 0; row < truth.rows(); ++row) {
      const auto position = static_cast<int32_t>(positions[row]);
      for (int64_t key = 0; key < truth.rows(); ++key) {
        const bool sees = truth.Sees(row, key, window);
        const dualkv_segment& segment = segments[truth.segment(key)];
        const core::Interval keys = core::VisibleKeys(static_cast<int32_t>(row), position, segment, window);
        ASSERT_EQ(
            core::IsVisible(static_cast<int32_t>(row), position, static_cast<int32_t>(key), segment, window),
            sees)
            << "row " << row << " key " << key << " window " << window;
        ASSERT_EQ(keys.begin <= key && key < keys.end, sees)
            << "row " << row << " key " << key << " window " << window;
        pairs += sees;
      }
    }
    ASSERT_EQ(forest.VisiblePairs(window < 0 ? std::nullopt : std::optional(window)), pairs)
        << "window " << window;
  }
}

TEST(Forest, EverySmallForestMatchesBruteForce) {
  for (int segments = 0; segments <= 4; ++segments) {
    ForEachForest(segments, {0, 1, 3}, CheckForest);
  }
}

TEST(Forest, RandomForestsMatchBruteForce) {
  for (uint64_t seed = 0; seed < 40; ++seed) {
    std::mt19937_64 rng(seed);
    SCOPED_TRACE("seed " + std::to_string(seed));
    CheckForest(RandomForest(rng, 12, 20));
  }
}

TEST(Forest, GroupsAreRootsWithLeaves) {
  const Forest forest = Forest::FromGroups({{3, {2, 0, 1}}, {1, {}}, {0, {4}}});
  const auto s = forest.segments();
  ASSERT_EQ(s.size(), 7u);
  EXPECT_EQ(forest.total_tokens(), 11);
  EXPECT_EQ(s[0].tree_end, 6);
  EXPECT_EQ(s[3].parent, 0);
  EXPECT_EQ(s[3].position, 3);
  EXPECT_EQ(s[4].parent, -1);
  EXPECT_EQ(s[4].begin, 6);
  EXPECT_EQ(s[6].parent, 5);
  EXPECT_EQ(s[6].position, 0);
}

TEST(Forest, LargeLengthsDoNotOverflow) {
  const std::vector<int64_t> lengths = {int64_t{1} << 29, (int64_t{1} << 29) - 7}, parents = {-1, 0};
  const Forest forest = Forest::FromSegments(lengths, parents);
  const int64_t n = (int64_t{1} << 30) - 7;
  EXPECT_EQ(forest.VisiblePairs(), n * (n + 1) / 2);
  EXPECT_EQ(forest.VisiblePairs(INT64_MAX), n * (n + 1) / 2);
  EXPECT_EQ(forest.segments()[1].position, 1 << 29);
}

TEST(Forest, RefusesWhatIsNoForest) {
  dualkv_forest* forest = nullptr;
  const int64_t lengths[] = {3, 2, -1}, parents[] = {-1, 0, 0};
  ExpectInvalid(dualkv_forest_create(3, lengths, parents, &forest), {"lengths[2]", "-1"});
  const int64_t ones[] = {1, 1, 1, 1}, forward[] = {-1, 2, 0, 0}, self[] = {0}, low[] = {-2},
                ended[] = {-1, 0, 0, 1};
  ExpectInvalid(dualkv_forest_create(4, ones, forward, &forest), {"parents[1]", "earlier segment", "2"});
  ExpectInvalid(dualkv_forest_create(1, ones, self, &forest), {"parents[0]", "0"});
  ExpectInvalid(dualkv_forest_create(1, ones, low, &forest), {"parents[0]", "-2"});
  ExpectInvalid(dualkv_forest_create(4, ones, ended, &forest), {"preorder", "parents[3] is 1"});
  const int64_t huge[] = {1, int64_t{1} << 30}, chain[] = {-1, 0};
  ExpectInvalid(dualkv_forest_create(2, huge, chain, &forest), {"lengths", "1073741824", "segment 1"});
  const int64_t overflow[] = {INT64_MAX, INT64_MAX};
  ExpectInvalid(dualkv_forest_create(2, overflow, chain, &forest), {"lengths", "9223372036854775807"});
  ExpectInvalid(dualkv_forest_create(-1, ones, chain, &forest), {"num_segments", "-1"});
  ExpectInvalid(dualkv_forest_create(1, nullptr, chain, &forest), {"lengths", "NULL"});
  ExpectInvalid(dualkv_forest_create(1, ones, nullptr, &forest), {"parents", "NULL"});
  ExpectInvalid(dualkv_forest_create(1, ones, parents, nullptr), {"forest", "NULL"});
  EXPECT_EQ(forest, nullptr);
}

TEST(Forest, RefusesWhatAreNoGroups) {
  dualkv_forest* forest = nullptr;
  const int64_t prompts[] = {3, 4}, counts[] = {1, 1}, responses[] = {5, -6}, negative[] = {1, -2};
  ExpectInvalid(dualkv_forest_create_from_groups(2, prompts, counts, responses, &forest),
                {"response_lengths[1][0]", "-6"});
  ExpectInvalid(dualkv_forest_create_from_groups(2, prompts, negative, responses, &forest),
                {"response_counts[1]", "-2"});
  ExpectInvalid(dualkv_forest_create_from_groups(2, negative, counts, prompts, &forest),
                {"prompt_lengths[1]", "-2"});
  ExpectInvalid(dualkv_forest_create_from_groups(-3, prompts, counts, responses, &forest),
                {"num_groups", "-3"});
  ExpectInvalid(dualkv_forest_create_from_groups((int64_t{1} << 30) + 1, prompts, counts, responses, &forest),
                {"num_groups", "1073741825"});
  ExpectInvalid(dualkv_forest_create_from_groups(2, prompts, counts, nullptr, &forest),
                {"response_lengths", "NULL"});
  EXPECT_EQ(forest, nullptr);
}

TEST(Forest, RefusesBadViews) {
  const Forest forest = Forest::FromGroups({{1, {1}}});
  auto view = Params<dualkv_forest_view>();
  view.size -= 8;
  ExpectInvalid(dualkv_forest_get_view(forest.get(), &view), {"view.size", "must be", "got"});
  view = Params<dualkv_forest_view>();
  view.version = 9;
  ExpectInvalid(dualkv_forest_get_view(forest.get(), &view), {"view.version", "1", "9"});
  ExpectInvalid(dualkv_forest_get_view(nullptr, &view), {"forest", "NULL"});
  int64_t pairs = 0;
  ExpectInvalid(dualkv_forest_visible_pairs(forest.get(), -2, &pairs), {"window_left", "-2"});
  ExpectInvalid(dualkv_forest_position_ids(forest.get(), nullptr), {"position_ids", "NULL"});
}

TEST(Forest, ErrorsBelongToTheirThread) {
  dualkv_forest* forest = nullptr;
  ExpectInvalid(dualkv_forest_create(-1, nullptr, nullptr, &forest), {"num_segments"});
  std::thread([] { EXPECT_STREQ(dualkv_last_error(), ""); }).join();
  EXPECT_STREQ(dualkv_version(), DUALKV_VERSION);
  EXPECT_EQ(dualkv_abi_version(), DUALKV_ABI_VERSION);
}

}  // namespace
}  // namespace dualkv::testing
