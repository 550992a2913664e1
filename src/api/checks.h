// Checks that the operations share.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "core/error.h"
#include "dualkv/dualkv.h"

namespace dualkv::api {

inline void RequireDtype(int32_t dtype) {
  core::Require(dtype >= DUALKV_FLOAT64 && dtype <= DUALKV_FLOAT16,
                "dtype must be a dualkv_dtype, 0 to 3, got ", dtype);
}

inline void RequireDevice(int32_t device) {
  core::Require(device == DUALKV_CPU || device == DUALKV_CUDA,
                "device must be DUALKV_CPU (0) or DUALKV_CUDA (1), got ", device);
}

inline bool IsAligned(const void* data, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(data) % bytes == 0;
}

// Data of `count` entries or rows; NULL is accepted for none.
inline void RequireData(const void* data, int64_t count, const char* name) {
  core::Require(data != nullptr || count == 0, name, " must not be NULL for ", count, " entries");
}

// The most elements that a tensor may have: far more than any memory, and few enough to count in bytes.
inline constexpr int64_t kMaxElements = int64_t{1} << 56;

// Largest and smallest positive normal number of the accumulation type of `dtype`, in which real parameters
// are used. They come as doubles.
inline double LargestOf(int32_t dtype) {
  return dtype == DUALKV_FLOAT64 ? std::numeric_limits<double>::max() : std::numeric_limits<float>::max();
}
inline double SmallestOf(int32_t dtype) {
  return dtype == DUALKV_FLOAT64 ? std::numeric_limits<double>::min() : std::numeric_limits<float>::min();
}

inline void RequireFinite(int32_t dtype, double value, const char* name) {
  core::Require(std::isfinite(value), name, " must be finite, got ", value);
  core::Require(std::abs(value) <= LargestOf(dtype), name, " must be finite in the accumulation type, got ",
                value);
}

// `value` and its inverse are > 0 and can be computed with.
inline void RequireInvertible(int32_t dtype, double value, const char* name) {
  core::Require(value >= SmallestOf(dtype) && value <= 1 / SmallestOf(dtype), name,
                " must be > 0 and so must its inverse in the accumulation type, got ", value);
}

// 0 for none.
inline void RequireSoftcap(int32_t dtype, double softcap) {
  core::Require(std::isfinite(softcap) && softcap >= 0, "softcap must be finite and >= 0, got ", softcap);
  if (softcap > 0) {
    RequireInvertible(dtype, softcap, "softcap");
  }
}

}  // namespace dualkv::api
