#include "core/plan.h"

#include "api/guard.h"
#include "api/objects.h"
#include "core/plan_image.h"

using dualkv::api::Guard;
using dualkv::api::RequirePointer;
using dualkv::api::RequireStruct;
using dualkv::core::Require;

namespace {

constexpr int32_t kMaxParts = 65536;

int32_t TileSize(int32_t value, int32_t fallback, const char* name) {
  Require(value >= 0 && value <= 65536, name, " must be 0 to 65536, got ", value);
  return value > 0 ? value : fallback;
}

}  // namespace

dualkv_status dualkv_plan_create(const dualkv_plan_params* params, dualkv_plan** plan) {
  return Guard([&] {
    RequireStruct(params, "params");
    RequirePointer(params->forest, "params.forest");
    RequirePointer(plan, "plan");
    Require(params->window_left >= DUALKV_NO_WINDOW, "window_left must be >= 0 or DUALKV_NO_WINDOW, got ",
            params->window_left);
    const auto& forest = params->forest->forest;
    using dualkv::core::kCpuTiles;
    const dualkv::core::TileSizes forward = {
        .query = TileSize(params->forward_query_tile, kCpuTiles.query, "forward_query_tile"),
        .key = TileSize(params->forward_key_tile, kCpuTiles.key, "forward_key_tile")};
    const dualkv::core::TileSizes backward = {
        .query = TileSize(params->backward_query_tile, kCpuTiles.query, "backward_query_tile"),
        .key = TileSize(params->backward_key_tile, kCpuTiles.key, "backward_key_tile")};
    Require(params->backward_parts >= 0 && params->backward_parts <= kMaxParts,
            "backward_parts must be 0 to ", kMaxParts, ", got ", params->backward_parts);
    Require(params->reserved == 0, "reserved must be 0, got ", params->reserved);
    std::span<const uint8_t> keys_only;
    if (params->keys_only != nullptr) {
      keys_only = {params->keys_only, forest.segments().size()};
    }
    *plan =
        new dualkv_plan{{forest, params->window_left, keys_only, forward, backward, params->backward_parts}};
  });
}

void dualkv_plan_destroy(dualkv_plan* plan) { delete plan; }

dualkv_status dualkv_plan_get_view(const dualkv_plan* plan, dualkv_plan_view* view) {
  return Guard([&] {
    RequirePointer(plan, "plan");
    RequireStruct(view, "view");
    *view = plan->plan.View();
  });
}

dualkv_status dualkv_plan_image_bytes(const dualkv_plan* plan, size_t* bytes) {
  return Guard([&] {
    RequirePointer(plan, "plan");
    RequirePointer(bytes, "bytes");
    *bytes = dualkv::core::PlanImageBytes(plan->plan);
  });
}

dualkv_status dualkv_plan_write_image(const dualkv_plan* plan, void* image, size_t image_bytes) {
  return Guard([&] {
    RequirePointer(plan, "plan");
    RequirePointer(image, "image");
    const size_t needed = dualkv::core::PlanImageBytes(plan->plan);
    Require(image_bytes >= needed, "image_bytes must be at least ", needed, ", got ", image_bytes);
    Require(reinterpret_cast<uintptr_t>(image) % 16 == 0, "image must be aligned to 16 bytes, got ", image);
    dualkv::core::WritePlanImage(plan->plan, static_cast<std::byte*>(image));
  });
}
