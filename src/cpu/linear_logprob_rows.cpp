#include "cpu/linear_logprob_rows.h"

#include <algorithm>
#include <tuple>

namespace dualkv::cpu {

DistinctRows::DistinctRows(const dualkv_linear_logprob_params& params, int64_t block_slots)
    : block_slots_(block_slots), slots_(params.hidden_rows, kNone) {
  int64_t num_targets = 0;
  for (int64_t m = 0; m < params.num_targets; ++m) {
    if (params.targets[m] != DUALKV_IGNORE_TARGET) {
      slots_[params.rows[m]] = 0;
      ++num_targets;
    }
  }
  for (int64_t row = 0; row < params.hidden_rows; ++row) {
    if (slots_[row] != kNone) {
      slots_[row] = size();
      rows_.push_back(row);
    }
  }

  targets_.reserve(num_targets);
  for (int64_t m = 0; m < params.num_targets; ++m) {
    if (params.targets[m] != DUALKV_IGNORE_TARGET) {
      targets_.push_back({m, slots_[params.rows[m]], params.targets[m]});
    }
  }
  const auto key = [&](const Target& t) { return std::tuple(t.slot / block_slots_, t.token, t.index); };
  std::sort(targets_.begin(), targets_.end(),
            [&](const Target& a, const Target& b) { return key(a) < key(b); });

  target_begin_.assign(blocks() + 1, 0);
  for (const Target& target : targets_) {
    ++target_begin_[target.slot / block_slots_ + 1];
  }
  for (int64_t block = 0; block < blocks(); ++block) {
    target_begin_[block + 1] += target_begin_[block];
  }
}

int64_t DistinctRows::BlockSize(int64_t block) const {
  return std::min(block_slots_, size() - BlockBegin(block));
}

std::span<const DistinctRows::Target> DistinctRows::Targets(int64_t block) const {
  return std::span(targets_).subspan(target_begin_[block], target_begin_[block + 1] - target_begin_[block]);
}

std::span<const DistinctRows::Target> DistinctRows::Targets(int64_t block, int64_t token_begin,
                                                            int64_t token_end) const {
  const auto all = Targets(block);
  const auto before = [](const Target& target, int64_t token) { return target.token < token; };
  const auto begin = std::lower_bound(all.begin(), all.end(), token_begin, before);
  const auto end = std::lower_bound(begin, all.end(), token_end, before);
  return {begin, end};
}

}  // namespace dualkv::cpu
