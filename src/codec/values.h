// Values as the wire holds them: f32, bf16, f16 times a power of two, or one mean for all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "thinwire/codec.h"

namespace thinwire {

/// f16 values are multiples of 2^(exponent - 24). From -125 on these are f32 numbers, subnormal ones included; up to 113
/// the largest is below 2^128.
inline constexpr int kMinExponent = -125;
inline constexpr int kMaxExponent = 113;

/// A multiple of 4.
std::size_t value_bytes(ValueCoding coding, std::size_t count) noexcept;

/// What the header of a section with these values says: 0 unless f16. The same for the values that round_values makes.
int value_exponent(ValueCoding coding, std::span<const float> values) noexcept;

/// Writes value_bytes(coding, values.size()) bytes to `out`.
void encode_values(ValueCoding coding, int exponent, std::span<const float> values, std::span<std::byte> out) noexcept;

/// values <- what `in`, of value_bytes(coding, values.size()) bytes, holds; all codings but f32. They are finite and
/// unused bytes are zero, else corrupt_payload; `position` is that of `in` in its payload.
void decode_values(ValueCoding coding, int exponent, std::span<const std::byte> in, std::size_t position,
                   std::span<float> values);

}  // namespace thinwire
