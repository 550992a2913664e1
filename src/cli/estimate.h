// What sharing prompts saves, from the lengths of prompts and responses alone.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "dualkv/dualkv.hpp"

namespace dualkv::cli {

// What a model computes for a batch.
struct Work {
  int64_t tokens = 0;
  double pairs = 0;  // (row, key) pairs that attention computes; those of a large file may pass 2^63

  Work& operator+=(const Work& other) {
    tokens += other.tokens;
    pairs += other.pairs;
    return *this;
  }
};

// The same responses, each after a copy of its prompt, and with shared prompts.
struct Comparison {
  Work replicated, packed;

  double token_ratio() const;
  double attention_ratio() const;
};

// Groups whose prompts have at least `begin` and less than `end` tokens.
struct HistogramBin {
  int64_t begin, end, groups;
};

struct MicroBatches {
  int64_t count = 0;
  Comparison work;
};

struct Estimate {
  int64_t groups = 0, responses = 0;
  Comparison work;  // the whole file as one batch
  std::vector<HistogramBin> histogram;
  std::optional<MicroBatches> micro_batches;
};

struct EstimateOptions {
  std::optional<int64_t> window_left = std::nullopt;       // earlier positions that a row sees besides itself
  std::optional<int64_t> micro_batch_size = std::nullopt;  // responses, at least 1
};

Estimate EstimateSavings(std::span<const Group> groups, const EstimateOptions& options);

// Lengths in tokens of lengths in bytes, rounded up. bytes_per_token is at least 1.
std::vector<Group> TokensOfBytes(std::span<const Group> groups, double bytes_per_token);

// Micro-batches of at most `size` responses: whole groups, as many as fit; a larger group is split, and each
// part has the prompt.
std::vector<std::vector<Group>> SplitIntoMicroBatches(std::span<const Group> groups, int64_t size);

}  // namespace dualkv::cli
