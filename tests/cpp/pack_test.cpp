// Packing through the public interface: the known failure cases by name, and random round trips against a
// packer that looks everything up by brute force.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "dualkv/dualkv.h"
#include "pack_input.h"

namespace dualkv::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::IsEmpty;
using BatchPtr = std::unique_ptr<dualkv_batch, decltype(&dualkv_batch_destroy)>;

// A packed batch, copied out of its view.
struct Packed {
  Ints segment_begin, segment_parents;
  Ints input_ids, position_ids, target_rows, target_ids, response_counts, target_begin;
  Ints source_rows, source_positions;
  bool has_source = false;
};

template <class Params>
Packed PackOrFail(const Params& params) {
  dualkv_batch* raw = nullptr;
  if (Call(params, &raw) != DUALKV_OK) {
    ADD_FAILURE() << dualkv_last_error();
    return {};
  }
  const BatchPtr batch(raw, dualkv_batch_destroy);
  dualkv_batch_view view{};
  view.size = sizeof(view);
  view.version = DUALKV_ABI_VERSION;
  EXPECT_EQ(dualkv_batch_get_view(batch.get(), &view), DUALKV_OK) << dualkv_last_error();
  dualkv_forest_view forest{};
  forest.size = sizeof(forest);
  forest.version = DUALKV_ABI_VERSION;
  EXPECT_EQ(dualkv_forest_get_view(view.forest, &forest), DUALKV_OK) << dualkv_last_error();
  EXPECT_EQ(forest.total_tokens, view.num_tokens);
  EXPECT_EQ(forest.num_segments, view.num_groups + view.num_responses);

  Packed packed;
  for (int64_t s = 0; s < forest.num_segments; ++s) {
    packed.segment_begin.push_back(forest.segments[s].begin);
    packed.segment_parents.push_back(forest.segments[s].parent);
  }
  auto copy = [](const int64_t* values, int64_t count) {
    return count > 0 ? Ints(values, values + count) : Ints{};
  };
  packed.input_ids = copy(view.input_ids, view.num_tokens);
  packed.position_ids = copy(view.position_ids, view.num_tokens);
  packed.target_rows = copy(view.target_rows, view.num_targets);
  packed.target_ids = copy(view.target_ids, view.num_targets);
  packed.response_counts = copy(view.response_counts, view.num_groups);
  packed.target_begin = copy(view.target_begin, view.num_responses + 1);
  packed.has_source = view.source_rows != nullptr || view.source_positions != nullptr;
  if (packed.has_source) {
    packed.source_rows = copy(view.source_rows, view.num_responses);
    packed.source_positions = copy(view.source_positions, view.num_targets);
  }
  return packed;
}

Packed PackGroups(const std::vector<Group>& groups) { return PackOrFail(PackInput(groups).Params()); }

void ExpectSame(const Packed& packed, const Packed& expected) {
  EXPECT_THAT(packed.segment_begin, ElementsAreArray(expected.segment_begin));
  EXPECT_THAT(packed.segment_parents, ElementsAreArray(expected.segment_parents));
  EXPECT_THAT(packed.input_ids, ElementsAreArray(expected.input_ids));
  EXPECT_THAT(packed.position_ids, ElementsAreArray(expected.position_ids));
  EXPECT_THAT(packed.target_rows, ElementsAreArray(expected.target_rows));
  EXPECT_THAT(packed.target_ids, ElementsAreArray(expected.target_ids));
  EXPECT_THAT(packed.response_counts, ElementsAreArray(expected.response_counts));
  EXPECT_THAT(packed.target_begin, ElementsAreArray(expected.target_begin));
  EXPECT_THAT(packed.source_rows, ElementsAreArray(expected.source_rows));
  EXPECT_THAT(packed.source_positions, ElementsAreArray(expected.source_positions));
}

using Scored = std::vector<std::vector<std::vector<bool>>>;  // of the tokens of responses[g][n]

