// A small model, any options for it, and what a step must leave in its states.
#pragma once

#include "fuzz.h"
#include "reference/residual.h"
#include "thinwire/reducer.h"

namespace thinwire::fuzz {

inline Selector take_selector(Input& input) {
  constexpr double kDensities[] = {0.01, 0.1, 0.5, 1.0};
  const double density = kDensities[input.below(4)];
  switch (input.below(6)) {
    case 0:
      return TopK{density};
    case 1:
      return TrimmedTopK{density};
    case 2:
      return HashedSlots{.density = density, .layout = HashedSlots::Layout::a};
    case 3:
      return HashedSlots{.density = density};
    case 4:
      return ThresholdSearch{.density = density, .reuse_interval = 1 + input.below(4)};
    default:
      return SampledTopK{density};
  }
}

/// Options that may not go together: then the Reducer refuses them.
inline ReducerOptions take_options(Input& input) {
  ReducerOptions options;
  options.selector = take_selector(input);
  options.unit = input.chance() ? Unit::bucket : Unit::parameter;
  options.codec = {.indices = input.chance() ? IndexCoding::elias_fano : IndexCoding::raw_u32,
                   .values = static_cast<ValueCoding>(input.below(4))};
  const std::uint32_t bits = input.take<std::uint8_t>();
  options.momentum = (bits & 1) != 0 ? 0.9f : 0.0f;
  options.nesterov = (bits & 2) != 0;
  options.momentum_masking = (bits & 4) != 0;
  options.rounding_feedback = (bits & 8) == 0;
  options.residual_decay = (bits & 16) != 0 ? 0.75f : 1.0f;
  options.error_feedback = (bits & 32) == 0;
  if ((bits & 64) != 0) options.all_reduce = SparseAllReduce::dense;
  options.clip_norm = (bits & 128) != 0 ? 1e6f : 0.0f;
  options.dense_below = 20;
  return options;
}

inline std::vector<Parameter> take_parameters(Input& input) {
  std::vector<Parameter> parameters;
  for (std::uint32_t i = 1 + input.below(3); i > 0; --i)
    parameters.push_back({std::string(1, static_cast<char>('a' + i)), input.below(256) * (1 + input.below(4))});
  return parameters;
}

inline Bucket bucket_of(const std::vector<Parameter>& parameters, Input& input) {
  Bucket bucket;
  for (const Parameter& parameter : parameters)
    bucket.slices.push_back({parameter.name, parameter.numel, input.below(8) != 7});
  return bucket;
}

inline std::vector<float> take_gradient(const Bucket& bucket, Input& input) {
  std::vector<float> gradient;
  const std::uint32_t pattern = input.below(64);
  for (const BucketSlice& slice : bucket.slices)
    for (std::size_t i = 0; i < slice.numel; ++i)
      gradient.push_back(!slice.has_gradient ? 0.0f
                         : pattern < 32      ? static_cast<float>((i * 37 + pattern) % 101) / 8 - 6
                                             : input.value());
  return gradient;
}

inline std::size_t numel_of(const std::vector<ParameterState>& states) {
  std::size_t sum = 0;
  for (const ParameterState& state : states) sum += state.residual.size();
  return sum;
}

inline MomentumRule rule_of(const ReducerOptions& options) {
  return {.momentum = options.momentum,
          .nesterov = options.nesterov,
          .error_feedback = options.error_feedback,
          .residual_decay = options.residual_decay};
}

/// States as a gradient leaves them, before anything is sent. Parameters are in the order of the bucket.
inline std::vector<ParameterState> accumulated(std::vector<ParameterState> states, const ReducerOptions& options,
                                               const std::vector<float>& gradient) {
  std::size_t at = 0;
  for (ParameterState& state : states) {
    reference::ResidualState both;
    both.v = state.residual;
    both.u = state.velocity;
    reference::accumulate(both, rule_of(options), std::span(gradient).subspan(at, state.residual.size()));
    at += state.residual.size();
    state.residual = both.v;
    state.velocity = both.u;
  }
  return states;
}

inline bool same_states(const std::vector<ParameterState>& a, const std::vector<ParameterState>& b) {
  return std::ranges::equal(a, b, [](const ParameterState& x, const ParameterState& y) {
    return x.name == y.name && same(x.residual, y.residual) && same(x.velocity, y.velocity);
  });
}

inline void expect_finite(const std::vector<ParameterState>& states) {
  for (const ParameterState& state : states)
    for (const std::vector<float>* values : {&state.residual, &state.velocity})
      expect(std::ranges::all_of(*values, [](float value) { return std::isfinite(value); }),
             "residual and velocity stay finite");
}

}  // namespace thinwire::fuzz
