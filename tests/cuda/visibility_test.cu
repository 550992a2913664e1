// The visibility rule gives on the device what brute force gives on the host.
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "brute_force.h"
#include "core/visibility.h"
#include "device.h"
#include "random_forest.h"

namespace dualkv::testing {
namespace {

// sees[row * rows + key] for all pairs; segment_of [rows].
__global__ void EvaluateRule(int32_t rows, const int32_t* positions, const int32_t* segment_of,
                             const dualkv_segment* segments, int64_t window_left, uint8_t* sees) {
  const int64_t pair = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (pair >= static_cast<int64_t>(rows) * rows) {
    return;
  }
  const auto row = static_cast<int32_t>(pair / rows), key = static_cast<int32_t>(pair % rows);
  const dualkv_segment& segment = segments[segment_of[key]];
  const core::Interval keys = core::VisibleKeys(row, positions[row], segment, window_left);
  const bool in_interval = keys.begin <= key && key < keys.end;
  sees[pair] =
      in_interval == core::IsVisible(row, positions[row], key, segment, window_left) ? in_interval : 2;
}

using CudaVisibility = CudaTest;

TEST_F(CudaVisibility, MatchesBruteForce) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 rng(seed);
    const ForestSpec spec = RandomForest(rng, 12, 40);
    const BruteForce truth(spec);
    const Forest forest = spec.Build();
    const auto rows = static_cast<int32_t>(truth.rows());
    if (rows == 0) {
      continue;
    }
    std::vector<int32_t> positions, segment_of;
    for (int32_t row = 0; row < rows; ++row) {
      positions.push_back(static_cast<int32_t>(truth.position(row)));
      segment_of.push_back(static_cast<int32_t>(truth.segment(row)));
    }
    DeviceArray<int32_t> device_positions(positions), device_segment_of(segment_of);
    DeviceArray<dualkv_segment> device_segments({forest.segments().begin(), forest.segments().end()});
    const int64_t pairs = static_cast<int64_t>(rows) * rows;
    for (const int64_t window : {-1, 0, 7, 100}) {
      DeviceArray<uint8_t> sees(std::vector<uint8_t>(pairs, 3));
      EvaluateRule<<<static_cast<unsigned>((pairs + 255) / 256), 256>>>(
          rows, device_positions.data(), device_segment_of.data(), device_segments.data(), window,
          sees.data());
      CheckCuda(cudaGetLastError());
      const std::vector<uint8_t> got = sees.ToHost();
      for (int64_t pair = 0; pair < pairs; ++pair) {
        ASSERT_EQ(got[pair], truth.Sees(pair / rows, pair % rows, window))
            << "row " << pair / rows << ", key " << pair % rows << ", window " << window;
      }
    }
  }
}

}  // namespace
}  // namespace dualkv::testing
