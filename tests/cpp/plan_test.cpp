#include "core/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <map>
#include <random>
#include <vector>

#include "brute_force.h"
#include "dualkv/dualkv.hpp"
#include "expect_error.h"
#include "random_forest.h"

namespace dualkv::testing {
namespace {

struct PlanSpec {
  int64_t window_left;
  int32_t query_tile;
  int32_t key_tile;
  std::vector<uint8_t> keys_only;  // a flag for each segment
  int32_t parts = 0;
};

class PlanChecker {
 public:
  PlanChecker(const ForestSpec& forest_spec, const PlanSpec& spec)
      : truth_(forest_spec), forest_(forest_spec.Build()), spec_(spec) {
    auto params = Params<dualkv_plan_params>();
    params.forest = forest_.get();
    params.window_left = spec.window_left;
    params.keys_only = spec.keys_only.data();
    params.forward_query_tile = params.backward_query_tile = spec.query_tile;
    params.forward_key_tile = params.backward_key_tile = spec.key_tile;
    params.backward_parts = spec.parts;
    plan_.emplace(params);
    view_ = plan_->View();
    const int64_t rows = truth_.rows();
    sees_.resize(rows * rows);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t key = 0; key < rows; ++key) {
        sees_[row * rows + key] = IsQuery(row) && truth_.Sees(row, key, spec_.window_left);
      }
    }
  }

  void CheckAll() {
    ASSERT_EQ(view_.total_tokens, truth_.rows());
    for (int64_t row = 0; row < truth_.rows() && spec_.window_left >= 0; ++row) {
      ASSERT_EQ(view_.positions[row], truth_.position(row));
    }
    ASSERT_NO_FATAL_FAILURE(CheckForward());
    ASSERT_NO_FATAL_FAILURE(CheckBackward());
    ASSERT_NO_FATAL_FAILURE(CheckParts());
    ASSERT_NO_FATAL_FAILURE(CheckTurns());
  }

 private:
  bool IsQuery(int64_t row) const { return !spec_.keys_only[truth_.segment(row)]; }

  int64_t Root(int64_t row) const {
    int64_t s = truth_.segment(row);
    while (view_.segments[s].parent >= 0) {
      s = view_.segments[s].parent;
    }
    return s;
  }

  // Counts the visible and hidden pairs of a block and marks them covered. Each must be covered once only.
  void Cover(int32_t row_begin, int32_t row_end, int32_t key_begin, int32_t key_end, bool masked) {
    int64_t visible = 0, hidden = 0;
    for (int64_t row = row_begin; row < row_end; ++row) {
      for (int64_t key = key_begin; key < key_end; ++key) {
        const bool sees = sees_[row * truth_.rows() + key];
        (sees ? visible : hidden)++;
        if (sees) {
          ASSERT_EQ(covered_[row * truth_.rows() + key]++, 0)
              << "pair " << row << ", " << key << " covered twice";
        }
      }
    }
    ASSERT_GT(visible, 0) << "rows from " << row_begin << ", keys from " << key_begin
                          << ": a visit for nothing";
    ASSERT_EQ(masked, hidden > 0) << "rows from " << row_begin << ", keys from " << key_begin;
  }

  void ExpectAllCovered() {
    for (size_t pair = 0; pair < sees_.size(); ++pair) {
      ASSERT_EQ(covered_[pair] != 0, sees_[pair])
          << "pair " << pair / truth_.rows() << ", " << pair % truth_.rows();
    }
  }

  static int64_t WorkOf(const dualkv_schedule& schedule, int64_t t) {
    int64_t work = 0;
    for (int32_t r = schedule.tiles[t].run_begin; r < schedule.tiles[t].run_end; ++r) {
      work += schedule.runs[r].end - schedule.runs[r].begin;
    }
    return work;
  }

  static void ExpectSortedByWork(const dualkv_schedule& schedule) {
    for (int64_t t = 1; t < schedule.num_tiles; ++t) {
      ASSERT_LE(WorkOf(schedule, t), WorkOf(schedule, t - 1));
    }
  }

