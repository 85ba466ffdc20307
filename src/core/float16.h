// Half-precision gradients: exact widening to f32, and rounding back to nearest, ties to even.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "thinwire/types.h"

namespace thinwire {

inline float bf16_to_f32(std::uint16_t bits) noexcept { return std::bit_cast<float>(std::uint32_t{bits} << 16); }

inline std::uint16_t f32_to_bf16(float value) noexcept {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>(bits >> 16 | 0x40u);  // NaN stays NaN
  return static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

inline float f16_to_f32(std::uint16_t half) noexcept {
  const std::uint32_t sign = std::uint32_t{half & 0x8000u} << 16;
  const std::uint32_t magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00u) return std::bit_cast<float>(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  // As an f32 with the exponent bias of f16, times 2^112: exact, subnormals included.
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude << 13) * 0x1p112f));
}

inline std::uint16_t f32_to_f16(float value) noexcept {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = bits >> 16 & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // rounds to 65 536 or more
  if (magnitude < 0x38800000u) {
    // Subnormal: adding 0.5 leaves the 10 bits that count, correctly rounded, at the end of the significand.
    const std::uint32_t rounded = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f);
    return static_cast<std::uint16_t>(sign | (rounded - 0x3f000000u));
  }
  const std::uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u) - 0x38000000u;
  return static_cast<std::uint16_t>(sign | rounded >> 13);
}

/// What the elements of a buffer are multiplied by, in f32, to be the clipped gradient in true units.
inline float read_factor(const GradientView& from) noexcept { return from.clip / from.loss_scale; }

/// The elements of a gradient buffer, where they can be read as they lie; else null.
inline const float* plain_gradient(const GradientView& from) noexcept {
  return from.dtype == DType::f32 && read_factor(from) == 1.0f ? static_cast<const float*>(from.data) : nullptr;
}

/// out [count] <- elements [begin, begin + count) of a gradient buffer, as f32, in true units and clipped.
inline void load_gradient(const GradientView& from, std::size_t begin, std::size_t count, float* out) {
  if (from.dtype == DType::f32) {
    std::copy_n(static_cast<const float*>(from.data) + begin, count, out);
  } else {
    const auto* half = static_cast<const std::uint16_t*>(from.data) + begin;
    if (from.dtype == DType::f16)
      for (std::size_t i = 0; i < count; ++i) out[i] = f16_to_f32(half[i]);
    else
      for (std::size_t i = 0; i < count; ++i) out[i] = bf16_to_f32(half[i]);
  }
  if (const float factor = read_factor(from); factor != 1.0f)
    for (std::size_t i = 0; i < count; ++i) out[i] *= factor;
}

/// Elements [begin, begin + count) of a gradient buffer <- values times its loss scale, rounded once. Of an f32 buffer
/// `values` may be those elements. Returns whether all are finite there; those of f32 without a loss scale are taken to be.
inline bool store_gradient(const GradientView& to, std::size_t begin, std::size_t count, const float* values) {
  const float scale = to.loss_scale;
  std::uint32_t largest = 0;  // bits of the largest magnitude
  if (to.dtype == DType::f32) {
    auto* out = static_cast<float*>(to.data) + begin;
    if (scale == 1.0f) {
      if (out != values) std::copy_n(values, count, out);
      return true;
    }
    for (std::size_t i = 0; i < count; ++i) {
      out[i] = values[i] * scale;
      largest = std::max(largest, std::bit_cast<std::uint32_t>(out[i]) & 0x7fffffffu);
    }
    return largest < 0x7f800000u;
  }
  auto* half = static_cast<std::uint16_t*>(to.data) + begin;
  for (std::size_t i = 0; i < count; ++i) {
    half[i] = to.dtype == DType::f16 ? f32_to_f16(values[i] * scale) : f32_to_bf16(values[i] * scale);
    largest = std::max(largest, half[i] & 0x7fffu);
  }
  return largest < (to.dtype == DType::f16 ? 0x7c00u : 0x7f80u);
}

}  // namespace thinwire
