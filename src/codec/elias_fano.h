// Elias–Fano coding of ascending indices (Elias 1974, Fano 1971): of each index the low bits as they are, the rest in
// unary as its distance from the one before.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace thinwire {

/// True if the indices ascend strictly and lie in [begin, begin + extent).
inline bool ascend_inside(std::span<const std::uint32_t> indices, std::uint32_t begin, std::uint32_t extent) noexcept {
  if (indices.empty()) return true;
  std::uint32_t wrong = 0;  // no early way out: this becomes vector code
  for (std::size_t j = 1; j < indices.size(); ++j) wrong |= static_cast<std::uint32_t>(indices[j] <= indices[j - 1]);
  return wrong == 0 && indices.front() >= begin && indices.back() - begin < extent;
}

/// Of each of `count` <= `extent` indices; no other number makes the coding smaller. 0 without entries.
unsigned elias_fano_low_bits(std::size_t extent, std::size_t count) noexcept;

/// A multiple of 4 that never falls as `count` grows: a bound for all smaller counts too.
std::size_t elias_fano_bytes(std::size_t extent, std::size_t count) noexcept;

/// Writes elias_fano_bytes(extent, indices.size()) bytes to `out`, for ascending indices in [begin, begin + extent).
void elias_fano_encode(std::span<const std::uint32_t> indices, std::uint32_t begin, std::uint32_t extent,
                       std::span<std::byte> out) noexcept;

/// indices <- what `in`, of elias_fano_bytes(extent, indices.size()) bytes, holds. They ascend strictly and lie in
/// [begin, begin + extent), else corrupt_payload; `position` is that of `in` in its payload.
void elias_fano_decode(std::span<const std::byte> in, std::size_t position, std::uint32_t begin, std::uint32_t extent,
                       std::span<std::uint32_t> indices);

}  // namespace thinwire