  // Bands are tiles, or parts, of one segment in the order of their rows. Segments whose parts make the most
  // visits come first, but those with equally many binary digits stay in order.
  void ExpectSortedByBands() {
    const dualkv_schedule& schedule = view_.backward;
    std::map<int64_t, int64_t> most;  // visits of a part, of each segment
    for (int64_t t = 0; t < schedule.num_tiles; ++t) {
      int64_t visits = 0;
      for (int32_t r = schedule.tiles[t].run_begin; r < schedule.tiles[t].run_end; ++r) {
        visits += (schedule.runs[r].end - schedule.runs[r].begin + spec_.query_tile - 1) / spec_.query_tile;
      }
      int64_t& of_segment = most.try_emplace(truth_.segment(schedule.tiles[t].begin), 1).first->second;
      of_segment = std::max(of_segment, visits);
    }
    auto digits = [&](int64_t segment) { return std::bit_width(static_cast<uint64_t>(most[segment])); };
    for (int64_t t = 1; t < schedule.num_tiles; ++t) {
      const dualkv_tile &tile = schedule.tiles[t], &last = schedule.tiles[t - 1];
      const int64_t segment = truth_.segment(tile.begin), last_segment = truth_.segment(last.begin);
      if (view_.band[t] != t) {
        ASSERT_EQ(view_.band[t], view_.band[t - 1]);
        ASSERT_EQ(segment, last_segment);
        ASSERT_GT(tile.begin, last.begin);
      } else if (digits(segment) == digits(last_segment)) {
        ASSERT_GE(segment, last_segment);
      } else {
        ASSERT_LT(digits(segment), digits(last_segment));
      }
    }
    ASSERT_TRUE(schedule.num_tiles == 0 || view_.band[0] == 0);
  }

  void CheckForward() {
    const dualkv_schedule& schedule = view_.forward;
    ASSERT_EQ(schedule.query_tile, spec_.query_tile);
    ASSERT_EQ(schedule.key_tile, spec_.key_tile);
    ExpectSortedByWork(schedule);
    covered_.assign(sees_.size(), 0);
    std::vector<int> in_tiles(truth_.rows(), 0);
    for (int64_t t = 0; t < schedule.num_tiles; ++t) {
      const dualkv_tile& tile = schedule.tiles[t];
      ASSERT_TRUE(tile.begin < tile.end && tile.end - tile.begin <= spec_.query_tile);
      for (int64_t row = tile.begin; row < tile.end; ++row) {
        ++in_tiles[row];
        ASSERT_TRUE(IsQuery(row)) << "row " << row;
        ASSERT_EQ(Root(row), Root(tile.begin)) << "a tile of two trees";
      }
      int64_t walked = -1;
      for (int32_t r = tile.run_begin; r < tile.run_end; ++r) {
        const dualkv_run& run = schedule.runs[r];
        const dualkv_segment& segment = view_.segments[run.segment];
        ASSERT_TRUE(run.begin < run.end && run.end <= segment.end);
        ASSERT_EQ((run.begin - segment.begin) % spec_.key_tile, 0)
            << "key tiles start at the segment's start";
        ASSERT_GE(run.begin, walked) << "keys are walked from the root down";
        walked = run.end;
        for (int32_t k = run.begin; k < run.end; k += spec_.key_tile) {
          ASSERT_NO_FATAL_FAILURE(
              Cover(tile.begin, tile.end, k, std::min(k + spec_.key_tile, run.end), run.masked));
        }
      }
    }
    for (int64_t row = 0; row < truth_.rows(); ++row) {
      ASSERT_EQ(in_tiles[row], IsQuery(row)) << "row " << row;
    }
    ExpectAllCovered();
  }

  void CheckBackward() {
    const dualkv_schedule& schedule = view_.backward;
    ASSERT_NO_FATAL_FAILURE(ExpectSortedByBands());
    covered_.assign(sees_.size(), 0);
    std::vector<int> in_tiles(truth_.rows(), 0);
    for (int64_t t = 0; t < schedule.num_tiles; ++t) {
      const dualkv_tile& tile = schedule.tiles[t];
      const int64_t s = truth_.segment(tile.begin);
      ASSERT_TRUE(tile.begin < tile.end && tile.end <= view_.segments[s].end);
      ASSERT_EQ((tile.begin - view_.segments[s].begin) % spec_.key_tile, 0);
      ASSERT_LE(tile.end - tile.begin, spec_.key_tile);
      const bool first = t == FirstEntryOf(tile);
      for (int64_t key = tile.begin; key < tile.end && first; ++key) {
        ++in_tiles[key];
      }
      for (int32_t r = tile.run_begin; r < tile.run_end; ++r) {
        const dualkv_run& run = schedule.runs[r];
        ASSERT_EQ(run.segment, s);
        for (int32_t q = run.begin; q < run.end; q += spec_.query_tile) {
          ASSERT_NO_FATAL_FAILURE(
              Cover(q, std::min(q + spec_.query_tile, run.end), tile.begin, tile.end, run.masked));
        }
      }
    }
    for (int64_t row = 0; row < truth_.rows(); ++row) {
      ASSERT_EQ(in_tiles[row], 1) << "key " << row << " must be in one tile, seen or not";
    }
    ExpectAllCovered();
  }

