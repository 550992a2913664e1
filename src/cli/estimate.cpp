#include "estimate.h"

#include <algorithm>
#include <cmath>

namespace dualkv::cli {
namespace {

constexpr int64_t kMaxBins = 20;  // from 0 to the longest prompt

Work WorkOf(const Group& group, std::optional<int64_t> window_left) {
  const auto forest = Forest::FromGroups({group});
  return {.tokens = forest.total_tokens(), .pairs = static_cast<double>(forest.VisiblePairs(window_left))};
}

Comparison Compare(std::span<const Group> groups, std::optional<int64_t> window_left) {
  Comparison work;
  for (const Group& group : groups) {
    work.packed += WorkOf(group, window_left);
    for (const int64_t response : group.responses) {
      work.replicated += WorkOf({.prompt = group.prompt, .responses = {response}}, window_left);
    }
  }
  return work;
}

double Ratio(double replicated, double packed) { return packed > 0 ? replicated / packed : 1.0; }

// The smallest of 1, 2, 5, 10, 20, 50, .. that needs no more than kMaxBins.
int64_t BinWidth(int64_t longest) {
  for (int64_t scale = 1;; scale *= 10) {
    for (const int64_t width : {scale, 2 * scale, 5 * scale}) {
      if (longest / width < kMaxBins) {
        return width;
      }
    }
  }
}

std::vector<HistogramBin> HistogramOfPrompts(std::span<const Group> groups) {
  if (groups.empty()) {
    return {};
  }
  const auto [shortest, longest] = std::ranges::minmax(groups, {}, &Group::prompt);
  const int64_t width = BinWidth(longest.prompt);
  const int64_t first = shortest.prompt / width;
  std::vector<HistogramBin> bins;
  for (int64_t bin = first; bin <= longest.prompt / width; ++bin) {
    bins.push_back({.begin = bin * width, .end = (bin + 1) * width, .groups = 0});
  }
  for (const Group& group : groups) {
    ++bins[group.prompt / width - first].groups;
  }
  return bins;
}

}  // namespace

double Comparison::token_ratio() const {
  return Ratio(static_cast<double>(replicated.tokens), static_cast<double>(packed.tokens));
}

double Comparison::attention_ratio() const { return Ratio(replicated.pairs, packed.pairs); }

Estimate EstimateSavings(std::span<const Group> groups, const EstimateOptions& options) {
  Estimate estimate;
  estimate.groups = static_cast<int64_t>(groups.size());
  for (const Group& group : groups) {
    estimate.responses += static_cast<int64_t>(group.responses.size());
  }
  estimate.work = Compare(groups, options.window_left);
  estimate.histogram = HistogramOfPrompts(groups);
  if (options.micro_batch_size) {
    MicroBatches& micro_batches = estimate.micro_batches.emplace();
    for (const auto& parts : SplitIntoMicroBatches(groups, *options.micro_batch_size)) {
      const Comparison work = Compare(parts, options.window_left);
      micro_batches.work.replicated += work.replicated;
      micro_batches.work.packed += work.packed;
      ++micro_batches.count;
    }
  }
  return estimate;
}

std::vector<Group> TokensOfBytes(std::span<const Group> groups, double bytes_per_token) {
  const auto tokens = [bytes_per_token](int64_t bytes) {
    return static_cast<int64_t>(std::ceil(static_cast<double>(bytes) / bytes_per_token));
  };
  std::vector<Group> result(groups.begin(), groups.end());
  for (Group& group : result) {
    group.prompt = tokens(group.prompt);
    std::ranges::transform(group.responses, group.responses.begin(), tokens);
  }
  return result;
}

std::vector<std::vector<Group>> SplitIntoMicroBatches(std::span<const Group> groups, int64_t size) {
  std::vector<std::vector<Group>> micro_batches;
  int64_t room = 0;  // for responses, in the last micro-batch
  for (const Group& group : groups) {
    std::span<const int64_t> left = group.responses;
    while (!left.empty()) {
      const auto count = std::min(size, static_cast<int64_t>(left.size()));
      if (count > room) {
        micro_batches.emplace_back();
        room = size;
      }
      const auto part = left.first(count);
      micro_batches.back().push_back({.prompt = group.prompt, .responses = {part.begin(), part.end()}});
      room -= count;
      left = left.subspan(count);
    }
  }
  return micro_batches;
}

}  // namespace dualkv::cli