// Packs without arithmetic on offsets: every row of the batch is labelled, and the row of a target is found
// by searching for the label of the token before it.
Packed BruteForcePack(const std::vector<Group>& groups, const Scored& scored) {
  struct Label {
    size_t group;
    int64_t response;  // -1: the prompt
    size_t token;
    bool operator==(const Label&) const = default;
  };
  std::vector<Label> labels;
  Packed packed;
  for (size_t g = 0; g < groups.size(); ++g) {
    const auto root = static_cast<int64_t>(packed.segment_begin.size());
    const auto num_responses = static_cast<int64_t>(groups[g].responses.size());
    packed.response_counts.push_back(num_responses);
    for (int64_t n = -1; n < num_responses; ++n) {
      packed.segment_begin.push_back(static_cast<int64_t>(labels.size()));
      packed.segment_parents.push_back(n < 0 ? -1 : root);
      const Ints& tokens = n < 0 ? groups[g].prompt : groups[g].responses[n];
      for (size_t i = 0; i < tokens.size(); ++i) {
        labels.push_back({g, n, i});
        packed.input_ids.push_back(tokens[i]);
        packed.position_ids.push_back(static_cast<int64_t>(n < 0 ? i : groups[g].prompt.size() + i));
      }
    }
  }
  packed.target_begin.push_back(0);
  for (size_t g = 0; g < groups.size(); ++g) {
    for (size_t n = 0; n < groups[g].responses.size(); ++n) {
      for (size_t i = 0; i < groups[g].responses[n].size(); ++i) {
        if (scored[g][n][i]) {
          const Label before =
              i > 0 ? Label{g, static_cast<int64_t>(n), i - 1} : Label{g, -1, groups[g].prompt.size() - 1};
          packed.target_rows.push_back(std::ranges::find(labels, before) - labels.begin());
          packed.target_ids.push_back(groups[g].responses[n][i]);
        }
      }
      packed.target_begin.push_back(static_cast<int64_t>(packed.target_ids.size()));
    }
  }
  return packed;
}

TEST(Pack, J1_TargetsStayWithinTheirResponse) {
  const Packed packed = PackGroups({{{5, 6, 7}, {{11, 12}, {21}}}});
  EXPECT_THAT(packed.input_ids, ElementsAre(5, 6, 7, 11, 12, 21));
  EXPECT_THAT(packed.target_rows, ElementsAre(2, 3, 2));
  EXPECT_THAT(packed.target_ids, ElementsAre(11, 12, 21));
  EXPECT_THAT(packed.target_begin, ElementsAre(0, 2, 3));
  EXPECT_THAT(packed.response_counts, ElementsAre(2));
  EXPECT_FALSE(packed.has_source);
}

TEST(Pack, J2_EachResponseContinuesThePromptsPositions) {
  const Packed packed = PackGroups({{{1, 2, 3}, {{4, 5}, {6, 7}}}});
  EXPECT_THAT(packed.position_ids, ElementsAre(0, 1, 2, 3, 4, 3, 4));
  EXPECT_THAT(packed.segment_begin, ElementsAre(0, 3, 5));
  EXPECT_THAT(packed.segment_parents, ElementsAre(-1, 0, 0));
}

// Response tokens that tell which row they are of.
std::vector<Cell> Row(const Ints& prompt, int64_t response_length, int64_t row, size_t columns) {
  std::vector<Cell> cells;
  for (const int64_t id : prompt) {
    cells.push_back({id});
  }
  for (int64_t r = 0; r < response_length; ++r) {
    cells.push_back({100 * (row + 1) + r, true, true});
  }
  cells.resize(columns, {0, false});
  return cells;
}

TEST(Pack, J5_InterleavedGroupsAreFoundByIdAndMapBackToTheirRows) {
  const Ints a = {1, 2, 3}, b = {1, 2, 3, 4, 5, 6, 7};
  constexpr int64_t kA = -9, kB = 1'000'000'007;
  std::vector<std::vector<Cell>> rows;
  Ints ids;
  for (int64_t row = 0; row < 8; ++row) {
    rows.push_back(Row(row % 2 == 0 ? a : b, row + 1, row, 15));
    ids.push_back(row % 2 == 0 ? kA : kB);
  }
  const Packed packed = PackOrFail(PaddedInput(rows, ids, 15).Params());
  EXPECT_THAT(packed.response_counts, ElementsAre(4, 4));
  EXPECT_THAT(packed.source_rows, ElementsAre(0, 2, 4, 6, 1, 3, 5, 7));
  EXPECT_THAT(packed.target_begin, ElementsAre(0, 1, 4, 9, 16, 18, 22, 28, 36));
  EXPECT_THAT(packed.segment_begin, ElementsAre(0, 3, 4, 7, 12, 19, 26, 28, 32, 38));
  EXPECT_THAT(packed.segment_parents, ElementsAre(-1, 0, 0, 0, 0, -1, 5, 5, 5, 5));
  size_t m = 0;
  for (const int64_t row : packed.source_rows) {
    const int64_t prompt_length = row % 2 == 0 ? 3 : 7;
    for (int64_t r = 0; r <= row; ++r, ++m) {
      ASSERT_LT(m, packed.target_ids.size());
      EXPECT_EQ(packed.target_ids[m], 100 * (row + 1) + r) << "row " << row << ", token " << r;
      EXPECT_EQ(packed.source_positions[m], row * 15 + prompt_length + r) << "row " << row << ", token " << r;
      EXPECT_EQ(packed.position_ids[packed.target_rows[m]], prompt_length + r - 1);
    }
  }
  EXPECT_EQ(m, packed.target_ids.size());
}