  // The first entry of the backward schedule with the rows of this one: several are parts of a tile.
  int64_t FirstEntryOf(const dualkv_tile& tile) const {
    const dualkv_tile* tiles = view_.backward.tiles;
    return std::find_if(tiles, tiles + view_.backward.num_tiles,
                        [&](const dualkv_tile& other) { return other.begin == tile.begin; }) -
           tiles;
  }

  // A segment with a key tile that makes too many visits has its tiles cut, counted from their last rows,
  // into parts that are light enough and no more than the heaviest needs. Parts of a band have the same rows,
  // and a segment's bands are in the order of theirs.
  void CheckParts() {
    struct Entry {
      int32_t partial;
      int32_t band;
      int64_t visits;
      int32_t first_row;
      int32_t end_row;
    };
    std::map<int64_t, std::map<int32_t, std::vector<Entry>>> entries;  // of each segment and key tile
    int64_t all = 0;
    for (int64_t t = 0; t < view_.backward.num_tiles; ++t) {
      const dualkv_tile& tile = view_.backward.tiles[t];
      Entry entry{view_.partial[t], view_.band[t], 0, -1, -1};
      for (int32_t r = tile.run_begin; r < tile.run_end; ++r) {
        const dualkv_run& run = view_.backward.runs[r];
        ASSERT_GE(run.begin, entry.end_row) << "rows are visited in order";
        entry.visits += (run.end - run.begin + spec_.query_tile - 1) / spec_.query_tile;
        entry.first_row = entry.first_row < 0 ? run.begin : entry.first_row;
        entry.end_row = run.end;
      }
      all += entry.visits;
      entries[truth_.segment(tile.begin)][tile.begin].push_back(entry);
    }
    const int64_t limit =
        spec_.parts == 0 ? std::max<int64_t>(all, 1) : std::max<int64_t>(all / spec_.parts, 1);
    int32_t partials = 0;
    for (auto& [segment, tiles] : entries) {
      int64_t heaviest = 1;
      for (auto& [begin, parts] : tiles) {
        std::sort(parts.begin(), parts.end(),
                  [](const Entry& a, const Entry& b) { return a.partial < b.partial; });
        int64_t visits = 0;
        for (const Entry& part : parts) {
          visits += part.visits;
        }
        heaviest = std::max(heaviest, visits);
      }
      const int64_t count = (heaviest + limit - 1) / limit, length = (heaviest + count - 1) / count;
      ASSERT_LE(length, limit);
      std::map<size_t, Entry>
          whole;  // of the parts at each place from the end, one that is as long as can be
      std::map<size_t, int32_t> bands;
      for (const auto& [begin, parts] : tiles) {
        SCOPED_TRACE("key tile at " + std::to_string(begin));
        int32_t row = -1;
        for (size_t p = 0; p < parts.size(); ++p) {
          const Entry& part = parts[p];
          ASSERT_EQ(part.partial, parts.size() == 1 ? -1 : partials++) << "in the order of tiles and rows";
          ASSERT_GE(part.first_row, row);
          row = part.end_row;
          const size_t place = parts.size() - 1 - p;
          if (p > 0) {
            ASSERT_EQ(part.visits, length);
          } else {
            ASSERT_LE(part.visits, length);
            ASSERT_TRUE(part.visits > 0 || parts.size() == 1);
          }
          ASSERT_EQ(bands.try_emplace(place, part.band).first->second, part.band);
          if (part.visits == length && spec_.window_left < 0) {
            const Entry& other = whole.try_emplace(place, part).first->second;
            ASSERT_EQ(part.first_row, other.first_row);
            ASSERT_EQ(part.end_row, other.end_row);
          }
        }
      }
      for (size_t place = 1; place < bands.size(); ++place) {
        ASSERT_LT(bands[place], bands[place - 1]) << "first rows first";
      }
    }
    ASSERT_EQ(view_.num_partials, partials);
    ASSERT_LE(partials, core::MostPartials(spec_.parts));
  }

