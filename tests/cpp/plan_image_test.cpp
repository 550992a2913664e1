// The image of a plan says what the plan says. It is read as the kernels read it.
#include "core/plan_image.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "brute_force.h"
#include "dualkv/dualkv.hpp"
#include "expect_error.h"
#include "random_forest.h"

namespace dualkv::testing {
namespace {

class ImageReader {
 public:
  explicit ImageReader(const std::vector<std::byte>& image) : image_(image) {
    std::memcpy(&header, image.data(), sizeof(header));
  }

  // `count` entries of a part.
  template <class T>
  std::span<const T> Part(uint64_t offset, int64_t count) const {
    if (offset % 16 != 0 || offset + count * sizeof(T) > image_.size()) {
      throw std::out_of_range("a part at " + std::to_string(offset) + " does not lie in the image");
    }
    return {reinterpret_cast<const T*>(image_.data() + offset), static_cast<size_t>(count)};
  }

  core::PlanImageHeader header;

 private:
  const std::vector<std::byte>& image_;
};

bool Same(const dualkv_segment& a, const dualkv_segment& b) {
  return a.begin == b.begin && a.end == b.end && a.tree_end == b.tree_end && a.position == b.position &&
         a.parent == b.parent;
}

void CheckImage(const ForestSpec& spec, const std::vector<uint8_t>& keys_only, int64_t window_left,
                int32_t parts) {
  SCOPED_TRACE(spec.ToString() + "; window " + std::to_string(window_left));
  const Forest forest = spec.Build();
  auto params = Params<dualkv_plan_params>();
  params.forest = forest.get();
  params.window_left = window_left;
  params.keys_only = keys_only.data();
  params.forward_query_tile = 16;
  params.forward_key_tile = 32;
  params.backward_query_tile = 8;
  params.backward_key_tile = 24;
  params.backward_parts = parts;
  const Plan plan(params);
  const dualkv_plan_view view = plan.View();
  const std::vector<std::byte> image = plan.Image();
  const ImageReader reader(image);

  ASSERT_EQ(reader.header.num_tiles, view.forward.num_tiles);
  ASSERT_EQ(reader.header.total_tokens, view.total_tokens);
  EXPECT_EQ(reader.header.window_left, std::min<int64_t>(window_left, std::numeric_limits<int32_t>::max()));

  const auto tiles = reader.Part<dualkv_tile>(reader.header.tiles, view.forward.num_tiles);
  EXPECT_TRUE(std::equal(
      tiles.begin(), tiles.end(), view.forward.tiles, [](const dualkv_tile& a, const dualkv_tile& b) {
        return a.begin == b.begin && a.end == b.end && a.run_begin == b.run_begin && a.run_end == b.run_end;
      }));
  const auto runs = reader.Part<core::ImageRun>(reader.header.runs, view.forward.num_runs);
  EXPECT_TRUE(std::equal(runs.begin(), runs.end(), view.forward.runs,
                         [&](const core::ImageRun& a, const dualkv_run& b) {
                           return a.begin == b.begin && a.end == b.end && a.masked == b.masked &&
                                  Same(a.segment, view.segments[b.segment]);
                         }));

  ASSERT_EQ(reader.header.num_key_tiles, view.backward.num_tiles);
  const BruteForce truth(spec);
  std::vector<dualkv_tile> parts_of_tiles(view.num_partials);
  const auto key_tiles = reader.Part<core::ImageKeyTile>(reader.header.key_tiles, view.backward.num_tiles);
  for (int64_t t = 0; t < view.backward.num_tiles; ++t) {
    const core::ImageKeyTile& a = key_tiles[t];
    const dualkv_tile& b = view.backward.tiles[t];
    EXPECT_TRUE(a.begin == b.begin && a.end == b.end && a.run_begin == b.run_begin && a.run_end == b.run_end);
    EXPECT_TRUE(Same(a.segment, view.segments[truth.segment(b.begin)]));
    EXPECT_EQ(a.partial, view.partial[t]);
    EXPECT_EQ(a.band_begin, view.band[t]);
    ASSERT_TRUE(a.band_end > t && a.band_end <= view.backward.num_tiles);
    EXPECT_EQ(view.band[a.band_end - 1], view.band[t]);
    EXPECT_TRUE(a.band_end == view.backward.num_tiles || view.band[a.band_end] == a.band_end);
    if (a.partial >= 0) {
      parts_of_tiles.at(a.partial) = b;
    }
  }
  const auto query_runs = reader.Part<core::ImageQueryRun>(reader.header.query_runs, view.backward.num_runs);
  for (int64_t r = 0; r < view.backward.num_runs; ++r) {
    const dualkv_run& run = view.backward.runs[r];
    EXPECT_TRUE(query_runs[r].begin == run.begin && query_runs[r].end == run.end);
    EXPECT_TRUE(query_runs[r].masked == run.masked && query_runs[r].turn == view.turn[r]);
  }
  int32_t next = 0;
  for (const core::ImageSplitTile& tile :
       reader.Part<core::ImageSplitTile>(reader.header.split_tiles, reader.header.num_split_tiles)) {
    EXPECT_EQ(tile.partial_begin, next);
    ASSERT_GE(tile.partial_end, next + 2);
    for (; next < tile.partial_end; ++next) {
      EXPECT_TRUE(parts_of_tiles.at(next).begin == tile.begin && parts_of_tiles.at(next).end == tile.end);
    }
  }
  EXPECT_EQ(next, view.num_partials);

  if (window_left >= 0) {
    const auto positions = reader.Part<int32_t>(reader.header.positions, view.total_tokens);
    EXPECT_TRUE(std::equal(positions.begin(), positions.end(), view.positions));
  }
  std::vector<int> cleared(view.total_tokens, 0);
  for (const core::Interval& rows :
       reader.Part<core::Interval>(reader.header.cleared, reader.header.num_cleared)) {
    ASSERT_TRUE(0 <= rows.begin && rows.begin < rows.end && rows.end <= view.total_tokens);
    std::for_each(cleared.begin() + rows.begin, cleared.begin() + rows.end, [](int& row) { ++row; });
  }
  for (int64_t row = 0; row < truth.rows(); ++row) {
    EXPECT_EQ(cleared[row], keys_only[truth.segment(row)] ? 1 : 0) << "row " << row;
  }
}

TEST(PlanImage, SaysWhatThePlanSays) {
  for (uint64_t seed = 0; seed < 100; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 rng(seed);
    const ForestSpec spec = RandomForest(rng, 12, 90);
    std::vector<uint8_t> keys_only(spec.lengths.size());
    if (seed % 2 == 0) {
      std::generate(keys_only.begin(), keys_only.end(), [&] { return rng() % 3 == 0; });
    }
    for (const int64_t window : {int64_t{-1}, int64_t{0}, int64_t{30}, int64_t{1} << 40}) {
      CheckImage(spec, keys_only, window, static_cast<int32_t>(rng() % 40));
    }
    if (HasFailure()) {
      return;
    }
  }
}

TEST(PlanImage, OfAnEmptyForestIsAHeader) {
  const Plan plan(Forest::FromSegments({}, {}));
  EXPECT_EQ(plan.Image().size(), sizeof(core::PlanImageHeader));
}

TEST(PlanImage, FillsItsBytesAndNoMore) {
  const Plan plan(Forest::FromGroups({{100, {7, 30}}}), 5);
  const std::vector<std::byte> image = plan.Image();
  for (const std::byte poison : {std::byte{0}, std::byte{0xff}}) {
    std::vector<std::byte> larger(image.size() + 64, poison);
    Check(dualkv_plan_write_image(plan.get(), larger.data(), larger.size()));
    EXPECT_TRUE(std::equal(image.begin(), image.end(), larger.begin())) << "every byte, padding included";
    EXPECT_TRUE(std::all_of(larger.begin() + static_cast<ptrdiff_t>(image.size()), larger.end(),
                            [&](std::byte byte) { return byte == poison; }));
  }
}

TEST(PlanImage, RefusesBadArguments) {
  const Plan plan(Forest::FromGroups({{3, {1}}}));
  size_t bytes = 0;
  ExpectInvalid(dualkv_plan_image_bytes(nullptr, &bytes), {"plan must not be NULL"});
  ExpectInvalid(dualkv_plan_image_bytes(plan.get(), nullptr), {"bytes must not be NULL"});
  Check(dualkv_plan_image_bytes(plan.get(), &bytes));
  std::vector<std::byte> image(bytes + 16, std::byte{9});
  ExpectInvalid(dualkv_plan_write_image(nullptr, image.data(), bytes), {"plan must not be NULL"});
  ExpectInvalid(dualkv_plan_write_image(plan.get(), nullptr, bytes), {"image must not be NULL"});
  ExpectInvalid(dualkv_plan_write_image(plan.get(), image.data(), bytes - 1),
                {"image_bytes must be at least", std::to_string(bytes).c_str(),
                 ("got " + std::to_string(bytes - 1)).c_str()});
  ExpectInvalid(dualkv_plan_write_image(plan.get(), image.data() + 8, bytes),
                {"image must be aligned to 16 bytes, got 0x"});
  EXPECT_EQ(std::count(image.begin(), image.end(), std::byte{9}), static_cast<ptrdiff_t>(image.size()))
      << "nothing is written";
}

TEST(PlanTiles, AreThoseOfTheDevice) {
  auto params = Params<dualkv_plan_params>();
  params.window_left = 77;
  SetTiles(params, DUALKV_CPU, 8, 2, 64);
  EXPECT_EQ(params.window_left, 77);
  const Forest forest = Forest::FromGroups({{3, {1}}});
  params.forest = forest.get();
  const Plan plan(params), plain(forest);
  EXPECT_EQ(params.forward_query_tile, plain.View().forward.query_tile);
  EXPECT_EQ(params.forward_key_tile, plain.View().forward.key_tile);
  EXPECT_EQ(params.backward_query_tile, plain.View().backward.query_tile);
  EXPECT_EQ(params.backward_key_tile, plain.View().backward.key_tile);
  EXPECT_EQ(params.backward_parts, 0);
}

}  // namespace
}  // namespace dualkv::testing
