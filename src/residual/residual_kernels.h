// Kernels of the residual stage: one block at a time, the same bits on every SIMD target.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "thinwire/residual.h"

namespace thinwire {

/// u and v of one element take in g as `rule` says. False if the new v would not be finite; then nothing changes.
inline bool accumulate_element(const MomentumRule& rule, float g, float& u, float& v) noexcept {
  float velocity = rule.momentum * u;
  velocity += g;
  float addend = rule.momentum == 0.0f ? g : velocity;
  if (rule.nesterov) {
    addend = rule.momentum * velocity;
    addend += g;
  }
  const float kept = rule.residual_decay * v;
  const float value = rule.error_feedback ? kept + addend : addend;
  if ((std::bit_cast<std::uint32_t>(value) & 0x7f800000u) == 0x7f800000u) return false;
  v = value;
  if (rule.momentum != 0.0f) u = velocity;
  return true;
}

/// u and v [count] take in g [count] as `rule` says; u is not touched without momentum. Elements whose new v would not be
/// finite keep u and v. Returns the first such element, or count.
std::size_t accumulate_block(const MomentumRule& rule, const float* g, float* u, float* v, std::size_t count);

/// The same, and in the same loop: positions, ascending, of the elements whose new v is of the side and has a magnitude
/// key of at least `bound`, to `hits` (room for count + 1), how many to `found`. count <= kBlock.
std::size_t accumulate_and_find(const MomentumRule& rule, const float* g, float* u, float* v, std::size_t count,
                                std::uint32_t bound, Side side, std::uint32_t* hits, std::size_t& found);

}  // namespace thinwire