  void CheckTurns() {
    std::vector<int32_t> seen(view_.num_query_tiles, 0), first_row(view_.num_query_tiles, -1);
    for (int64_t t = 0; t < view_.backward.num_tiles; ++t) {
      const dualkv_tile& tile = view_.backward.tiles[t];
      for (int32_t r = tile.run_begin; r < tile.run_end; ++r) {
        const dualkv_run& run = view_.backward.runs[r];
        if (r > tile.run_begin) {
          const dualkv_run& last = view_.backward.runs[r - 1];
          ASSERT_TRUE(last.end < run.begin || last.masked != run.masked ||
                      (last.end - last.begin) % spec_.query_tile != 0 || view_.turn[r - 1] != view_.turn[r])
              << "one run in two";
        }
        int64_t n = 0;
        for (int32_t q = run.begin; q < run.end; q += spec_.query_tile, ++n) {
          const int64_t query_tile = view_.first_query_tile[r] + n;
          ASSERT_LT(query_tile, view_.num_query_tiles);
          ASSERT_TRUE(first_row[query_tile] == -1 || first_row[query_tile] == q)
              << "one number for each query tile";
          first_row[query_tile] = q;
          ASSERT_EQ(view_.turn[r], seen[query_tile]++);
        }
      }
    }
    EXPECT_TRUE(std::is_sorted(first_row.begin(), first_row.end()));
    EXPECT_EQ(std::count(first_row.begin(), first_row.end(), -1), 0) << "every query tile is visited";
  }

  BruteForce truth_;
  Forest forest_;
  PlanSpec spec_;
  std::optional<Plan> plan_;
  dualkv_plan_view view_;
  std::vector<bool> sees_;
  std::vector<int> covered_;
};

void CheckPlan(const ForestSpec& forest, const PlanSpec& spec) {
  std::string trace = forest.ToString() + "; window " + std::to_string(spec.window_left) + ", tiles " +
                      std::to_string(spec.query_tile) + " x " + std::to_string(spec.key_tile) + ", parts " +
                      std::to_string(spec.parts) + ", keys only:";
  for (const uint8_t flag : spec.keys_only) {
    trace += " " + std::to_string(flag);
  }
  SCOPED_TRACE(trace);
  PlanChecker(forest, spec).CheckAll();
}

TEST(Plan, EverySmallForestIsCoveredExactlyOnce) {
  std::mt19937_64 rng(1);
  for (int segments = 0; segments <= 4; ++segments) {
    ForEachForest(segments, {0, 1, 2, 5}, [&](const ForestSpec& forest) {
      for (const int64_t window : {-1, 0, 2}) {
        for (const auto& [query_tile, key_tile] : {std::pair{1, 1}, {2, 3}, {3, 2}, {4, 4}}) {
          PlanSpec spec{window, query_tile, key_tile, std::vector<uint8_t>(segments, 0)};
          if (rng() % 4 == 0) {
            std::generate(spec.keys_only.begin(), spec.keys_only.end(), [&] { return rng() % 2; });
          }
          spec.parts = rng() % 2 == 0 ? 0 : static_cast<int32_t>(1 + rng() % 6);
          CheckPlan(forest, spec);
          if (::testing::Test::HasFatalFailure()) {
            return;
          }
        }
      }
    });
  }
}

TEST(Plan, RandomLargeForestsAreCoveredExactlyOnce) {
  for (uint64_t seed = 0; seed < 80; ++seed) {
    std::mt19937_64 rng(seed);
    SCOPED_TRACE("seed " + std::to_string(seed));
    const ForestSpec forest = RandomForest(rng, 30, seed % 3 == 0 ? 150 : 40);
    const int32_t sizes[] = {1, 7, 16, 64, 128};
    PlanSpec spec{-1, sizes[rng() % 5], sizes[rng() % 5], std::vector<uint8_t>(forest.lengths.size(), 0)};
    spec.window_left = rng() % 2 == 0 ? -1 : static_cast<int64_t>(rng() % 200);
    if (rng() % 3 == 0) {
      std::generate(spec.keys_only.begin(), spec.keys_only.end(), [&] { return rng() % 3 == 0; });
    }
    const int32_t parts[] = {0, 1, 3, 17, 132, 65536};
    spec.parts = parts[rng() % 6];
    CheckPlan(forest, spec);
    if (HasFatalFailure()) {
      return;
    }
  }
}

