// The accuracy that results must have.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace dualkv::testing {

// Error at most twice that of plain attention in the same type, plus one rounding of the largest value (or of
// `scale`).
inline void ExpectWithinBudget(const char* name, const std::vector<double>& got,
                               const std::vector<double>& plain, const std::vector<double>& oracle,
                               double epsilon, double scale = 0) {
  ASSERT_EQ(got.size(), oracle.size()) << name;
  double error = 0, plain_error = 0, largest = scale;
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::isinf(oracle[i])) {
      ASSERT_EQ(got[i], oracle[i]) << name << "[" << i << "]";
      continue;
    }
    ASSERT_TRUE(std::isfinite(got[i])) << name << "[" << i << "] is " << got[i] << ", expected " << oracle[i];
    error = std::max(error, std::abs(got[i] - oracle[i]));
    plain_error = std::max(plain_error, std::abs(plain[i] - oracle[i]));
    largest = std::max(largest, std::abs(oracle[i]));
  }
  EXPECT_LE(error, 2 * (plain_error + epsilon * largest)) << name;
}

}  // namespace dualkv::testing
