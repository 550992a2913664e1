// Every refusal of the packing functions, with its whole message.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "dualkv/dualkv.h"
#include "pack_input.h"

namespace dualkv::testing {
namespace {

template <class Params>
void ExpectRefused(const Params& params, const std::string& message) {
  dualkv_batch* batch = nullptr;
  EXPECT_EQ(Call(params, &batch), DUALKV_INVALID_ARGUMENT);
  EXPECT_EQ(batch, nullptr);
  EXPECT_EQ(dualkv_last_error(), message);
}

const std::vector<Group> kTwoGroups = {{{1, 2, 3}, {{4, 5}, {6}}}, {{7}, {{8}}}};

// Two rows of one group: a prompt of 3 tokens and a response of 2; R = 2.
PaddedInput TwoRows() {
  const std::vector<Cell> row = {{1}, {2}, {3}, {4, true, true}, {5, true, true}};
  return PaddedInput({row, row}, {9, 9}, 2);
}

TEST(PackRefuses, NegativeLengthsAndCounts) {
  PackInput input(kTwoGroups);
  input.prompt_lengths[1] = -1;
  ExpectRefused(input.Params(), "prompt_lengths[1] must be >= 0, got -1");
  input = PackInput(kTwoGroups);
  input.response_counts[0] = -2;
  ExpectRefused(input.Params(), "response_counts[0] must be >= 0, got -2");
  input = PackInput(kTwoGroups);
  input.response_lengths[2] = -3;
  ExpectRefused(input.Params(), "response_lengths[2] must be >= 0, got -3");
}

TEST(PackRefuses, GroupCountOutOfRange) {
  dualkv_pack_params params = PackInput(kTwoGroups).Params();
  params.num_groups = -1;
  ExpectRefused(params, "num_groups must be 0 to 1073741824, got -1");
  params.num_groups = 1073741825;
  ExpectRefused(params, "num_groups must be 0 to 1073741824, got 1073741825");
}

TEST(PackRefuses, TotalsBeyondTheLimit) {
  PackInput input(kTwoGroups);
  input.response_lengths[1] = 1073741819;
  ExpectRefused(input.Params(),
                "at most 1073741824 tokens are supported, got 6 + 1073741819 at response_lengths[1]");
  input = PackInput(kTwoGroups);
  input.prompt_lengths[1] = INT64_MAX;
  ExpectRefused(input.Params(),
                "at most 1073741824 tokens are supported, got 3 + 9223372036854775807 at prompt_lengths[1]");
  input = PackInput(kTwoGroups);
  input.response_counts[1] = 1073741823;
  ExpectRefused(
      input.Params(),
      "at most 1073741824 groups and responses are supported, got 4 + 1073741823 at response_counts[1]");
}

TEST(PackRefuses, NegativeTokens) {
  PackInput input(kTwoGroups);
  input.prompt_tokens[3] = -7;
  ExpectRefused(input.Params(), "prompt_tokens[3] (group 1, token 0) must be >= 0, got -7");
  input = PackInput(kTwoGroups);
  input.response_tokens[2] = -100;
  ExpectRefused(input.Params(), "response_tokens[2] (group 0, response 1, token 0) must be >= 0, got -100");
}

TEST(PackRefuses, ResponseWithoutPrompt) {
  ExpectRefused(PackInput({{{1}, {{2}}}, {{}, {{}, {3, 4}}}}).Params(),
                "group 1 has no prompt tokens, but its response 1 has 2: nothing predicts the first");
}

TEST(PackRefuses, NullArrays) {
  const PackInput input(kTwoGroups);
  dualkv_pack_params params = input.Params();
  params.prompt_lengths = nullptr;
  ExpectRefused(params, "prompt_lengths must not be NULL for 2 values");
  params = input.Params();
  params.response_counts = nullptr;
  ExpectRefused(params, "response_counts must not be NULL for 2 values");
  params = input.Params();
  params.response_lengths = nullptr;
  ExpectRefused(params, "response_lengths must not be NULL for 3 values");
  params = input.Params();
  params.prompt_tokens = nullptr;
  ExpectRefused(params, "prompt_tokens must not be NULL for 4 values");
  params = input.Params();
  params.response_tokens = nullptr;
  ExpectRefused(params, "response_tokens must not be NULL for 4 values");
}

TEST(PackRefuses, NullAndStaleStructs) {
  const PackInput input(kTwoGroups);
  dualkv_batch* batch = nullptr;
  EXPECT_EQ(dualkv_pack(nullptr, &batch), DUALKV_INVALID_ARGUMENT);
  EXPECT_STREQ(dualkv_last_error(), "params must not be NULL");
  EXPECT_EQ(Call(input.Params(), nullptr), DUALKV_INVALID_ARGUMENT);
  EXPECT_STREQ(dualkv_last_error(), "batch must not be NULL");
  EXPECT_EQ(Call(TwoRows().Params(), nullptr), DUALKV_INVALID_ARGUMENT);
  EXPECT_STREQ(dualkv_last_error(), "batch must not be NULL");
  dualkv_pack_params params = input.Params();
  params.version = 99;
  ExpectRefused(params, "params.version must be 1, got 99");
  dualkv_pack_padded_params padded = TwoRows().Params();
  padded.size = 8;
  ExpectRefused(padded, "params.size must be " + std::to_string(sizeof(padded)) + ", got 8");
  dualkv_batch_view view{};
  EXPECT_EQ(dualkv_batch_get_view(nullptr, &view), DUALKV_INVALID_ARGUMENT);
  EXPECT_STREQ(dualkv_last_error(), "batch must not be NULL");
  dualkv_batch_destroy(nullptr);
}

TEST(PackPaddedRefuses, ShapesOutOfRange) {
  const PaddedInput input = TwoRows();
  dualkv_pack_padded_params params = input.Params();
  params.num_rows = -1;
  ExpectRefused(params, "num_rows must be 0 to 1073741824, got -1");
  params = input.Params();
  params.num_columns = 1073741825;
  ExpectRefused(params, "num_columns must be 0 to 1073741824, got 1073741825");
  params = input.Params();
  params.response_columns = 0;
  ExpectRefused(params, "response_columns must be 1 to num_columns = 5, got 0");
  params.response_columns = 6;
  ExpectRefused(params, "response_columns must be 1 to num_columns = 5, got 6");
}

TEST(PackPaddedRefuses, NullArrays) {
  const PaddedInput input = TwoRows();
  dualkv_pack_padded_params params = input.Params();
  params.input_ids = nullptr;
  ExpectRefused(params, "input_ids must not be NULL for 10 values");
  params = input.Params();
  params.attention_mask = nullptr;
  ExpectRefused(params, "attention_mask must not be NULL for 10 values");
  params = input.Params();
  params.response_mask = nullptr;
  ExpectRefused(params, "response_mask must not be NULL for 4 values");
  params = input.Params();
  params.group_ids = nullptr;
  ExpectRefused(params, "group_ids must not be NULL for 2 values");
}

TEST(PackPaddedRefuses, MaskValuesOtherThanZeroAndOne) {
  PaddedInput input = TwoRows();
  input.attention_mask[5 + 2] = 2;
  ExpectRefused(input.Params(), "attention_mask[1][2] must be 0 or 1, got 2");
  input = TwoRows();
  input.response_mask[2 + 1] = 255;
  ExpectRefused(input.Params(), "response_mask[1][1] must be 0 or 1, got 255");
}

TEST(PackPaddedRefuses, ScoredPadding) {
  PaddedInput input = TwoRows();
  input.attention_mask[5 + 4] = 0;
  ExpectRefused(input.Params(),
                "response_mask[1][1] must be 0 on padding, got 1 where attention_mask[1][4] is 0");
}

TEST(PackPaddedRefuses, NegativeTokens) {
  PaddedInput input = TwoRows();
  input.input_ids[5 + 1] = -4;
  ExpectRefused(input.Params(), "input_ids[1][1] must be >= 0, got -4");
}

TEST(PackPaddedRefuses, PromptsThatDiffer) {
  PaddedInput input = TwoRows();
  input.input_ids[5 + 2] = 30;
  ExpectRefused(
      input.Params(),
      "rows of group_ids 9 must have the same prompt, but at position 2 row 1 has token 30 and row 0 has 3");
  // Positions count tokens, not columns: row 1 loses its first.
  input = TwoRows();
  input.attention_mask[0] = input.attention_mask[5 + 1] = 0;
  ExpectRefused(
      input.Params(),
      "rows of group_ids 9 must have the same prompt, but at position 0 row 1 has token 1 and row 0 has 2");
  input = TwoRows();
  input.attention_mask[5] = 0;
  ExpectRefused(
      input.Params(),
      "rows of group_ids 9 must have the same prompt, but row 1 has a prompt of 2 tokens and row 0 one of 3");
}

TEST(PackPaddedRefuses, ARowThatIsAllPromptBesideOneThatIsNot) {
  PaddedInput input = TwoRows();
  input.response_columns = 5;
  input.response_mask = {0, 0, 0, 1, 1, 0, 0, 0, 0, 0};
  ExpectRefused(input.Params(),
                "rows of group_ids 9 must have the same prompt, but row 1 has a prompt of 5 tokens and row 0 "
                "one of 3. Row 1 has no targets in a response_mask of all columns, and so is all prompt: a "
                "mask of the last columns alone says where responses start");
}

TEST(PackPaddedRefuses, ResponseWithoutPrompt) {
  PaddedInput input = TwoRows();
  input.group_ids[1] = 8;
  std::fill_n(input.attention_mask.begin() + 5, 3, 0);
  ExpectRefused(
      input.Params(),
      "row 1 of group_ids 8 has no prompt tokens, but its response has 2: nothing predicts the first");
}

}  // namespace
}  // namespace dualkv::testing
