// Kernels of the selection stage: one block at a time, the same result on every SIMD target.
#pragma once

#include <cstddef>
#include <cstdint>

#include "thinwire/sparse_gradient.h"

namespace thinwire {

/// Positions, ascending, of the values [count] of the side whose magnitude key is at least `bound`; count <= kBlock.
/// Returns how many. `hits` needs room for count + 1.
std::size_t find_at_least(const float* values, std::size_t count, std::uint32_t bound, Side side, std::uint32_t* hits);

}  // namespace thinwire
