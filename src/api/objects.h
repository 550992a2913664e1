// The opaque objects of the C interface.
#pragma once

#include <utility>

#include "core/forest.h"
#include "core/pack.h"
#include "core/plan.h"
#include "core/schedule.h"

struct dualkv_forest {
  dualkv::core::Forest forest;
};

struct dualkv_plan {
  dualkv::core::Plan plan;
};

struct dualkv_batch {
  explicit dualkv_batch(dualkv::core::Batch packed) : batch(std::move(packed)), forest{batch.forest} {}

  dualkv::core::Batch batch;
  dualkv_forest forest;  // a copy of the batch's, for dualkv_batch_view
};

struct dualkv_step_schedule {
  dualkv::core::StepSchedule schedule;
};
