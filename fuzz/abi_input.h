// What the fuzzer of the C interface draws its calls from: sizes, flags and buffers of exactly the promised
// length.
#pragma once

#include <fuzzer/FuzzedDataProvider.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "core/half.h"
#include "dualkv/dualkv.h"

namespace dualkv::fuzz {

inline void Check(bool condition, const char* what) {
  if (!condition) {
    std::fprintf(stderr, "violated: %s (last error: %s)\n", what, dualkv_last_error());
    std::abort();
  }
}

// Whether the call went through. One that did not must say why, and must not blame the library.
inline bool Succeeded(dualkv_status status) {
  Check(status == DUALKV_OK || status == DUALKV_INVALID_ARGUMENT || status == DUALKV_UNSUPPORTED,
        "a call is answered or refused");
  Check(status == DUALKV_OK || *dualkv_last_error() != '\0', "a refusal has a message");
  return status == DUALKV_OK;
}

class Input {
 public:
  Input(const uint8_t* data, size_t size) : provider_(data, size) {}

  bool Flag() { return provider_.ConsumeBool(); }
  bool Rarely() { return provider_.ConsumeIntegral<uint8_t>() >= 250; }  // 0, that is no more bytes, is no
  int64_t Range(int64_t low, int64_t high) { return provider_.ConsumeIntegralInRange(low, high); }

  // 0 to `high`; rarely a number that must be refused, as no array of that length is there.
  int64_t Size(int64_t high) { return Rarely() ? Bad() : Range(0, high); }
  int64_t Bad() {
    constexpr int64_t kMin = std::numeric_limits<int64_t>::min(), kMax = std::numeric_limits<int64_t>::max();
    return provider_.PickValueInArray(
        {int64_t{-1}, int64_t{-1} << 32, kMin, kMin + 1, (int64_t{1} << 30) + 1, kMax});
  }
  // A value of a field that may hold anything.
  int64_t Any() { return Flag() ? provider_.ConsumeIntegral<int64_t>() : Bad(); }
  int32_t Enum(int32_t high) { return static_cast<int32_t>(Rarely() ? Any() : Range(0, high)); }
  double Number(double usual) {
    return Rarely() ? provider_.PickValueInArray({-1.0, 0.0, 1e-300, 1e300, double{INFINITY}, double{NAN}})
                    : usual;
  }

  template <class T>
  std::vector<T> Values(int64_t count, T low, T high) {
    std::vector<T> values(std::max<int64_t>(count, 0));
    for (T& value : values) {
      value = Rarely() ? static_cast<T>(Any()) : static_cast<T>(Range(low, high));
    }
    return values;
  }
  std::vector<int64_t> Sizes(int64_t count, int64_t high) {
    std::vector<int64_t> sizes(std::max<int64_t>(count, 0));
    for (int64_t& size : sizes) {
      size = Size(high);
    }
    return sizes;
  }

  // The array, or rarely NULL. An empty one is NULL too.
  template <class T>
  T* Pointer(std::vector<T>& values) {
    return values.empty() || Rarely() ? nullptr : values.data();
  }

  // A parameter struct, rarely one of another size or version.
  template <class Struct>
  Struct Params() {
    Struct params{};
    params.size = Rarely() ? static_cast<uint32_t>(Any()) : sizeof(Struct);
    params.version = Rarely() ? static_cast<uint32_t>(Any()) : DUALKV_ABI_VERSION;
    return params;
  }

 private:
  FuzzedDataProvider provider_;
};

// Sum of the sizes that are no mistakes.
inline int64_t Total(const std::vector<int64_t>& sizes) {
  int64_t total = 0;
  for (const int64_t size : sizes) {
    total += size >= 0 && size < 100 ? size : 0;
  }
  return total;
}

// `count` elements of a dtype on the heap, with no byte to spare.
class Elements {
 public:
  Elements(int32_t dtype, int64_t count)
      : dtype_(dtype),
        width_(dtype == DUALKV_FLOAT64   ? 8
               : dtype == DUALKV_FLOAT32 ? 4
                                         : 2),
        bytes_(std::max<int64_t>(count, 0) * width_) {
    Poison();
  }

  void Poison() { std::fill(bytes_.begin(), bytes_.end(), std::byte{0xff}); }  // NaN in every dtype
  void Randomize(std::minstd_rand& rng) {
    for (int64_t i = 0; i < size(); ++i) {
      Set(i, std::uniform_real_distribution(-1.0, 1.0)(rng));
    }
  }
  double Get(int64_t i) const {
    switch (dtype_) {
      case DUALKV_FLOAT64:
        return Load<double>(i);
      case DUALKV_FLOAT32:
        return Load<float>(i);
      case DUALKV_BFLOAT16:
        return core::ToFloat(Load<core::BFloat16>(i));
      default:
        return core::ToFloat(Load<core::Float16>(i));
    }
  }
  void Set(int64_t i, double value) {
    const auto single = static_cast<float>(value);
    switch (dtype_) {
      case DUALKV_FLOAT64:
        return Store(i, value);
      case DUALKV_FLOAT32:
        return Store(i, single);
      case DUALKV_BFLOAT16:
        return Store(i, core::ToBFloat16(single));
      default:
        return Store(i, core::ToFloat16(single));
    }
  }
  int64_t size() const { return static_cast<int64_t>(bytes_.size()) / width_; }
  std::byte* data() { return bytes_.empty() ? nullptr : bytes_.data(); }
  std::byte* at(int64_t i) { return bytes_.empty() ? nullptr : bytes_.data() + i * width_; }
  bool operator==(const Elements& other) const { return bytes_ == other.bytes_; }

 private:
  template <class T>
  T Load(int64_t i) const {
    T value;
    std::memcpy(&value, bytes_.data() + i * width_, sizeof(T));
    return value;
  }
  template <class T>
  void Store(int64_t i, T value) {
    std::memcpy(bytes_.data() + i * width_, &value, sizeof(T));
  }

  int32_t dtype_;
  int64_t width_;
  std::vector<std::byte> bytes_;
};

inline int32_t AccumulatorOf(int32_t dtype) {
  return dtype == DUALKV_FLOAT64 ? DUALKV_FLOAT64 : DUALKV_FLOAT32;
}

}  // namespace dualkv::fuzz
