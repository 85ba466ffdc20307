#include "codec/values.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "codec/bytes.h"
#include "core/float16.h"
#include "core/magnitude.h"

namespace thinwire {
namespace {

float power_of_two(int exponent) { return std::bit_cast<float>(static_cast<std::uint32_t>(exponent + 127) << 23); }

std::uint16_t sign_and_at_most(std::uint32_t sign_of, std::uint32_t half, std::int32_t largest) {
  return static_cast<std::uint16_t>((sign_of >> 16 & 0x8000u) |
                                    static_cast<std::uint32_t>(std::min(static_cast<std::int32_t>(half), largest)));
}

// Rounding and widening of one value, as in core/float16.h but without infinities. There are no branches, and comparisons
// are signed, so that loops of these become vector code.
struct Bf16 {
  static constexpr std::int32_t kLargest = 0x7f7f;
  std::uint16_t narrow(float value) const {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    return sign_and_at_most(bits, (magnitude + 0x7fffu + (magnitude >> 16 & 1u)) >> 16, kLargest);
  }
  float widen(std::uint16_t half) const { return bf16_to_f32(half); }
};

// The exponent keeps magnitudes below 2^15. Scaling down is not exact where f16 has nothing but zero.
struct F16 {
  explicit F16(int exponent) : up(power_of_two(exponent)), down(power_of_two(-exponent)) {}
  static constexpr std::int32_t kLargest = 0x77ff;
  std::uint16_t narrow(float value) const {
    const auto bits = std::bit_cast<std::uint32_t>(value * down);
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    const std::uint32_t normal = (magnitude + 0xfffu + (magnitude >> 13 & 1u) - 0x38000000u) >> 13;
    const std::uint32_t subnormal = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
    const std::uint32_t is_normal = 0u - static_cast<std::uint32_t>(static_cast<std::int32_t>(magnitude) >= 0x38800000);
    return sign_and_at_most(bits, (normal & is_normal) | (subnormal & ~is_normal), kLargest);
  }
  float widen(std::uint16_t half) const {
    const float magnitude = std::bit_cast<float>((half & 0x7fffu) << 13) * 0x1p112f * up;
    return std::bit_cast<float>((half & 0x8000u) << 16 | std::bit_cast<std::uint32_t>(magnitude));
  }
  float up;
  float down;
};

// In f64, whose sum of n equal numbers is exact for n < 2^29: the mean of means is itself.
float mean(std::span<const float> values) {
  double sum = 0;
  for (std::size_t begin = 0; begin < values.size(); begin += kBlock) {
    const float* block = values.data() + begin;
    sum += block_sum(std::min(kBlock, values.size() - begin), [block](std::size_t i) { return double{block[i]}; });
  }
  return static_cast<float>(sum / static_cast<double>(values.size()));
}

// Calls f with what narrows and widens values of a 16-bit coding.
template <class F>
void with_half(ValueCoding coding, int exponent, const F& f) {
  if (coding == ValueCoding::bf16) f(Bf16{});
  if (coding == ValueCoding::f16) f(F16(exponent));
}

}  // namespace

std::size_t value_bytes(ValueCoding coding, std::size_t count) noexcept {
  if (coding == ValueCoding::shared_mean) return count == 0 ? 0 : 4;
  return coding == ValueCoding::f32 ? 4 * count : (count + 1) / 2 * 4;
}

// The largest magnitude, rounded to f16's 11 bits, comes to lie in [2^14, 2^15), or below where that would take numbers
// smaller than those of f32.
int value_exponent(ValueCoding coding, std::span<const float> values) noexcept {
  if (coding != ValueCoding::f16) return 0;
  std::int32_t key = 0;
  for (const float value : values) key = std::max(key, static_cast<std::int32_t>(magnitude_key(value)));
  const auto largest = static_cast<std::uint32_t>(key);
  const std::uint32_t rounded = std::min(largest + 0xfffu + (largest >> 13 & 1u), 0x7f7fffffu);
  return std::max(static_cast<int>(rounded >> 23) - 127 - 14, kMinExponent);
}

void round_values(ValueCoding coding, std::span<float> values) noexcept {
  if (coding == ValueCoding::shared_mean && !values.empty()) std::fill(values.begin(), values.end(), mean(values));
  with_half(coding, value_exponent(coding, values), [values](const auto half) {
    for (float& value : values) value = half.widen(half.narrow(value));
  });
}

void encode_values(ValueCoding coding, int exponent, std::span<const float> values, std::span<std::byte> out) noexcept {
  if (coding == ValueCoding::f32) std::copy_n(std::as_bytes(values).begin(), 4 * values.size(), out.begin());
  if (coding == ValueCoding::shared_mean && !values.empty()) put(out, 0, mean(values));
  with_half(coding, exponent, [values, out](const auto half) {
    for (std::size_t j = 0; j < values.size(); ++j) put(out, 2 * j, half.narrow(values[j]));
    if (values.size() % 2 != 0) put(out, 2 * values.size(), std::uint16_t{0});
  });
}

void decode_values(ValueCoding coding, int exponent, std::span<const std::byte> in, std::size_t position,
                   std::span<float> values) {
  if (coding == ValueCoding::shared_mean && !values.empty()) {
    const auto shared = get<float>(in, 0);
    check(std::isfinite(shared), position, "value out of range");
    std::fill(values.begin(), values.end(), shared);
  }
  with_half(coding, exponent, [&](const auto half) {
    std::int32_t largest = 0;
    for (std::size_t j = 0; j < values.size(); ++j) {
      const auto bits = get<std::uint16_t>(in, 2 * j);
      largest = std::max(largest, bits & 0x7fff);
      values[j] = half.widen(bits);
    }
    if (largest > half.kLargest)
      for (std::size_t at = 0;; at += 2)
        check((get<std::uint16_t>(in, at) & 0x7fff) <= half.kLargest, position + at, "value out of range");
    const std::size_t used = 2 * values.size();
    check(used == in.size() || get<std::uint16_t>(in, used) == 0, position + used, "unused bytes are not zero");
  });
}

}  // namespace thinwire
