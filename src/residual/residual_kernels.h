// Kernels of the residual stage: one block at a time, the same bits on every SIMD target.
#pragma once

#include <cstddef>

#include "thinwire/residual.h"

namespace thinwire {

/// u and v [count] take in g [count] as `rule` says; u is not touched without momentum. Elements whose new v would not be
/// finite keep u and v. Returns the first such element, or count.
std::size_t accumulate_block(const MomentumRule& rule, const float* g, float* u, float* v, std::size_t count);

}  // namespace thinwire
