// The rows that logits are computed for: each row of hidden states with a target, once.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "dualkv/dualkv.h"

namespace dualkv::cpu {

// Several targets may share a row, as the first tokens of all responses share their prompt's last row.
// Distinct rows are numbered by slots in ascending order, and slots are cut into blocks.
class DistinctRows {
 public:
  static constexpr int64_t kNone = -1;

  struct Target {
    int64_t index;  // m: place in rows and targets
    int64_t slot;
    int64_t token;
  };

  DistinctRows(const dualkv_linear_logprob_params& params, int64_t block_slots);

  int64_t size() const { return static_cast<int64_t>(rows_.size()); }
  int64_t blocks() const { return (size() + block_slots_ - 1) / block_slots_; }

  int64_t RowOf(int64_t slot) const { return rows_[slot]; }

  // kNone for a row without targets.
  int64_t SlotOf(int64_t row) const { return slots_[row]; }

  // Slots of a block, and its first.
  int64_t BlockBegin(int64_t block) const { return block * block_slots_; }
  int64_t BlockSize(int64_t block) const;

  // Targets of a block's slots whose token is in [token_begin, token_end), sorted by token, then index.
  std::span<const Target> Targets(int64_t block, int64_t token_begin, int64_t token_end) const;

  // All targets of a block.
  std::span<const Target> Targets(int64_t block) const;

 private:
  int64_t block_slots_;
  std::vector<int64_t> rows_;          // [slots]
  std::vector<int64_t> slots_;         // [T]
  std::vector<Target> targets_;        // those that are not ignored, sorted by block, token, index
  std::vector<int64_t> target_begin_;  // [blocks + 1]
};

}  // namespace dualkv::cpu
