// Inputs for the packing functions, built from groups and rows as a test writes them.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "dualkv/dualkv.h"

namespace dualkv::testing {

using Ints = std::vector<int64_t>;

struct Group {
  Ints prompt;
  std::vector<Ints> responses;
};

// The arrays behind dualkv_pack_params. The lengths are taken from the tokens; tests may spoil them.
struct PackInput {
  explicit PackInput(const std::vector<Group>& groups = {}) {
    for (const Group& group : groups) {
      prompt_lengths.push_back(static_cast<int64_t>(group.prompt.size()));
      prompt_tokens.insert(prompt_tokens.end(), group.prompt.begin(), group.prompt.end());
      response_counts.push_back(static_cast<int64_t>(group.responses.size()));
      for (const Ints& response : group.responses) {
        response_lengths.push_back(static_cast<int64_t>(response.size()));
        response_tokens.insert(response_tokens.end(), response.begin(), response.end());
      }
    }
  }

  dualkv_pack_params Params() const {
    return {.size = sizeof(dualkv_pack_params),
            .version = DUALKV_ABI_VERSION,
            .num_groups = static_cast<int64_t>(prompt_lengths.size()),
            .prompt_lengths = prompt_lengths.data(),
            .response_counts = response_counts.data(),
            .response_lengths = response_lengths.data(),
            .prompt_tokens = prompt_tokens.data(),
            .response_tokens = response_tokens.data()};
  }

  Ints prompt_lengths, response_counts, response_lengths, prompt_tokens, response_tokens;
};

// A token of a padded row, or padding (attention_mask 0).
struct Cell {
  int64_t id;
  bool attended = true;
  bool scored = false;
};

// The arrays behind dualkv_pack_padded_params: rows of S cells, response_mask of the last R.
struct PaddedInput {
  PaddedInput(const std::vector<std::vector<Cell>>& rows, Ints ids, int64_t response_columns)
      : num_columns(rows.empty() ? 0 : static_cast<int64_t>(rows[0].size())),
        response_columns(response_columns),
        group_ids(std::move(ids)) {
    for (const std::vector<Cell>& row : rows) {
      EXPECT_EQ(row.size(), static_cast<size_t>(num_columns)) << "the test's own rows must be equally long";
      for (int64_t c = 0; c < num_columns; ++c) {
        input_ids.push_back(row[c].id);
        attention_mask.push_back(row[c].attended);
        if (c >= num_columns - response_columns) {
          response_mask.push_back(row[c].scored);
        }
      }
    }
  }

  dualkv_pack_padded_params Params() const {
    return {.size = sizeof(dualkv_pack_padded_params),
            .version = DUALKV_ABI_VERSION,
            .num_rows = static_cast<int64_t>(group_ids.size()),
            .num_columns = num_columns,
            .response_columns = response_columns,
            .input_ids = input_ids.data(),
            .attention_mask = attention_mask.data(),
            .response_mask = response_mask.data(),
            .group_ids = group_ids.data()};
  }

  int64_t num_columns, response_columns;
  Ints group_ids, input_ids;
  std::vector<uint8_t> attention_mask, response_mask;
};

inline dualkv_status Call(const dualkv_pack_params& params, dualkv_batch** batch) {
  return dualkv_pack(&params, batch);
}
inline dualkv_status Call(const dualkv_pack_padded_params& params, dualkv_batch** batch) {
  return dualkv_pack_padded(&params, batch);
}

}  // namespace dualkv::testing
