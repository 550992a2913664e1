// The schedule of a training step: which rank computes which responses, in which micro-batches.
#pragma once

#include <cstdint>
#include <vector>

#include "dualkv/dualkv.h"

namespace dualkv::core {

// W ranks of K micro-batches each; see dualkv_step_schedule_view.
struct StepSchedule {
  int64_t num_ranks = 0;                      // W
  int64_t num_micro_batches = 0;              // K
  std::vector<int64_t> part_begin = {0};      // [W * K + 1]
  std::vector<int64_t> groups;                // [parts]
  std::vector<int64_t> response_begin = {0};  // [parts + 1]
  std::vector<int64_t> responses;             // [responses]
  std::vector<int64_t> tokens;                // [W * K]
  std::vector<double> costs;                  // [W * K]
};

// Throws InvalidArgument if an argument is not as dualkv.h says, or a response does not fit.
StepSchedule MakeStepSchedule(const dualkv_step_schedule_params& params);

}  // namespace dualkv::core