TEST(Pack, J5_EqualPromptsOfTwoIdsStayTwoGroups) {
  const Packed packed =
      PackOrFail(PaddedInput({Row({1, 2}, 1, 0, 3), Row({1, 2}, 1, 1, 3)}, {7, 8}, 1).Params());
  EXPECT_THAT(packed.response_counts, ElementsAre(1, 1));
  EXPECT_THAT(packed.input_ids, ElementsAre(1, 2, 100, 1, 2, 200));
  EXPECT_THAT(packed.target_rows, ElementsAre(1, 4));
}

TEST(Pack, J6_GroupsOfDifferentSizes) {
  const Packed packed = PackGroups({{{1, 2, 3, 4, 5}, {{11}, {12, 13}, {14, 15, 16}}},
                                    {{6}, {{21, 22}, {23}}},
                                    {{1, 2, 3, 4, 5, 6, 7, 8, 9}, {{31, 32}}}});
  EXPECT_THAT(packed.response_counts, ElementsAre(3, 2, 1));
  EXPECT_THAT(packed.segment_begin, ElementsAre(0, 5, 6, 8, 11, 12, 14, 15, 24));
  EXPECT_THAT(packed.segment_parents, ElementsAre(-1, 0, 0, 0, -1, 4, 4, -1, 7));
  EXPECT_THAT(packed.target_rows, ElementsAre(4, 4, 6, 4, 8, 9, 11, 12, 11, 23, 24));
  EXPECT_THAT(packed.target_ids, ElementsAre(11, 12, 13, 14, 15, 16, 21, 22, 23, 31, 32));
  EXPECT_THAT(packed.target_begin, ElementsAre(0, 1, 3, 6, 8, 9, 11));
  EXPECT_EQ(packed.position_ids.back(), 10);
}

TEST(Pack, J8_NothingPacksToNothing) {
  const PaddedInput no_rows({}, {}, 0);
  dualkv_pack_padded_params with_columns = no_rows.Params();
  with_columns.num_columns = 8;
  with_columns.response_columns = 3;
  for (const Packed& packed : {PackGroups({}), PackOrFail(no_rows.Params()), PackOrFail(with_columns)}) {
    EXPECT_THAT(packed.segment_begin, IsEmpty());
    EXPECT_THAT(packed.input_ids, IsEmpty());
    EXPECT_THAT(packed.target_ids, IsEmpty());
    EXPECT_THAT(packed.response_counts, IsEmpty());
    EXPECT_THAT(packed.target_begin, ElementsAre(0));
  }
}

TEST(Pack, J8_GroupsWithoutResponsesLeaveTheOthersAlone) {
  const Packed packed =
      PackGroups({{{1, 2}, {}}, {{3, 4}, {{5, 6}, {}, {7}}}, {{}, {}}, {{8}, {{}}}, {{}, {{}}}});
  EXPECT_THAT(packed.response_counts, ElementsAre(0, 3, 0, 1, 1));
  EXPECT_THAT(packed.input_ids, ElementsAre(1, 2, 3, 4, 5, 6, 7, 8));
  EXPECT_THAT(packed.position_ids, ElementsAre(0, 1, 0, 1, 2, 3, 2, 0));
  EXPECT_THAT(packed.target_rows, ElementsAre(3, 4, 3));
  EXPECT_THAT(packed.target_begin, ElementsAre(0, 2, 2, 3, 3, 3));
}

