// The 2-byte float types and their conversions, rounding to nearest even. Branch-free, so that loops over
// rows of elements vectorise on every instruction set.
#pragma once

#include <bit>
#include <cstdint>

namespace dualkv::core {

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

inline float ToFloat(BFloat16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

inline float ToFloat(Float16 x) {
  const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fff) << 13;
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
  // Rebias the exponent by 112. A subnormal is made normal with the exponent 2^-14, which is then taken off:
  // no operation has a subnormal operand, which some processes flush to 0.
  const float normal = std::bit_cast<float>(magnitude + (uint32_t{112} << 23));
  const float subnormal = std::bit_cast<float>(magnitude + (uint32_t{113} << 23)) - 0x1p-14f;
  uint32_t bits = std::bit_cast<uint32_t>(magnitude < (uint32_t{1} << 23) ? subnormal : normal);
  bits |= magnitude >= (uint32_t{31} << 23) ? uint32_t{0x7f800000} : 0;  // infinity and NaN
  return std::bit_cast<float>(bits | sign);
}

inline BFloat16 ToBFloat16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const uint32_t nan = (bits >> 16) | 0x40;
  return {static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded)};
}

inline Float16 ToFloat16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t magnitude = bits & 0x7fffffff;
  // Normal results: rebias the exponent (by 112) and round off 13 bits; too large ones become infinity.
  const uint32_t normal = (magnitude - (uint32_t{112} << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  // Subnormal results: adding 0.5 leaves the rounded multiple of 2^-24 in the low bits.
  const uint32_t subnormal =
      std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - std::bit_cast<uint32_t>(0.5f);
  const uint32_t special = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
  uint32_t half = magnitude < (uint32_t{113} << 23) ? subnormal : normal;
  half = magnitude >= (uint32_t{143} << 23) ? special : half;
  return {static_cast<uint16_t>(half | ((bits >> 16) & 0x8000))};
}

}  // namespace dualkv::core
