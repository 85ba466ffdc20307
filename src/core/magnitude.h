// The order of magnitudes, and sums that come out the same on every target.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "thinwire/sparse_gradient.h"

namespace thinwire {

/// Elements that a sweep handles at a time: 16 KiB of f32, so that u, v and g of a block stay in the L1 cache.
inline constexpr std::size_t kBlock = 4096;

/// Magnitudes compare as the bits without the sign.
inline std::uint32_t magnitude_key(float value) noexcept { return std::bit_cast<std::uint32_t>(value) & 0x7fffffffu; }
inline float magnitude_of_key(std::uint32_t key) noexcept { return std::bit_cast<float>(key); }

// A value's key under a side is its bits AND kMagnitudeBits for `both`, else its bits XOR sign_flip(side).
inline constexpr std::uint32_t kMagnitudeBits = 0x7fffffffu;
constexpr std::uint32_t sign_flip(Side side) noexcept { return side == Side::smallest ? ~kMagnitudeBits : 0; }

/// The magnitude key of a value of the side; of others it is negative, so that they reach no bound.
inline std::int32_t sided_key(float value, Side side) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return static_cast<std::int32_t>(side == Side::both ? bits & kMagnitudeBits : bits ^ sign_flip(side));
}
/// Whether a value's key under the side is at least `bound`. Signed, as kNoBound - 1 is the largest key.
inline bool reaches(float value, std::uint32_t bound, Side side) noexcept {
  return sided_key(value, side) > static_cast<std::int32_t>(bound - 1);
}

/// Σ term(i) for i < count <= kBlock in f64 over 16 virtual lanes: element i adds to lane i mod 16, lanes combine pairwise.
/// Sums over longer ranges add their blocks in index order.
template <class Term>
double block_sum(std::size_t count, const Term& term) {
  std::array<double, 16> lanes{};
  std::size_t i = 0;
  for (; i + 16 <= count; i += 16)
    for (std::size_t lane = 0; lane < 16; ++lane) lanes[lane] += term(i + lane);
  for (std::size_t lane = 0; i + lane < count; ++lane) lanes[lane] += term(i + lane);
  for (std::size_t width = 8; width > 0; width /= 2)
    for (std::size_t lane = 0; lane < width; ++lane) lanes[lane] = lanes[2 * lane] + lanes[2 * lane + 1];
  return lanes[0];
}

/// Σ values² in f64.
inline double sum_of_squares(const float* values, std::size_t count) {
  double sum = 0;
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    const float* block = values + begin;
    sum += block_sum(std::min(kBlock, count - begin), [block](std::size_t i) { return double{block[i]} * block[i]; });
  }
  return sum;
}

}  // namespace thinwire