TEST(Pack, J9_PaddingOfAnyKindChangesNothing) {
  // The last response holds the pad id, and neither it nor an end token marks where a response ends.
  constexpr int64_t kPad = 7;
  const std::vector<Group> groups = {{{1, 2, 3, 4}, {{50, 51, 52}}},
                                     {{11, 12, 13, kPad, 15, 16, 17, 18, 19, 20, 21}, {{60}}},
                                     {{kPad, 2}, {{kPad, 70, kPad}}}};
  const Packed expected = PackGroups(groups);
  constexpr int64_t kLeft[] = {0, 30, 67}, kRight[] = {0, 5, 9};
  for (const int64_t pad_id : {kPad, int64_t{-100}}) {
    for (const bool whole_rows_masked : {false, true}) {  // R == S, R < S
      constexpr size_t kPromptColumns = 67 + 11, kColumns = kPromptColumns + 3 + 9;
      std::vector<std::vector<Cell>> rows;
      for (size_t g = 0; g < groups.size(); ++g) {
        std::vector<Cell> row(kLeft[g], Cell{pad_id, false});
        for (const int64_t id : groups[g].prompt) {
          row.push_back({id});
        }
        row.resize(whole_rows_masked ? row.size() : kPromptColumns, {pad_id, false});
        row.resize(row.size() + kRight[g], {pad_id, false});
        for (const int64_t id : groups[g].responses[0]) {
          row.push_back({id, true, true});
        }
        row.resize(kColumns, {pad_id, false});
        rows.push_back(row);
      }
      const int64_t response_columns = whole_rows_masked ? kColumns : kColumns - kPromptColumns;
      Packed packed = PackOrFail(PaddedInput(rows, {0, 1, 2}, response_columns).Params());
      EXPECT_THAT(packed.source_rows, ElementsAre(0, 1, 2));
      EXPECT_EQ(packed.target_ids.size(), 3u + 1u + 3u);
      packed.source_rows.clear();
      packed.source_positions.clear();
      SCOPED_TRACE(::testing::Message() << "pad id " << pad_id << ", R " << response_columns);
      ExpectSame(packed, expected);
    }
  }
}

TEST(Pack, J11_ResponsesAreNeverMerged) {
  const Packed shared_start = PackGroups({{{1, 2, 3}, {{7, 8, 9}, {7, 8, 5}}}});
  EXPECT_THAT(shared_start.input_ids, ElementsAre(1, 2, 3, 7, 8, 9, 7, 8, 5));
  EXPECT_THAT(shared_start.target_rows, ElementsAre(2, 3, 4, 2, 6, 7));
  const Packed identical = PackGroups({{{1, 2, 3}, {{7, 8}, {7, 8}}}});
  EXPECT_THAT(identical.input_ids, ElementsAre(1, 2, 3, 7, 8, 7, 8));
  EXPECT_THAT(identical.target_rows, ElementsAre(2, 3, 2, 5));
  const Packed padded = PackOrFail(
      PaddedInput({{{1}, {7, true, true}, {8, true, true}}, {{1}, {7, true, true}, {8, true, true}}}, {4, 4},
                  2)
          .Params());
  EXPECT_THAT(padded.input_ids, ElementsAre(1, 7, 8, 7, 8));
  EXPECT_THAT(padded.source_positions, ElementsAre(0, 1, 2, 3));
}

TEST(PackPadded, UnscoredResponseTokensAreContext) {
  // Multi-turn: the tool's answer (20, 21) is read but not scored; padding stands before and after it.
  const std::vector<Cell> row = {{1},  {2},        {10, true, true}, {0, false}, {20},
                                 {21}, {0, false}, {11, true, true}, {12},       {0, false}};
  const Packed packed = PackOrFail(PaddedInput({row}, {0}, 10).Params());
  EXPECT_THAT(packed.input_ids, ElementsAre(1, 2, 10, 20, 21, 11, 12));
  EXPECT_THAT(packed.segment_begin, ElementsAre(0, 2));
  EXPECT_THAT(packed.target_rows, ElementsAre(1, 4));
  EXPECT_THAT(packed.target_ids, ElementsAre(10, 11));
  EXPECT_THAT(packed.source_positions, ElementsAre(2, 7));
}

TEST(PackPadded, ResponseStartsAtTheLastColumnsOrAtTheFirstScoredOne) {
  const std::vector<Cell> row = {{1}, {2}, {3}, {4, true, true}};
  EXPECT_THAT(PackOrFail(PaddedInput({row}, {0}, 2).Params()).segment_begin, ElementsAre(0, 2));
  EXPECT_THAT(PackOrFail(PaddedInput({row}, {0}, 4).Params()).segment_begin, ElementsAre(0, 3));
  const std::vector<Cell> unscored = {{1}, {2}, {3}, {4}};
  EXPECT_THAT(PackOrFail(PaddedInput({unscored}, {0}, 4).Params()).segment_begin, ElementsAre(0, 4));
}

class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}
  int64_t Int(int64_t low, int64_t high) { return std::uniform_int_distribution(low, high)(engine_); }
  bool Chance() { return Int(0, 1) == 1; }
  Ints Tokens(int64_t count) {
    Ints tokens(count);
    std::ranges::generate(tokens, [&] { return Int(0, 3); });  // few ids, so that tokens are often equal
    return tokens;
  }
  template <class T>
  void Shuffle(std::vector<T>& values) {
    std::ranges::shuffle(values, engine_);
  }

 private:
  std::mt19937 engine_;
};

