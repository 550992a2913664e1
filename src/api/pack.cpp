#include "core/pack.h"

#include "api/guard.h"
#include "api/objects.h"

using dualkv::api::Guard;
using dualkv::api::RequirePointer;
using dualkv::api::RequireStruct;

dualkv_status dualkv_pack(const dualkv_pack_params* params, dualkv_batch** batch) {
  return Guard([&] {
    RequireStruct(params, "params");
    RequirePointer(batch, "batch");
    *batch = new dualkv_batch(dualkv::core::Pack(*params));
  });
}

dualkv_status dualkv_pack_padded(const dualkv_pack_padded_params* params, dualkv_batch** batch) {
  return Guard([&] {
    RequireStruct(params, "params");
    RequirePointer(batch, "batch");
    *batch = new dualkv_batch(dualkv::core::PackPadded(*params));
  });
}

void dualkv_batch_destroy(dualkv_batch* batch) { delete batch; }

dualkv_status dualkv_batch_get_view(const dualkv_batch* batch, dualkv_batch_view* view) {
  return Guard([&] {
    RequirePointer(batch, "batch");
    RequireStruct(view, "view");
    const dualkv::core::Batch& packed = batch->batch;
    view->num_groups = static_cast<int64_t>(packed.response_counts.size());
    view->num_responses = static_cast<int64_t>(packed.target_begin.size()) - 1;
    view->num_tokens = static_cast<int64_t>(packed.input_ids.size());
    view->num_targets = static_cast<int64_t>(packed.target_ids.size());
    view->forest = &batch->forest;
    view->input_ids = packed.input_ids.data();
    view->position_ids = packed.position_ids.data();
    view->target_rows = packed.target_rows.data();
    view->target_ids = packed.target_ids.data();
    view->response_counts = packed.response_counts.data();
    view->target_begin = packed.target_begin.data();
    view->source_rows = packed.source_rows.data();
    view->source_positions = packed.source_positions.data();
  });
}
