// The residual rule, one element at a time: u <- m·u + g; x = u or m·u + g; v <- d·v + x. Every operation rounds to f32.
#pragma once

#include <cmath>
#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "thinwire/residual.h"

namespace thinwire::reference {

struct ResidualState {
  std::vector<float> v;
  std::vector<float> u;  ///< empty without momentum

  ResidualState() = default;
  ResidualState(std::size_t numel, const MomentumRule& rule) : v(numel, 0.0f), u(rule.momentum > 0 ? numel : 0, 0.0f) {}
};

inline float add(float a, float b) {
  const volatile float sum = a + b;
  return sum;
}
inline float multiply(float a, float b) {
  const volatile float product = a * b;
  return product;
}

/// Returns the first element that is not taken in because its v would not be finite.
inline std::optional<std::size_t> accumulate(ResidualState& state, const MomentumRule& rule, std::span<const float> g) {
  std::optional<std::size_t> first_refused;
  for (std::size_t i = 0; i < g.size(); ++i) {
    float u = 0, x = g[i];
    if (rule.momentum > 0) {
      u = add(multiply(rule.momentum, state.u[i]), g[i]);
      x = rule.nesterov ? add(multiply(rule.momentum, u), g[i]) : u;
    }
    const float v = rule.error_feedback ? add(multiply(rule.residual_decay, state.v[i]), x) : x;
    if (!std::isfinite(v)) {
      if (!first_refused) first_refused = i;
      continue;
    }
    state.v[i] = v;
    if (rule.momentum > 0) state.u[i] = u;
  }
  return first_refused;
}

}  // namespace thinwire::reference