TEST(Pack, RandomGroupsMatchBruteForce) {
  for (uint32_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    Random random(seed);
    std::vector<Group> groups(random.Int(0, 4));
    Scored scored;
    for (Group& group : groups) {
      group.prompt = random.Tokens(random.Int(0, 6));
      group.responses.resize(random.Int(0, 4));
      scored.emplace_back();
      for (Ints& response : group.responses) {
        response = random.Tokens(group.prompt.empty() ? 0 : random.Int(0, 5));
        scored.back().emplace_back(response.size(), true);
      }
    }
    const Packed packed = PackGroups(groups);
    EXPECT_FALSE(packed.has_source);
    ExpectSame(packed, BruteForcePack(groups, scored));
  }
}

// A padded batch of random rows, and how it should be packed.
struct RandomRows {
  RandomRows(Random& random, bool whole_rows_masked)
      : response_columns(whole_rows_masked ? kColumns : kColumns - kPromptColumns) {
    const Ints ids = {-7, 0, int64_t{1} << 40};
    Ints seen_ids;
    const std::vector<Ints> prompts = {random.Tokens(random.Int(1, 6)), random.Tokens(random.Int(1, 6)),
                                       random.Tokens(random.Int(1, 6))};
    const int64_t num_rows = random.Int(1, 8);
    for (int64_t b = 0; b < num_rows; ++b) {
      const int64_t choice = random.Int(0, 2);
      std::vector<Cell> row(kColumns);
      for (Cell& cell : row) {
        cell = {random.Int(-2, 3), false};
      }
      const Ints response = random.Tokens(random.Int(0, 5));
      Place(random, prompts[choice], 0, kPromptColumns, row);
      const Ints columns = Place(random, response, kPromptColumns, kColumns, row);
      std::vector<bool> row_scored;
      Ints positions;
      for (const int64_t column : columns) {
        // Where the mask alone tells where the response starts, its first token is scored.
        row[column].scored = random.Chance() || (whole_rows_masked && column == columns[0]);
        row_scored.push_back(row[column].scored);
        if (row[column].scored) {
          positions.push_back(b * response_columns + column - (kColumns - response_columns));
        }
      }
      rows.push_back(row);
      group_ids.push_back(ids[choice]);

      const size_t g = std::ranges::find(seen_ids, ids[choice]) - seen_ids.begin();
      if (g == seen_ids.size()) {
        seen_ids.push_back(ids[choice]);
        groups.push_back({prompts[choice], {}});
        scored.emplace_back();
        source_rows.emplace_back();
        source_positions.emplace_back();
      }
      groups[g].responses.push_back(response);
      scored[g].push_back(row_scored);
      source_rows[g].push_back(b);
      source_positions[g].insert(source_positions[g].end(), positions.begin(), positions.end());
    }
  }

  // Puts the tokens into random columns of [begin, end), which it returns in ascending order.
  static Ints Place(Random& random, const Ints& tokens, int64_t begin, int64_t end, std::vector<Cell>& row) {
    Ints columns(end - begin);
    std::iota(columns.begin(), columns.end(), begin);
    random.Shuffle(columns);
    columns.resize(tokens.size());
    std::ranges::sort(columns);
    for (size_t i = 0; i < tokens.size(); ++i) {
      row[columns[i]] = {tokens[i]};
    }
    return columns;
  }

  static constexpr int64_t kPromptColumns = 9, kColumns = 17;
  int64_t response_columns;
  std::vector<std::vector<Cell>> rows;
  Ints group_ids;
  // By group, in the order in which a search through the earlier rows finds them.
  std::vector<Group> groups;
  Scored scored;
  std::vector<Ints> source_rows, source_positions;
};

TEST(PackPadded, RandomRowsMatchBruteForce) {
  for (uint32_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    Random random(seed);
    const RandomRows input(random, seed % 2 == 0);
    Packed expected = BruteForcePack(input.groups, input.scored);
    for (size_t g = 0; g < input.groups.size(); ++g) {
      const Ints& rows = input.source_rows[g];
      const Ints& positions = input.source_positions[g];
      expected.source_rows.insert(expected.source_rows.end(), rows.begin(), rows.end());
      expected.source_positions.insert(expected.source_positions.end(), positions.begin(), positions.end());
    }
    const PaddedInput padded(input.rows, input.group_ids, input.response_columns);
    ExpectSame(PackOrFail(padded.Params()), expected);
  }
}

}  // namespace
}  // namespace dualkv::testing
