// Kernels of the selection stage: one block at a time, the same result on every SIMD target.
#pragma once

#include <cstddef>
#include <cstdint>

namespace thinwire {

/// Positions, ascending, of the values [count] whose magnitude key is at least `bound`; count <= kBlock. Returns how many.
/// `hits` needs room for count + 1.
std::size_t find_at_least(const float* values, std::size_t count, std::uint32_t bound, std::uint32_t* hits);

}  // namespace thinwire
