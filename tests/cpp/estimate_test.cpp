// The reader of rollout files and the estimate behind `dualkv estimate`.
#include "cli/estimate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

#include "cli/rollout_reader.h"

namespace dualkv {

bool operator==(const Group& a, const Group& b) { return a.prompt == b.prompt && a.responses == b.responses; }

void PrintTo(const Group& group, std::ostream* out) {
  *out << group.prompt << ": " << ::testing::PrintToString(group.responses);
}

namespace cli::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr const char* kGroup =
    R"({"prompt": "1+1=", "responses": [{"text": "2", "reward": 1.0}, {"text": "3!", "reward": 0}]})";

Rollouts Read(const std::string& text) {
  std::istringstream in(text);
  return ReadRollouts(in, "FILE");
}

// Reading `text` fails at `place` with all of `parts` in a message of a few lines at most.
void ExpectRefused(const std::string& text, const std::string& place,
                   std::initializer_list<const char*> parts) {
  SCOPED_TRACE(text.substr(0, 200));
  try {
    Read(text);
    ADD_FAILURE() << "was read";
  } catch (const RolloutError& error) {
    EXPECT_THAT(error.what(), StartsWith(place));
    EXPECT_LT(std::string(error.what()).size(), 300u);
    for (const char* part : parts) {
      EXPECT_THAT(error.what(), HasSubstr(part));
    }
  }
}

TEST(RolloutReader, TextIsCountedInBytes) {
  const Rollouts rollouts = Read(
      std::string(kGroup) + "\n \t\r\n" +
      R"({"prompt": "Grüße 🦆", "id": 7, "responses": [{"text": "\u00fc\ud83e\udd86", "reward": -1e3}]})");
  EXPECT_TRUE(rollouts.is_text);
  EXPECT_THAT(rollouts.groups, ElementsAre(Group{4, {1, 2}}, Group{12, {6}}));
}

TEST(RolloutReader, TokenIdsAreCounted) {
  const Rollouts rollouts = Read(
      R"({"prompt_ids": [5, 2147483647, -0], "responses": [{"ids": [7], "reward": 1}, {"ids": [], "reward": 0}]})");
  EXPECT_FALSE(rollouts.is_text);
  EXPECT_THAT(rollouts.groups, ElementsAre(Group{3, {1, 0}}));
}

TEST(RolloutReader, VerlSamplesAreGroupedByStepAndInput) {
  const Rollouts rollouts = Read(R"({"input": "1+1=", "output": "2", "score": 1.0, "step": 3}
                                    {"input": "2+20=", "output": "22", "score": 1.0, "step": 3}
                                    {"input": "1+1=", "output": "three", "score": 0, "step": 3}
                                    {"input": "1+1=", "output": "", "score": 0, "step": 4}
                                    {"input": "1+1=", "output": "4444", "score": 0}
                                    {"input": "2+20=", "output": "", "score": 0, "uid": null})");
  EXPECT_TRUE(rollouts.is_text);
  EXPECT_THAT(rollouts.groups,
              ElementsAre(Group{4, {1, 5}}, Group{5, {2}}, Group{4, {0}}, Group{4, {4}}, Group{5, {0}}));
}

TEST(RolloutReader, VerlSamplesAreGroupedByUidInAnyOrder) {
  EXPECT_THAT(Read(R"({"input": "same", "output": "a", "score": 1, "uid": "x"}
                      {"input": "same", "output": "bb", "score": 1, "uid": 5}
                      {"input": "same", "output": "ccc", "score": 1, "uid": "x"})")
                  .groups,
              ElementsAre(Group{4, {1, 3}}, Group{4, {2}}));
  ExpectRefused(R"({"input": "one", "output": "", "score": 1, "uid": "x"})"
                "\n"
                R"({"input": "two", "output": "", "score": 1, "uid": "x"})",
                "FILE:2: ", {R"(uid "x" has another 'input' than before: "two", not "one")"});
}

TEST(RolloutReader, NonFiniteNumbersAreAllowedWhereTheyAreNotRead) {
  EXPECT_THAT(Read(R"({"input": "NaN \" NaN \\", "output": "Infinity", "score": 1, "acc": NaN,)"
                   R"( "x": [-Infinity, Infinity]})")
                  .groups,
              ElementsAre(Group{11, {8}}));
  ExpectRefused(R"({NaN: 1})", "FILE:1: not JSON", {});
}

