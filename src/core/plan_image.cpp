#include "core/plan_image.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "core/plan.h"

namespace dualkv::core {
namespace {

constexpr uint64_t kAlignment = 16;

uint64_t AlignUp(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// The key tiles that were cut, in the order of their parts.
std::vector<ImageSplitTile> SplitTiles(const Plan& plan) {
  std::vector<const dualkv_tile*> parts(plan.num_partials);
  for (size_t t = 0; t < plan.partial.size(); ++t) {
    if (plan.partial[t] >= 0) {
      parts[plan.partial[t]] = &plan.backward.tiles[t];
    }
  }
  std::vector<ImageSplitTile> split;
  for (int32_t p = 0; p < static_cast<int32_t>(parts.size()); ++p) {
    if (split.empty() || split.back().begin != parts[p]->begin) {
      split.push_back({.begin = parts[p]->begin, .end = parts[p]->end, .partial_begin = p, .partial_end = p});
    }
    ++split.back().partial_end;
  }
  return split;
}

// The header, and the bytes of the whole image.
std::pair<PlanImageHeader, uint64_t> LayOut(const Plan& plan) {
  PlanImageHeader header{};
  uint64_t end = AlignUp(sizeof(PlanImageHeader));
  auto place = [&](uint64_t bytes) {
    const uint64_t begin = end;
    end = AlignUp(end + bytes);
    return begin;
  };
  header.tiles = place(plan.forward.tiles.size() * sizeof(dualkv_tile));
  header.runs = place(plan.forward.runs.size() * sizeof(ImageRun));
  header.key_tiles = place(plan.backward.tiles.size() * sizeof(ImageKeyTile));
  header.query_runs = place(plan.backward.runs.size() * sizeof(ImageQueryRun));
  header.split_tiles = place(plan.num_split_tiles * sizeof(ImageSplitTile));
  header.cleared = place(plan.cleared.size() * sizeof(Interval));
  header.positions = place(plan.positions.size() * sizeof(int32_t));
  header.num_tiles = static_cast<int32_t>(plan.forward.tiles.size());
  header.num_key_tiles = static_cast<int32_t>(plan.backward.tiles.size());
  header.num_split_tiles = static_cast<int32_t>(plan.num_split_tiles);
  header.num_cleared = static_cast<int32_t>(plan.cleared.size());
  header.total_tokens = static_cast<int32_t>(plan.forest.total_tokens());
  // A window as wide as all rows hides nothing.
  header.window_left =
      static_cast<int32_t>(std::min<int64_t>(plan.window_left, std::numeric_limits<int32_t>::max()));
  return {header, end};
}

}  // namespace

size_t PlanImageBytes(const Plan& plan) { return LayOut(plan).second; }

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
  auto* key_tiles = reinterpret_cast<ImageKeyTile*>(image + header.key_tiles);
  int32_t band_end = 0;
  for (size_t t = 0; t < plan.backward.tiles.size(); ++t) {
    while (static_cast<size_t>(band_end) < plan.band.size() && plan.band[band_end] == plan.band[t]) {
      ++band_end;
    }
    const dualkv_tile& tile = plan.backward.tiles[t];
    key_tiles[t] = {.begin = tile.begin,
                    .end = tile.end,
                    .run_begin = tile.run_begin,
                    .run_end = tile.run_end,
                    .segment = *std::partition_point(
                        segments.begin(), segments.end(),
                        [&](const dualkv_segment& segment) { return segment.end <= tile.begin; }),
                    .partial = plan.partial[t],
                    .band_begin = plan.band[t],
                    .band_end = band_end};
  }
  auto* query_runs = reinterpret_cast<ImageQueryRun*>(image + header.query_runs);
  for (size_t r = 0; r < plan.backward.runs.size(); ++r) {
    const dualkv_run& run = plan.backward.runs[r];
    query_runs[r] = {.begin = run.begin, .end = run.end, .masked = run.masked, .turn = plan.turn[r]};
  }
  const std::vector<ImageSplitTile> split_tiles = SplitTiles(plan);
  std::copy(split_tiles.begin(), split_tiles.end(),
            reinterpret_cast<ImageSplitTile*>(image + header.split_tiles));
  std::copy(plan.cleared.begin(), plan.cleared.end(), reinterpret_cast<Interval*>(image + header.cleared));
  std::copy(plan.positions.begin(), plan.positions.end(),
            reinterpret_cast<int32_t*>(image + header.positions));
}

}  // namespace dualkv::core
