#include "core/pack.h"

#include <algorithm>
#include <numeric>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>

#include "core/arguments.h"
#include "core/error.h"

namespace dualkv::core {
namespace {

// Requires token ids from tokens[begin] on, those of the list at `place`, to be ids.
template <class... Place>
void RequireTokens(std::span<const int64_t> tokens, int64_t begin, int64_t count, const char* name,
                   const Place&... place) {
  for (int64_t i = 0; i < count; ++i) {
    Require(tokens[begin + i] >= 0, name, "[", begin + i, "] (", place..., ", token ", i,
            ") must be >= 0, got ", tokens[begin + i]);
  }
}

void Append(std::vector<int64_t>& to, std::span<const int64_t> values) {
  to.insert(to.end(), values.begin(), values.end());
}

// Makes room for the forest's rows and for `num_targets` targets, and fills in the positions.
Batch MakeBatch(Forest forest, std::span<const int64_t> response_counts, int64_t num_targets) {
  Batch batch;
  batch.forest = std::move(forest);
  batch.input_ids.reserve(batch.forest.total_tokens());
  batch.position_ids.resize(batch.forest.total_tokens());
  batch.forest.WritePositions(batch.position_ids.data());
  batch.target_rows.reserve(num_targets);
  batch.target_ids.reserve(num_targets);
  batch.response_counts.assign(response_counts.begin(), response_counts.end());
  batch.target_begin.reserve(batch.forest.segments().size() - response_counts.size() + 1);
  batch.target_begin.push_back(0);
  return batch;
}

// A row of a padded batch: columns [0, split) are its prompt, [split, S) its response.
struct PaddedRow {
  std::span<const int64_t> ids;             // [S]
  std::span<const uint8_t> attention_mask;  // [S]
  int64_t split;
  int64_t prompt_length;    // tokens, padding not counted
  int64_t response_length;  // likewise

