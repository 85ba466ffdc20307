// Stage 1: the error-feedback state. Enters: a bucket's gradient. Leaves: accumulated values for the selectors; later,
// what was sent is taken out again.
#include "thinwire/residual.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <unordered_map>
#include <utility>

#include "core/check.h"
#include "core/float16.h"
#include "core/magnitude.h"
#include "residual/residual_kernels.h"

namespace thinwire {

struct Residual::State {
  Parameter parameter;
  MomentumRule rule;
  std::vector<float> v;
  std::vector<float> u;  // empty without momentum

  float* velocity() noexcept { return u.empty() ? nullptr : u.data(); }
};

namespace {

using State = Residual::State;
using Segment = Residual::Segment;

struct SentEntry {
  State* state;         // null once struck from the list
  std::uint32_t index;  // in the parameter
  float v;
  float u;
};
struct SentWhole {
  State* state;  // null once struck from the list
  std::span<const float> v;
  std::size_t entries_before;  // single entries sent before it: what was sent last comes back first
};
struct Remembered {
  State* state;
  std::vector<float> v;
  std::vector<float> u;
};

bool all_finite(std::span<const float> values) {
  return std::all_of(values.begin(), values.end(), [](float value) { return std::isfinite(value); });
}

void check_rule(const Parameter& parameter, const MomentumRule& rule) {
  const std::string of = " for parameter " + quoted(parameter.name);
  require(rule.momentum >= 0.0f && rule.momentum < 1.0f,
          "momentum is " + std::to_string(rule.momentum) + of + ", not in [0, 1)");
  require(!rule.nesterov || rule.momentum != 0.0f, "nesterov is set without momentum" + of);
  require(rule.error_feedback || rule.momentum == 0.0f, "error_feedback is off but momentum is " +
                                                            std::to_string(rule.momentum) + of +
                                                            ": a local velocity would itself be a memory");
}

// The segment that holds a bucket offset, given the one that held the last.
const Segment* find_segment(std::span<const Segment> unit, std::uint32_t offset, const Segment* hint) {
  const auto holds = [offset](const Segment& s) {
    return offset >= s.offset && offset - s.offset < s.state->parameter.numel;
  };
  if (hint != nullptr && holds(*hint)) return hint;
  auto after = std::upper_bound(unit.begin(), unit.end(), offset,
                                [](std::uint32_t value, const Segment& s) { return value < s.offset; });
  while (after != unit.begin())
    if (holds(*--after))
      return &*after;
    else if (after->state->parameter.numel != 0)
      break;
  return nullptr;
}

}  // namespace

struct Residual::Impl {
  std::deque<State> states;  // addresses stay
  std::unordered_map<std::string, State*> by_name;
  // The undo list of the step.
  std::vector<SentEntry> sent_entries;
  std::vector<SentWhole> sent_whole;
  std::vector<Remembered> remembered;

