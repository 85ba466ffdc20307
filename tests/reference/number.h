// Half-precision numbers from their definition: a value is sign · significand · 2^exponent; rounding looks for the
// nearest of all values, and of two equally near ones takes the one whose bits are even.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "thinwire/types.h"

namespace thinwire::reference {

/// The value of the bits of an f16 or bf16 without its sign. Infinity counts as the next power of two.
inline double half_magnitude(DType dtype, std::uint32_t bits) {
  const int significand_bits = dtype == DType::f16 ? 10 : 7;
  const int bias = dtype == DType::f16 ? 15 : 127;
  const int exponent = static_cast<int>(bits >> significand_bits);
  const double fraction = std::ldexp(double(bits & ((1u << significand_bits) - 1)), -significand_bits);
  return exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1.0 + fraction, exponent - bias);
}

/// All of them in ascending order, infinity last.
inline const std::vector<double>& half_magnitudes(DType dtype) {
  static const auto table = [](DType of) {
    std::vector<double> values;
    for (std::uint32_t bits = 0; bits <= (of == DType::f16 ? 0x7c00u : 0x7f80u); ++bits)
      values.push_back(half_magnitude(of, bits));
    return values;
  };
  static const std::vector<double> f16 = table(DType::f16), bf16 = table(DType::bf16);
  return dtype == DType::f16 ? f16 : bf16;
}

inline std::uint16_t round_to_half(DType dtype, float value) {
  const std::uint32_t infinity = dtype == DType::f16 ? 0x7c00 : 0x7f80;
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return static_cast<std::uint16_t>(sign | infinity | 0x40);
  const std::vector<double>& values = half_magnitudes(dtype);
  const double magnitude = std::fabs(double(value));
  if (magnitude >= values[infinity]) return static_cast<std::uint16_t>(sign | infinity);
  const auto above =
      static_cast<std::uint32_t>(std::upper_bound(values.begin(), values.end(), magnitude) - values.begin());
  const std::uint32_t below = above - 1;
  const double down = magnitude - values[below];
  const double up = values[above] - magnitude;
  const bool take_below = down < up || (down == up && below % 2 == 0);
  return static_cast<std::uint16_t>(sign | (take_below ? below : above));
}

inline float half_value(DType dtype, std::uint16_t half) {
  const std::uint32_t infinity = dtype == DType::f16 ? 0x7c00 : 0x7f80;
  const std::uint32_t bits = half & 0x7fffu;
  const float sign = (half & 0x8000u) != 0 ? -1.0f : 1.0f;
  if (bits > infinity) return std::nanf("");
  if (bits == infinity) return sign * HUGE_VALF;
  return sign * static_cast<float>(half_magnitudes(dtype)[bits]);
}

inline void store(DType dtype, float value, std::byte* to) {
  if (dtype == DType::f32) {
    std::memcpy(to, &value, 4);
    return;
  }
  const std::uint16_t half = round_to_half(dtype, value);
  std::memcpy(to, &half, 2);
}

inline float load(DType dtype, const std::byte* from) {
  float value = 0;
  if (dtype == DType::f32) {
    std::memcpy(&value, from, 4);
    return value;
  }
  std::uint16_t half = 0;
  std::memcpy(&half, from, 2);
  return half_value(dtype, half);
}

/// The value as the buffer's type holds it.
inline float rounded(DType dtype, float value) {
  return dtype == DType::f32 ? value : half_value(dtype, round_to_half(dtype, value));
}

}  // namespace thinwire::reference