  // The first column after `column` that is no padding, S if there is none.
  int64_t NextToken(int64_t column) const {
    const auto columns = static_cast<int64_t>(attention_mask.size());
    do {
      ++column;
    } while (column < columns && attention_mask[column] == 0);
    return column;
  }
};

// Finds row b and checks its masks and tokens. What stands in padding does not matter.
PaddedRow ReadRow(const dualkv_pack_padded_params& params, int64_t b) {
  const int64_t columns = params.num_columns;
  const int64_t response_columns = params.response_columns;
  const std::span ids(params.input_ids + b * columns, columns);
  const std::span attention_mask(params.attention_mask + b * columns, columns);
  const std::span response_mask(params.response_mask + b * response_columns, response_columns);
  for (int64_t c = 0; c < columns; ++c) {
    Require(attention_mask[c] <= 1, "attention_mask[", b, "][", c, "] must be 0 or 1, got ",
            int{attention_mask[c]});
    Require(ids[c] >= 0 || attention_mask[c] == 0, "input_ids[", b, "][", c, "] must be >= 0, got ", ids[c]);
  }
  for (int64_t c = 0; c < response_columns; ++c) {
    const int64_t column = columns - response_columns + c;
    Require(response_mask[c] <= 1, "response_mask[", b, "][", c, "] must be 0 or 1, got ",
            int{response_mask[c]});
    Require(response_mask[c] <= attention_mask[column], "response_mask[", b, "][", c,
            "] must be 0 on padding, got 1 where attention_mask[", b, "][", column, "] is 0");
  }

  int64_t split = columns - response_columns;
  if (split == 0) {
    split = std::ranges::find(response_mask, 1) - response_mask.begin();
  }
  return {.ids = ids,
          .attention_mask = attention_mask,
          .split = split,
          .prompt_length = std::ranges::count(attention_mask.first(split), 1),
          .response_length = std::ranges::count(attention_mask.subspan(split), 1)};
}

// Requires that row b of a group has the same prompt as the group's first row.
void RequireSamePrompt(std::span<const PaddedRow> rows, int64_t b, int64_t first, int64_t group_id) {
  const PaddedRow& row = rows[b];
  const PaddedRow& other = rows[first];
  auto refuse = [&](const auto&... difference) {
    std::string advice;
    for (const int64_t r : {first, b}) {
      if (rows[r].split == static_cast<int64_t>(rows[r].ids.size())) {
        advice =
            Concat(". Row ", r, " has no targets in a response_mask of all columns, and so is all prompt: ",
                   "a mask of the last columns alone says where responses start");
      }
    }
    throw InvalidArgument(
        Concat("rows of group_ids ", group_id, " must have the same prompt, but ", difference..., advice));
  };
  if (row.prompt_length != other.prompt_length) {
    refuse("row ", b, " has a prompt of ", row.prompt_length, " tokens and row ", first, " one of ",
           other.prompt_length);
  }
  int64_t column = -1, other_column = -1;
  for (int64_t position = 0; position < row.prompt_length; ++position) {
    column = row.NextToken(column);
    other_column = other.NextToken(other_column);
    if (row.ids[column] != other.ids[other_column]) {
      refuse("at position ", position, " row ", b, " has token ", row.ids[column], " and row ", first,
             " has ", other.ids[other_column]);
    }
  }
}

// The groups of a padded batch, in the order in which their ids first appear.
struct Groups {
  std::vector<int64_t> first_rows;        // [G]
  std::vector<int64_t> prompt_lengths;    // [G]
  std::vector<int64_t> response_counts;   // [G]
  std::vector<int64_t> source_rows;       // [B] group by group, in the caller's order within each
  std::vector<int64_t> response_lengths;  // [B] in the order of source_rows
};

Groups GroupRows(std::span<const PaddedRow> rows, std::span<const int64_t> group_ids) {
  Groups groups;
  std::unordered_map<int64_t, int64_t> group_of_id;
  std::vector<int64_t> group_of_row;  // [B]
  group_of_row.reserve(rows.size());
  for (int64_t b = 0; b < static_cast<int64_t>(rows.size()); ++b) {
    const PaddedRow& row = rows[b];
    Require(row.prompt_length > 0 || row.response_length == 0, "row ", b, " of group_ids ", group_ids[b],
            " has no prompt tokens, but its response has ", row.response_length,
            ": nothing predicts the first");
    const auto next_group = static_cast<int64_t>(groups.first_rows.size());
    const auto [entry, is_new] = group_of_id.try_emplace(group_ids[b], next_group);
    const int64_t g = entry->second;
    if (is_new) {
      groups.first_rows.push_back(b);
      groups.prompt_lengths.push_back(row.prompt_length);
      groups.response_counts.push_back(1);
    } else {
      RequireSamePrompt(rows, b, groups.first_rows[g], group_ids[b]);
      ++groups.response_counts[g];
    }
    group_of_row.push_back(g);
  }
  groups.source_rows.resize(rows.size());
  std::iota(groups.source_rows.begin(), groups.source_rows.end(), 0);
  std::ranges::stable_sort(groups.source_rows, {}, [&](int64_t b) { return group_of_row[b]; });
  groups.response_lengths.reserve(rows.size());
  for (const int64_t b : groups.source_rows) {
    groups.response_lengths.push_back(rows[b].response_length);
  }
  return groups;
}

}  // namespace

Batch Pack(const dualkv_pack_params& params) {
  Require(params.num_groups >= 0 && params.num_groups <= kMaxRows, "num_groups must be 0 to ", kMaxRows,
          ", got ", params.num_groups);
  const auto prompt_lengths = Values(params.prompt_lengths, params.num_groups, "prompt_lengths");
  const auto response_counts = Values(params.response_counts, params.num_groups, "response_counts");
  int64_t segments = params.num_groups;
  const int64_t num_responses = AddUp(response_counts, "response_counts", "groups and responses", segments);
  const auto response_lengths = Values(params.response_lengths, num_responses, "response_lengths");
  int64_t rows = 0;
  const int64_t prompt_rows = AddUp(prompt_lengths, "prompt_lengths", "tokens", rows);
  const int64_t response_rows = AddUp(response_lengths, "response_lengths", "tokens", rows);
  auto prompt_tokens = Values(params.prompt_tokens, prompt_rows, "prompt_tokens");
  auto response_tokens = Values(params.response_tokens, response_rows, "response_tokens");
  const int64_t* length = response_lengths.data();
  int64_t prompt_begin = 0, response_begin = 0;
  for (int64_t g = 0; g < params.num_groups; ++g) {
    RequireTokens(prompt_tokens, prompt_begin, prompt_lengths[g], "prompt_tokens", "group ", g);
    prompt_begin += prompt_lengths[g];
    for (int64_t n = 0; n < response_counts[g]; ++n, ++length) {
      RequireTokens(response_tokens, response_begin, *length, "response_tokens", "group ", g, ", response ",
                    n);
      response_begin += *length;
      Require(prompt_lengths[g] > 0 || *length == 0, "group ", g, " has no prompt tokens, but its response ",
              n, " has ", *length, ": nothing predicts the first");
    }
  }

  Batch batch = MakeBatch(Forest::FromGroups(prompt_lengths, response_counts, response_lengths),
                          response_counts, response_rows);
  Append(batch.target_ids, response_tokens);
  length = response_lengths.data();
  for (int64_t g = 0; g < params.num_groups; ++g) {
    Append(batch.input_ids, prompt_tokens.first(prompt_lengths[g]));
    prompt_tokens = prompt_tokens.subspan(prompt_lengths[g]);
    const auto last_prompt_row = static_cast<int64_t>(batch.input_ids.size()) - 1;
    for (int64_t n = 0; n < response_counts[g]; ++n, ++length) {
      const auto begin = static_cast<int64_t>(batch.input_ids.size());
      for (int64_t r = 0; r < *length; ++r) {
        batch.target_rows.push_back(r == 0 ? last_prompt_row : begin + r - 1);
      }
      Append(batch.input_ids, response_tokens.first(*length));
      response_tokens = response_tokens.subspan(*length);
      batch.target_begin.push_back(static_cast<int64_t>(batch.target_rows.size()));
    }
  }
  return batch;
}

Batch PackPadded(const dualkv_pack_padded_params& params) {
  const int64_t num_rows = params.num_rows;
  const int64_t columns = params.num_columns;
  const int64_t response_columns = params.response_columns;
  Require(num_rows >= 0 && num_rows <= kMaxRows, "num_rows must be 0 to ", kMaxRows, ", got ", num_rows);
  Require(columns >= 0 && columns <= kMaxRows, "num_columns must be 0 to ", kMaxRows, ", got ", columns);
  const int64_t least = num_rows > 0 ? 1 : 0;  // a batch of nothing may have no columns either
  Require(response_columns >= least && response_columns <= columns, "response_columns must be ", least,
          " to num_columns = ", columns, ", got ", response_columns);
  Values(params.input_ids, num_rows * columns, "input_ids");
  Values(params.attention_mask, num_rows * columns, "attention_mask");
  Values(params.response_mask, num_rows * response_columns, "response_mask");
  const auto group_ids = Values(params.group_ids, num_rows, "group_ids");

  std::vector<PaddedRow> rows;
  rows.reserve(num_rows);
  for (int64_t b = 0; b < num_rows; ++b) {
    rows.push_back(ReadRow(params, b));
  }
  Groups groups = GroupRows(rows, group_ids);
  const uint8_t* response_mask_end = params.response_mask + num_rows * response_columns;
  const int64_t num_targets = std::count(params.response_mask, response_mask_end, 1);

  // The forest refuses more than kMaxRows packed rows; B * S may well exceed that.
  Batch batch =
      MakeBatch(Forest::FromGroups(groups.prompt_lengths, groups.response_counts, groups.response_lengths),
                groups.response_counts, num_targets);
  batch.source_rows = std::move(groups.source_rows);
  batch.source_positions.reserve(num_targets);
  const int64_t* source_row = batch.source_rows.data();
  for (size_t g = 0; g < groups.first_rows.size(); ++g) {
    const PaddedRow& first = rows[groups.first_rows[g]];
    for (int64_t c = first.NextToken(-1); c < first.split; c = first.NextToken(c)) {
      batch.input_ids.push_back(first.ids[c]);
    }
    const auto last_prompt_row = static_cast<int64_t>(batch.input_ids.size()) - 1;
    for (int64_t n = 0; n < groups.response_counts[g]; ++n, ++source_row) {
      const PaddedRow& row = rows[*source_row];
      int64_t previous = last_prompt_row;
      for (int64_t c = row.NextToken(row.split - 1); c < columns; c = row.NextToken(c)) {
        const int64_t source_position = *source_row * response_columns + c - (columns - response_columns);
        if (params.response_mask[source_position]) {
          batch.target_rows.push_back(previous);
          batch.target_ids.push_back(row.ids[c]);
          batch.source_positions.push_back(source_position);
        }
        previous = static_cast<int64_t>(batch.input_ids.size());
        batch.input_ids.push_back(row.ids[c]);
      }
      batch.target_begin.push_back(static_cast<int64_t>(batch.target_rows.size()));
    }
  }
  return batch;
}

}  // namespace dualkv::core