  State& find(std::string_view name) const {
    const auto at = by_name.find(std::string(name));
    require(at != by_name.end(), "unknown parameter " + quoted(name));
    return *at->second;
  }
};

Residual::Residual() : impl_(std::make_unique<Impl>()) {}
Residual::~Residual() = default;
Residual::Residual(Residual&&) noexcept = default;
Residual& Residual::operator=(Residual&&) noexcept = default;

void Residual::add(const Parameter& parameter, const MomentumRule& rule) {
  check_rule(parameter, rule);
  if (const auto known = impl_->by_name.find(parameter.name); known != impl_->by_name.end()) {
    const State& state = *known->second;
    require(state.parameter.numel == parameter.numel,
            "parameter " + quoted(parameter.name) + " has " + std::to_string(state.parameter.numel) +
                " elements and cannot be added again with " + std::to_string(parameter.numel));
    require(state.rule == rule, "parameter " + quoted(parameter.name) + " cannot be added again with another momentum");
    return;
  }
  State state{.parameter = parameter, .rule = rule, .v = std::vector<float>(parameter.numel), .u = {}};
  if (rule.momentum != 0.0f) state.u.resize(parameter.numel);
  impl_->states.push_back(std::move(state));
  impl_->by_name.emplace(parameter.name, &impl_->states.back());
}

bool Residual::contains(std::string_view name) const noexcept {
  return std::any_of(impl_->states.begin(), impl_->states.end(),
                     [name](const State& state) { return state.parameter.name == name; });
}

std::span<const float> Residual::residual(std::string_view name) const { return impl_->find(name).v; }
std::span<const float> Residual::velocity(std::string_view name) const { return impl_->find(name).u; }

Residual::Segment Residual::segment(std::string_view name, std::size_t numel, std::uint32_t offset) const {
  State& state = impl_->find(name);
  require(state.parameter.numel == numel, "parameter " + quoted(name) + " has " +
                                              std::to_string(state.parameter.numel) + " elements, its bucket slice " +
                                              std::to_string(numel));
  return {.state = &state, .offset = offset};
}

UnitSegment Residual::view(const Segment& segment) noexcept {
  return {.values = segment.state->v.data(), .numel = segment.state->v.size(), .offset = segment.offset};
}

void Residual::peek(const Segment& segment, const GradientView& bucket, std::size_t begin, std::size_t count,
                    float* out) {
  std::array<float, kBlock> gradient;
  std::array<float, kBlock> velocity;
  const State& state = *segment.state;
  while (count > 0) {
    const std::size_t n = std::min(count, kBlock);
    load_gradient(bucket, segment.offset + begin, n, gradient.data());
    std::copy_n(state.v.data() + begin, n, out);
    if (!state.u.empty()) std::copy_n(state.u.data() + begin, n, velocity.data());
    accumulate_block(state.rule, gradient.data(), velocity.data(), out, n);
    begin += n;
    out += n;
    count -= n;
  }
}

std::optional<std::uint32_t> Residual::accumulate(std::span<const Segment> unit, const GradientView& bucket,
                                                  const BlockVisitor& visit) {
  std::array<float, kBlock> widened;
  std::optional<std::uint32_t> non_finite;
  for (const Segment& segment : unit) {
    State& state = *segment.state;
    for (std::size_t begin = 0; begin < state.v.size(); begin += kBlock) {
      const std::size_t n = std::min(kBlock, state.v.size() - begin);
      const auto offset = static_cast<std::uint32_t>(segment.offset + begin);
      const float* gradient = widened.data();
      if (bucket.dtype == DType::f32)
        gradient = static_cast<const float*>(bucket.data) + offset;
      else
        load_gradient(bucket, offset, n, widened.data());
      float* velocity = state.u.empty() ? nullptr : state.u.data() + begin;
      const std::size_t first = accumulate_block(state.rule, gradient, velocity, state.v.data() + begin, n);
      if (first < n && !non_finite) non_finite = static_cast<std::uint32_t>(offset + first);
      if (visit) visit({.values = state.v.data() + begin, .count = n, .offset = offset});
    }
  }
  return non_finite;
}

void Residual::settle(std::span<const Segment> unit, const SparseGradient& sent, bool masking) {
  const Segment* segment = nullptr;
  for (const std::uint32_t offset : sent.indices) {
    if (offset == kEmptySlot) continue;
    segment = find_segment(unit, offset, segment);
    require(segment != nullptr, "sent index " + std::to_string(offset) + " lies outside its unit");
  }
  impl_->sent_entries.reserve(impl_->sent_entries.size() + sent.nnz());
  for (std::size_t j = 0; j < sent.nnz(); ++j) {
    if (sent.indices[j] == kEmptySlot) continue;
    segment = find_segment(unit, sent.indices[j], segment);
    State& state = *segment->state;
    const std::uint32_t index = sent.indices[j] - segment->offset;
    float* velocity = state.velocity();
    impl_->sent_entries.push_back(
        {.state = &state, .index = index, .v = state.v[index], .u = velocity != nullptr ? velocity[index] : 0.0f});
    state.v[index] -= sent.values[j];
    if (masking && velocity != nullptr) velocity[index] = 0.0f;
  }
}

void Residual::settle_dense(const Segment& segment, std::span<float> sent) {
  State& state = *segment.state;
  require(sent.size() == state.v.size(), "the buffer for parameter " + quoted(state.parameter.name) + " has " +
                                             std::to_string(sent.size()) + " elements, not " +
                                             std::to_string(state.v.size()));
  impl_->sent_whole.push_back({.state = &state, .v = sent, .entries_before = impl_->sent_entries.size()});
  std::copy(state.v.begin(), state.v.end(), sent.begin());
  std::fill(state.v.begin(), state.v.end(), 0.0f);
}

void Residual::remember(const Segment& segment) {
  impl_->remembered.push_back({.state = segment.state, .v = segment.state->v, .u = segment.state->u});
}

void Residual::restore(const Segment& segment) {
  State* const state = segment.state;
  for (SentEntry& entry : impl_->sent_entries)
    if (entry.state == state) entry.state = nullptr;
  for (SentWhole& whole : impl_->sent_whole)
    if (whole.state == state) whole.state = nullptr;
  for (const Remembered& before : impl_->remembered) {
    if (before.state != state) continue;
    state->v = before.v;
    state->u = before.u;
  }
}

void Residual::commit() noexcept {
  impl_->sent_entries.clear();
  impl_->sent_whole.clear();
  impl_->remembered.clear();
}

void Residual::undo() noexcept {
  const auto take_back_entries = [this](std::size_t down_to) {
    std::vector<SentEntry>& entries = impl_->sent_entries;
    for (; entries.size() > down_to; entries.pop_back()) {
      const SentEntry& entry = entries.back();
      if (entry.state == nullptr) continue;
      entry.state->v[entry.index] = entry.v;
      if (!entry.state->u.empty()) entry.state->u[entry.index] = entry.u;
    }
  };
  for (auto whole = impl_->sent_whole.rbegin(); whole != impl_->sent_whole.rend(); ++whole) {
    take_back_entries(whole->entries_before);
    if (whole->state != nullptr) std::copy(whole->v.begin(), whole->v.end(), whole->state->v.begin());
  }
  take_back_entries(0);
  commit();
}

std::vector<ParameterState> Residual::state() const {
  std::vector<ParameterState> states;
  for (const State& state : impl_->states)
    states.push_back({.name = state.parameter.name, .residual = state.v, .velocity = state.u});
  return states;
}

void Residual::load(std::span<const ParameterState> states) {
  std::unordered_map<const State*, const ParameterState*> given;
  for (const ParameterState& from : states) {
    const State& state = impl_->find(from.name);
    const std::string of = " of parameter " + quoted(from.name);
    require(given.emplace(&state, &from).second, "the state" + of + " stands twice");
    require(from.residual.size() == state.v.size(), "the residual" + of + " has " +
                                                        std::to_string(from.residual.size()) + " elements, not " +
                                                        std::to_string(state.v.size()));
    require(from.velocity.size() == state.u.size(), "the velocity" + of + " has " +
                                                        std::to_string(from.velocity.size()) + " elements, not " +
                                                        std::to_string(state.u.size()));
    require(all_finite(from.residual), "the residual" + of + " holds a value that is not finite");
    require(all_finite(from.velocity), "the velocity" + of + " holds a value that is not finite");
  }
  for (const State& state : impl_->states)
    require(given.contains(&state), "the state of parameter " + quoted(state.parameter.name) + " is missing");
  // Copies first: should memory run out, nothing is changed.
  std::vector<std::pair<std::vector<float>, std::vector<float>>> copies;
  for (const State& state : impl_->states) copies.emplace_back(given[&state]->residual, given[&state]->velocity);
  for (std::size_t i = 0; i < copies.size(); ++i) {
    impl_->states[i].v.swap(copies[i].first);
    impl_->states[i].u.swap(copies[i].second);
  }
  commit();
}

void Residual::set_velocity(std::string_view name, std::span<const float> velocity) {
  State& state = impl_->find(name);
  const std::string of = "the velocity of parameter " + quoted(name);
  require(velocity.size() == state.u.size(),
          of + " has " + std::to_string(velocity.size()) + " elements, not " + std::to_string(state.u.size()));
  require(all_finite(velocity), of + " holds a value that is not finite");
  std::copy(velocity.begin(), velocity.end(), state.u.begin());
}

double Residual::norm() const {
  double sum = 0;
  for (const State& state : impl_->states) sum += sum_of_squares(state.v.data(), state.v.size());
  return std::sqrt(sum);
}

}  // namespace thinwire
