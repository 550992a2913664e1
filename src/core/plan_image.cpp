#include "core/plan_image.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "core/plan.h"

namespace dualkv::core {
namespace {

constexpr uint64_t kAlignment = 16;

uint64_t AlignUp(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

struct Layout {
  PlanImageHeader header;
  uint64_t bytes;
};

Layout LayOut(const Plan& plan) {
  PlanImageHeader header{};
  uint64_t end = AlignUp(sizeof(PlanImageHeader));
  auto place = [&](uint64_t bytes) {
    const uint64_t begin = end;
    end = AlignUp(end + bytes);
    return begin;
  };
  header.tiles = place(plan.forward.tiles.size() * sizeof(dualkv_tile));
  header.runs = place(plan.forward.runs.size() * sizeof(ImageRun));
  header.cleared = place(plan.cleared.size() * sizeof(Interval));
  header.positions = place(plan.positions.size() * sizeof(int32_t));
  header.num_tiles = static_cast<int32_t>(plan.forward.tiles.size());
  header.num_cleared = static_cast<int32_t>(plan.cleared.size());
  header.total_tokens = static_cast<int32_t>(plan.forest.total_tokens());
  // A window as wide as all rows hides nothing.
  header.window_left =
      static_cast<int32_t>(std::min<int64_t>(plan.window_left, std::numeric_limits<int32_t>::max()));
  return {header, end};
}

}  // namespace

size_t PlanImageBytes(const Plan& plan) { return LayOut(plan).bytes; }

void WritePlanImage(const Plan& plan, std::byte* image) {
  const auto [header, bytes] = LayOut(plan);
  std::memset(image, 0, bytes);
  std::memcpy(image, &header, sizeof(header));
  auto* tiles = reinterpret_cast<dualkv_tile*>(image + header.tiles);
  std::copy(plan.forward.tiles.begin(), plan.forward.tiles.end(), tiles);
  auto* runs = reinterpret_cast<ImageRun*>(image + header.runs);
  const auto segments = plan.forest.segments();
  std::transform(plan.forward.runs.begin(), plan.forward.runs.end(), runs, [&](const dualkv_run& run) {
    return ImageRun{
        .begin = run.begin, .end = run.end, .masked = run.masked, .segment = segments[run.segment]};
  });
  std::copy(plan.cleared.begin(), plan.cleared.end(), reinterpret_cast<Interval*>(image + header.cleared));
  std::copy(plan.positions.begin(), plan.positions.end(),
            reinterpret_cast<int32_t*>(image + header.positions));
}

}  // namespace dualkv::core
