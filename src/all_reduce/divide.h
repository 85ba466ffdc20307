// Sums become means.
#pragma once

#include <bit>
#include <cstddef>
#include <span>

namespace thinwire {

/// Each value <- value / ranks, rounded once.
inline void divide(std::span<float> values, std::size_t ranks) noexcept {
  const auto divisor = static_cast<float>(ranks);
  if (std::has_single_bit(ranks)) {  // its reciprocal is exact, so a product is the same number, several times faster
    const float factor = 1.0f / divisor;
    for (float& value : values) value *= factor;
  } else {
    for (float& value : values) value /= divisor;
  }
}

}  // namespace thinwire
