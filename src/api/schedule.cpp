#include "core/schedule.h"

#include "api/guard.h"
#include "api/objects.h"

using dualkv::api::Guard;
using dualkv::api::RequirePointer;
using dualkv::api::RequireStruct;

dualkv_status dualkv_step_schedule_create(const dualkv_step_schedule_params* params,
                                          dualkv_step_schedule** schedule) {
  return Guard([&] {
    RequireStruct(params, "params");
    RequirePointer(schedule, "schedule");
    *schedule = new dualkv_step_schedule{dualkv::core::MakeStepSchedule(*params)};
  });
}

void dualkv_step_schedule_destroy(dualkv_step_schedule* schedule) { delete schedule; }

dualkv_status dualkv_step_schedule_get_view(const dualkv_step_schedule* schedule,
                                            dualkv_step_schedule_view* view) {
  return Guard([&] {
    RequirePointer(schedule, "schedule");
    RequireStruct(view, "view");
    const dualkv::core::StepSchedule& made = schedule->schedule;
    view->num_ranks = made.num_ranks;
    view->num_micro_batches = made.num_micro_batches;
    view->num_parts = static_cast<int64_t>(made.groups.size());
    view->num_responses = static_cast<int64_t>(made.responses.size());
    view->part_begin = made.part_begin.data();
    view->groups = made.groups.data();
    view->response_begin = made.response_begin.data();
    view->responses = made.responses.data();
    view->tokens = made.tokens.data();
    view->costs = made.costs.data();
  });
}