TEST(Plan, ShortResponsesShareQueryTiles) {
  const Forest forest = Forest::FromGroups({{64, std::vector<int64_t>(32, 4)}});
  const Plan plan(forest);
  EXPECT_EQ(plan.View().forward.num_tiles, 3);  // 64 prompt rows and 32 x 4 response rows in tiles of 64
}

TEST(Plan, UnmaskedWorkDominatesAGroup) {
  const Plan plan(Forest::FromGroups({{4096, std::vector<int64_t>(16, 1024)}}));
  int64_t masked = 0, unmasked = 0;
  const dualkv_plan_view view = plan.View();
  for (int64_t r = 0; r < view.forward.num_runs; ++r) {
    const dualkv_run& run = view.forward.runs[r];
    (run.masked ? masked : unmasked) +=
        (run.end - run.begin + view.forward.key_tile - 1) / view.forward.key_tile;
  }
  // Only the diagonal needs masks: one tile, or two where a query tile is not aligned to the key tiles.
  EXPECT_LE(masked, 2 * view.forward.num_tiles);
  EXPECT_GT(unmasked, 15 * masked);
}

TEST(Plan, TurnsOfALongSequenceCutNoRuns) {
  auto params = Params<dualkv_plan_params>();
  const Forest forest = Forest::FromGroups({{1 << 18, {}}});
  params.forest = forest.get();
  params.window_left = DUALKV_NO_WINDOW;
  const Plan plan(params);
  const dualkv_plan_view view = plan.View();
  EXPECT_EQ(view.backward.num_runs, 2 * view.backward.num_tiles - 1) << "the wedge and all rows behind it";
}

TEST(Plan, AGroupsPromptIsCutForAMachineOfManyProcessors) {
  auto params = Params<dualkv_plan_params>();
  const Forest forest = Forest::FromGroups({{256, std::vector<int64_t>(16, 512)}});
  params.forest = forest.get();
  params.window_left = DUALKV_NO_WINDOW;
  params.backward_parts = 8;
  const Plan plan(params);
  const dualkv_plan_view view = plan.View();
  // 132 + 130 query tiles see the prompt's two key tiles, 8 + 6 + 4 + 2 those of each response: 582, 72 each.
  EXPECT_EQ(view.num_partials, 4);
  EXPECT_EQ(view.backward.num_tiles, 4 + 16 * 4);
}

TEST(Plan, RefusesBadParameters) {
  const Forest forest = Forest::FromGroups({{3, {1}}});
  dualkv_plan* plan = nullptr;
  auto params = Params<dualkv_plan_params>();
  ExpectInvalid(dualkv_plan_create(&params, &plan), {"forest", "NULL"});
  params.forest = forest.get();
  params.window_left = -2;
  ExpectInvalid(dualkv_plan_create(&params, &plan), {"window_left", "-2"});
  params.window_left = 0;
  params.forward_query_tile = -1;
  ExpectInvalid(dualkv_plan_create(&params, &plan), {"forward_query_tile", "-1"});
  params.forward_query_tile = 0;
  params.backward_key_tile = 65537;
  ExpectInvalid(dualkv_plan_create(&params, &plan), {"backward_key_tile", "65537"});
  params.backward_key_tile = 0;
  for (const int32_t parts : {-1, 65537}) {
    params.backward_parts = parts;
    ExpectInvalid(dualkv_plan_create(&params, &plan),
                  {"backward_parts must be 0 to 65536, got", std::to_string(parts).c_str()});
  }
  params.backward_parts = 0;
  params.reserved = 5;
  ExpectInvalid(dualkv_plan_create(&params, &plan), {"reserved must be 0, got 5"});
  params.reserved = 0;
  ExpectInvalid(dualkv_plan_create(&params, nullptr), {"plan", "NULL"});
  ExpectInvalid(dualkv_plan_create(nullptr, &plan), {"params", "NULL"});
  params.size = 1;
  ExpectInvalid(dualkv_plan_create(&params, &plan), {"params.size", "got 1"});
  EXPECT_EQ(plan, nullptr);
}

}  // namespace
}  // namespace dualkv::testing
