// Values as the wire holds them, written from docs/wire_format.md: nearest of all that a coding can hold, ties to even.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "reference/number.h"
#include "thinwire/codec.h"

namespace thinwire::reference {

/// floor(log2 m) - 14, m being the largest magnitude rounded to 11 significant bits, and as large as f32 allows; at least
/// -125. 0 unless f16.
inline int exponent_of(ValueCoding coding, std::span<const float> values) {
  if (coding != ValueCoding::f16) return 0;
  double m = 0;
  for (const float value : values) m = std::max(m, std::fabs(double(value)));
  if (m == 0) return -125;
  const double step = std::ldexp(1.0, std::ilogb(m) - 10);
  m = std::nearbyint(m / step) * step;  // the mode is ties to even
  return std::max(std::min(std::ilogb(m), 127) - 14, -125);
}

inline DType type_of(ValueCoding coding) { return coding == ValueCoding::f16 ? DType::f16 : DType::bf16; }

/// The sixteen bits that the wire holds.
inline std::uint16_t half_of(ValueCoding coding, int exponent, float value) {
  const std::vector<double>& all = half_magnitudes(type_of(coding));
  const double magnitude = std::ldexp(std::fabs(double(value)), -exponent);
  auto bits = std::uint32_t(std::upper_bound(all.begin(), all.end() - 1, magnitude) - all.begin()) - 1;
  const double down = magnitude - all[bits], up = all[bits + 1] - magnitude;
  if (up < down || (up == down && bits % 2 == 1)) bits += 1;
  const std::uint32_t largest = coding == ValueCoding::f16 ? 0x77ff : 0x7f7f;
  return static_cast<std::uint16_t>(std::min(bits, largest) | (std::signbit(value) ? 0x8000u : 0u));
}
inline float value_of(ValueCoding coding, int exponent, std::uint16_t half) {
  const double magnitude = std::ldexp(half_magnitudes(type_of(coding))[half & 0x7fffu], exponent);
  return float((half & 0x8000u) != 0 ? -magnitude : magnitude);
}

/// In f64: element i adds to lane i mod 16, neighbouring lanes are added until one is left.
template <class Term>
double block_sum(std::span<const float> block, const Term& term) {
  std::vector<double> lanes(16, 0.0);
  for (std::size_t i = 0; i < block.size(); ++i) lanes[i % 16] += term(block[i]);
  while (lanes.size() > 1) {
    std::vector<double> pairs;
    for (std::size_t lane = 0; lane < lanes.size(); lane += 2) pairs.push_back(lanes[lane] + lanes[lane + 1]);
    lanes = pairs;
  }
  return lanes[0];
}

/// Blocks of 4 096 are added in order.
inline float shared_mean(std::span<const float> values) {
  double sum = 0;
  for (std::size_t begin = 0; begin < values.size(); begin += 4096)
    sum += block_sum(values.subspan(begin, std::min<std::size_t>(4096, values.size() - begin)),
                     [](float value) { return double(value); });
  return float(sum / double(values.size()));
}

/// What receivers get of the values of one section.
inline std::vector<float> received(ValueCoding coding, std::span<const float> values) {
  std::vector<float> out(values.begin(), values.end());
  if (coding == ValueCoding::f32) return out;
  if (coding == ValueCoding::shared_mean) return std::vector<float>(out.size(), out.empty() ? 0 : shared_mean(out));
  const int exponent = exponent_of(coding, values);
  for (float& value : out) value = value_of(coding, exponent, half_of(coding, exponent, value));
  return out;
}

}  // namespace thinwire::reference
