// Any bytes as a rollout file: read and estimated, or refused with a place, and nothing else.
#include <algorithm>
#include <cstdlib>
#include <sstream>

#include "cli/estimate.h"
#include "cli/rollout_reader.h"

namespace {

void Check(bool condition) {
  if (!condition) {
    std::abort();
  }
}

void CheckEstimate(std::span<const dualkv::Group> groups) {
  const auto estimate = dualkv::cli::EstimateSavings(groups, {.window_left = 5, .micro_batch_size = 3});
  const dualkv::cli::Comparison& whole = estimate.work;
  const dualkv::cli::Comparison& split = estimate.micro_batches->work;
  Check(whole.replicated.tokens == split.replicated.tokens &&
        whole.replicated.pairs == split.replicated.pairs);
  Check(whole.packed.tokens <= split.packed.tokens && split.packed.tokens <= split.replicated.tokens);
  Check(whole.packed.pairs <= split.packed.pairs && split.packed.pairs <= split.replicated.pairs);
  Check(3 * estimate.micro_batches->count >= estimate.responses);

  int64_t counted = 0;
  for (const dualkv::cli::HistogramBin& bin : estimate.histogram) {
    counted += bin.groups;
  }
  Check(counted == estimate.groups);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::istringstream in(std::string(data, data + size));
  try {
    const auto rollouts = dualkv::cli::ReadRollouts(in, "FILE");
    CheckEstimate(rollouts.groups);
    CheckEstimate(dualkv::cli::TokensOfBytes(rollouts.groups, 3.5));
  } catch (const dualkv::cli::RolloutError& error) {
    Check(std::string_view(error.what()).starts_with("FILE:"));
  }
  return 0;
}