TEST(RolloutReader, WrongLinesAreNamed) {
  const auto expect_refused = [](const std::string& line, std::initializer_list<const char*> parts) {
    ExpectRefused(std::string(kGroup) + "\n\n" + line + "\n" + kGroup, "FILE:3: ", parts);
  };
  expect_refused(R"({"prompt": "1+1=", "resp)", {"not JSON, or cut off: \"{\\\"prompt"});
  expect_refused("hello", {"not JSON, or cut off: \"hello\""});
  expect_refused(std::string(kGroup) + "}", {"not JSON, or cut off"});
  expect_refused("{\"prompt\": \"\xff\xfe\"}", {"not UTF-8 text: "});
  expect_refused(std::string(kGroup) + std::string("\0{", 2), {"not UTF-8 text: there is a zero byte"});
  expect_refused(R"({"prompt": "\ud83e", "responses": []})", {"not JSON, or cut off"});
  expect_refused(std::string(100'000, '['), {"nested more than 500 deep"});
  expect_refused(R"({"x": )" + std::string(100'000, '[') + std::string(100'000, ']') + "}",
                 {"nested more than 500 deep"});
  expect_refused("[1, 2]", {"expected a JSON object, got [1,2]"});
  expect_refused(R"({"prompt_ids": [], "responses": []})",
                 {R"(no key 'prompt'; the keys are ["prompt_ids","responses"])"});
  expect_refused(R"({"prompt": 7, "responses": []})", {"'prompt' must be a string, got 7"});
  expect_refused(R"({"prompt": ")" + std::string(10'000, 'x'), {"..", "not JSON, or cut off"});
  expect_refused(R"({"prompt": "x"})", {"no key 'responses'; the keys are [\"prompt\"]"});
  expect_refused(R"({"prompt": "x", "responses": []})",
                 {"'responses' must be a list with at least one entry, got []"});
  expect_refused(R"({"prompt": "x", "responses": {}})", {"'responses' must be a list", "got {}"});
  expect_refused(R"({"prompt": "x", "responses": ["2"]})",
                 {"FILE:3: responses[0]: expected a JSON object, got \"2\""});
  expect_refused(R"({"prompt": "x", "responses": [{"reward": 1}]})", {"responses[0]: no key 'text'"});
  expect_refused(R"({"prompt": "x", "responses": [{"text": [1], "reward": 1}]})",
                 {"responses[0]: 'text' must be a string, got [1]"});
  expect_refused(R"({"prompt": "x", "responses": [{"text": "", "reward": 1}, {"text": ""}]})",
                 {"responses[1]: no key 'reward'"});
}

TEST(RolloutReader, WrongRewardsAreNamed) {
  for (const char* reward : {"NaN", "Infinity", "-Infinity", "null", "true", "\"1\"", "[]"}) {
    ExpectRefused(R"({"prompt": "x", "responses": [{"text": "", "reward": )" + std::string(reward) + "}]}",
                  "FILE:1: responses[0]: 'reward' must be a finite number, got ", {});
  }
  for (const std::string& reward : {std::string("1e400"), "1" + std::string(400, '0')}) {
    ExpectRefused(R"({"prompt": "x", "responses": [{"text": "", "reward": )" + reward + "}]}",
                  "FILE:1: a number is too large: ", {});
  }
  ExpectRefused(R"({"input": "", "output": "", "score": "1"})",
                "FILE:1: 'score' must be a finite number, got \"1\"", {});
}

TEST(RolloutReader, WrongTokenIdsAreNamed) {
  for (const char* token : {"-1", "1.5", "1.0", "\"a\"", "true", "null", "2147483648", "1e+30"}) {
    ExpectRefused(
        R"({"prompt_ids": [1, )" + std::string(token) + R"(], "responses": [{"ids": [3], "reward": 0}]})",
        "FILE:1: 'prompt_ids' holds no token id at index 1, but ", {token});
  }
  ExpectRefused(R"({"prompt_ids": "x", "responses": [{"ids": [3], "reward": 0}]})",
                "FILE:1: 'prompt_ids' must be a list of token ids, got \"x\"", {});
}

TEST(RolloutReader, UnknownKindsAndEmptyFilesAreRefused) {
  ExpectRefused(R"({"question": "?"})",
                "FILE:1: a rollout has the key 'prompt', 'prompt_ids' or (veRL) 'input'",
                {R"(["question"])"});
  ExpectRefused("", "FILE: is empty: expected one JSON object a line", {});
  ExpectRefused("\n \n", "FILE: is empty", {});
}

TEST(RolloutReader, FilesThatCannotBeReadAreNamed) {
  for (const auto& [path, reason] :
       {std::pair{"none.jsonl", "No such file or directory"}, {".", "Is a directory"}}) {
    try {
      ReadRolloutFile(path);
      ADD_FAILURE() << path << " was read";
    } catch (const RolloutError& error) {
      EXPECT_EQ(error.what(), std::string(path) + ": cannot be read: " + reason);
    }
  }
}

// A prompt of 4 tokens with responses of 1 and 2, and one of 3 with a response of 5. With the pairs of a
// causal triangle: packed 10 + 5 + (5 + 6) and 36, replicated 15 + 21 and 36.
const std::vector<Group> kGroups = {{4, {1, 2}}, {3, {5}}};

TEST(Estimate, FiguresOfAHandComputedFile) {
  const Estimate estimate = EstimateSavings(kGroups, {});
  EXPECT_EQ(estimate.groups, 2);
  EXPECT_EQ(estimate.responses, 3);
  EXPECT_EQ(estimate.work.replicated.tokens, 19);
  EXPECT_EQ(estimate.work.packed.tokens, 15);
  EXPECT_EQ(estimate.work.replicated.pairs, 72);
  EXPECT_EQ(estimate.work.packed.pairs, 62);
  EXPECT_EQ(estimate.work.token_ratio(), 19.0 / 15.0);
  EXPECT_EQ(estimate.work.attention_ratio(), 72.0 / 62.0);
  EXPECT_FALSE(estimate.micro_batches);
}

TEST(Estimate, AWindowHidesPairs) {
  // Every row but the first of a sequence sees two positions.
  const Estimate estimate = EstimateSavings(kGroups, {.window_left = 1});
  EXPECT_EQ(estimate.work.replicated.pairs, 9 + 11 + 15);
  EXPECT_EQ(estimate.work.packed.pairs, 7 + 2 + 4 + 15);
}

TEST(Estimate, SplitGroupsTakeTheirPromptAlong) {
  const Estimate estimate = EstimateSavings(kGroups, {.micro_batch_size = 1});
  ASSERT_TRUE(estimate.micro_batches);
  EXPECT_EQ(estimate.micro_batches->count, 3);
  EXPECT_EQ(estimate.micro_batches->work.replicated.tokens, 19);
  EXPECT_EQ(estimate.micro_batches->work.packed.tokens, 19);
  EXPECT_EQ(estimate.micro_batches->work.token_ratio(), 1.0);
  EXPECT_EQ(estimate.micro_batches->work.attention_ratio(), 1.0);
}

TEST(Estimate, MicroBatchesHoldWholeGroupsAsTheyFit) {
  const std::vector<Group> groups = {
      {10, {1, 2}}, {20, {3, 4}}, {30, {5}}, {40, {6, 7, 8, 9, 10}}, {50, {11}}};
  EXPECT_THAT(SplitIntoMicroBatches(groups, 4),
              ElementsAre(ElementsAre(groups[0], groups[1]), ElementsAre(groups[2]),
                          ElementsAre(Group{40, {6, 7, 8, 9}}), ElementsAre(Group{40, {10}}, groups[4])));
  EXPECT_THAT(SplitIntoMicroBatches(groups, 100), ElementsAre(::testing::ElementsAreArray(groups)));
}

TEST(Estimate, BytesBecomeTokensRoundedUp) {
  EXPECT_THAT(TokensOfBytes(std::vector<Group>{{9, {8, 1, 0}}}, 4), ElementsAre(Group{3, {2, 1, 0}}));
  EXPECT_THAT(TokensOfBytes(kGroups, 1), ::testing::ElementsAreArray(kGroups));
}

TEST(Estimate, HistogramHasRoundBinsFromTheShortestToTheLongest) {
  const std::vector<Group> groups = {{957, {1}}, {942, {1}}, {949, {1}}, {1049, {1}}};
  const auto is_bin = [](int64_t begin, int64_t end, int64_t count) {
    return ::testing::AllOf(::testing::Field(&HistogramBin::begin, begin),
                            ::testing::Field(&HistogramBin::end, end),
                            ::testing::Field(&HistogramBin::groups, count));
  };
  EXPECT_THAT(EstimateSavings(groups, {}).histogram,
              ElementsAre(is_bin(900, 1000, 3), is_bin(1000, 1100, 1)));
  EXPECT_THAT(EstimateSavings(kGroups, {}).histogram, ElementsAre(is_bin(3, 4, 1), is_bin(4, 5, 1)));
}

TEST(Estimate, NothingToComputeHasRatioOne) {
  const Estimate estimate = EstimateSavings(std::vector<Group>{{0, {0, 0}}}, {});
  EXPECT_EQ(estimate.work.token_ratio(), 1.0);
  EXPECT_EQ(estimate.work.attention_ratio(), 1.0);
}

TEST(Estimate, LargeFilesDoNotOverflow) {
  // The pairs of 400 sequences of 2^30 rows: 2^67.6, more than an int64 holds.
  const std::vector<Group> groups(
      40, {.prompt = (int64_t{1} << 30) - 10, .responses = std::vector<int64_t>(10, 1)});
  const Estimate estimate = EstimateSavings(groups, {});
  EXPECT_NEAR(estimate.work.attention_ratio(), 10.0, 1e-6);
  EXPECT_GT(estimate.work.replicated.pairs, 9.3e18);
}

}  // namespace
}  // namespace cli::testing
}  // namespace dualkv
