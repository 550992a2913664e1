// The opaque objects of the C interface.
#pragma once

#include "core/forest.h"
#include "core/plan.h"

struct dualkv_forest {
  dualkv::core::Forest forest;
};

struct dualkv_plan {
  dualkv::core::Plan plan;
};
