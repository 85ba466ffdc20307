// Stage 1: the error-feedback state. Enters: a bucket's gradient. Leaves: accumulated values for the selectors; later,
// what was sent is taken out again.
#include "thinwire/residual.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <unordered_map>
#include <utility>

#include "core/array.h"
#include "core/check.h"
#include "core/float16.h"
#include "core/magnitude.h"
#include "residual/residual_kernels.h"

namespace thinwire {

struct Residual::State {
  Parameter parameter;
  MomentumRule rule;
  FloatArray v;
  FloatArray u;  // empty without momentum

  float* velocity() noexcept { return u.empty() ? nullptr : u.data(); }
};

namespace {

using State = Residual::State;
using Segment = Residual::Segment;

// What left in a step, in the order in which it left: what was sent last comes back first.
struct Sent {
  std::vector<Segment> unit;
  TakenEntries entries;
  bool masking = false;
  std::span<const float> whole;  // instead of entries, of a unit of one segment; empty once struck from the list
};
struct Remembered {
  State* state;
  FloatArray v;
  FloatArray u;
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
  require(rule.residual_decay > 0.0f && rule.residual_decay <= 1.0f,
          "residual_decay is " + std::to_string(rule.residual_decay) + of + ", not in (0, 1]");
  require(rule.error_feedback || rule.residual_decay == 1.0f,
          "error_feedback is off but residual_decay is " + std::to_string(rule.residual_decay) + of);
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

// How far ahead the random accesses to u and v are asked for.
constexpr std::size_t kAhead = 16;

// Calls f(state, index in the parameter, j) for each offset [count] that is no empty slot, asking for memory ahead. All
// lie in the unit.
template <class F>
void for_each_entry(std::span<const Segment> unit, const std::uint32_t* offsets, std::size_t count, const F& f) {
  const Segment* coming = nullptr;
  const Segment* segment = nullptr;
  for (std::size_t j = 0; j < count + kAhead; ++j) {
    if (j < count && offsets[j] != kEmptySlot) {
      coming = find_segment(unit, offsets[j], coming);
      const std::size_t index = offsets[j] - coming->offset;
      __builtin_prefetch(coming->state->v.data() + index, 1);
      if (!coming->state->u.empty()) __builtin_prefetch(coming->state->u.data() + index, 1);
    }
    if (j < kAhead || offsets[j - kAhead] == kEmptySlot) continue;
    segment = find_segment(unit, offsets[j - kAhead], segment);
    f(*segment->state, offsets[j - kAhead] - segment->offset, j - kAhead);
  }
}

}  // namespace

struct Residual::Impl {
  std::deque<State> states;  // addresses stay
  std::unordered_map<std::string, State*> by_name;
  // The undo list of the step.
  std::vector<Sent> sent;
  std::vector<TakenEntries> spare;  // whose memory the next entries may use
  std::vector<Remembered> remembered;

  // Forgets the undo list, but not its memory.
  void keep_memory() noexcept {
    if (spare.capacity() >= sent.size()) {
      spare.clear();
      for (Sent& record : sent) spare.push_back(std::move(record.entries));
    }
    sent.clear();
  }
  TakenEntries take_spare() {
    if (spare.empty()) return {};
    TakenEntries entries = std::move(spare.back());
    spare.pop_back();
    return entries;
  }

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
  State state{.parameter = parameter, .rule = rule, .v = FloatArray(parameter.numel), .u = {}};
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

void Residual::peek(std::span<const Segment> unit, const GradientView& bucket, std::span<const UnitRun> runs,
                    float* out) {
  const float* const gradients = plain_gradient(bucket);
  // Most runs lie in pages of their own. Plain reads wait for their addresses and lines side by side, where prefetches
  // would wait for one address after the other; so a batch is read first and computed with afterwards.
  constexpr std::size_t kBatch = 64;
  const auto touch = [](const float* value) { static_cast<void>(*static_cast<const volatile float*>(value)); };
  std::array<const Segment*, kBatch> segments{};
  for (std::size_t begin = 0; begin < runs.size(); begin += kBatch) {
    const std::span<const UnitRun> batch = runs.subspan(begin, std::min(kBatch, runs.size() - begin));
    for (std::size_t r = 0; r < batch.size(); ++r) {
      segments[r] = find_segment(unit, batch[r].offset, segments[r == 0 ? 0 : r - 1]);
      const State& state = *segments[r]->state;
      for (const std::uint32_t at : {batch[r].offset, batch[r].offset + batch[r].count - 1}) {
        touch(state.v.data() + (at - segments[r]->offset));
        if (!state.u.empty()) touch(state.u.data() + (at - segments[r]->offset));
        if (gradients != nullptr) touch(gradients + at);
      }
    }
    for (std::size_t r = 0; r < batch.size(); ++r) {
      const State& state = *segments[r]->state;
      for (std::uint32_t offset = batch[r].offset; offset < batch[r].offset + batch[r].count; ++offset) {
        const std::size_t index = offset - segments[r]->offset;
        float gradient = 0.0f;
        if (gradients != nullptr)
          gradient = gradients[offset];
        else
          load_gradient(bucket, offset, 1, &gradient);
        float velocity = state.u.empty() ? 0.0f : state.u[index];
        float value = state.v[index];
        accumulate_element(state.rule, gradient, velocity, value);
        *out++ = value;
      }
    }
  }
}

std::optional<std::uint32_t> Residual::accumulate(std::span<const Segment> unit, const GradientView& bucket,
                                                  const BlockVisitor& visit, std::uint32_t bound, Side side) {
  std::array<float, kBlock> widened;
  std::array<std::uint32_t, kBlock + 1> hits;
  std::optional<std::uint32_t> non_finite;
  for (const Segment& segment : unit) {
    State& state = *segment.state;
    for (std::size_t begin = 0; begin < state.v.size(); begin += kBlock) {
      const std::size_t n = std::min(kBlock, state.v.size() - begin);
      const auto offset = static_cast<std::uint32_t>(segment.offset + begin);
      const float* gradient = widened.data();
      if (const float* const plain = plain_gradient(bucket))
        gradient = plain + offset;
      else
        load_gradient(bucket, offset, n, widened.data());
      float* v = state.v.data() + begin;
      float* u = state.u.empty() ? nullptr : state.u.data() + begin;
      std::size_t found = 0;
      const std::size_t first =
          bound == kNoBound ? accumulate_block(state.rule, gradient, u, v, n)
                            : accumulate_and_find(state.rule, gradient, u, v, n, bound, side, hits.data(), found);
      if (first < n && !non_finite) non_finite = static_cast<std::uint32_t>(offset + first);
      if (visit)
        bound = visit({.values = v, .velocity = u, .count = n, .offset = offset, .hits = {hits.data(), found}});
    }
  }
  return non_finite;
}

void Residual::put_back(std::span<const Segment> unit, const TakenEntries& taken, bool masking) noexcept {
  for_each_entry(unit, taken.indices.data(), taken.count, [&](State& state, std::size_t index, std::size_t j) {
    state.v[index] = taken.values[j];
    if (masking && !state.u.empty()) state.u[index] = taken.velocities[j];
  });
}

void Residual::settle(std::span<const Segment> unit, const SparseGradient& sent, bool masking, TakenEntries&& taken,
                      bool keep_rounding) {
  const bool in_place = taken.count == 0;
  if (in_place) {
    const Segment* segment = nullptr;
    for (const std::uint32_t offset : sent.indices) {
      if (offset == kEmptySlot) continue;
      segment = find_segment(unit, offset, segment);
      require(segment != nullptr, "sent index " + std::to_string(offset) + " lies outside its unit");
    }
    taken.reserve(sent.nnz());
    std::copy(sent.indices.begin(), sent.indices.end(), taken.indices.begin());
    std::fill_n(taken.values.begin(), sent.nnz(), 0.0f);  // of free slots
  }
  Sent record{.unit = {unit.begin(), unit.end()}, .entries = impl_->take_spare(), .masking = masking, .whole = {}};
  impl_->sent.reserve(impl_->sent.size() + 1);
  impl_->spare.reserve(impl_->sent.capacity());
  // From here on nothing can fail.
  taken.count = sent.nnz();
  if (in_place)
    for_each_entry(unit, taken.indices.data(), sent.nnz(), [&](State& state, std::size_t index, std::size_t j) {
      taken.values[j] = std::exchange(state.v[index], 0.0f);
      taken.velocities[j] = masking && !state.u.empty() ? std::exchange(state.u[index], 0.0f) : 0.0f;
    });
  const Segment* segment = nullptr;
  for (std::size_t j = 0; keep_rounding && j < sent.nnz(); ++j) {
    if (taken.values[j] == sent.values[j]) continue;  // not so where a coding has rounded
    segment = find_segment(unit, taken.indices[j], segment);
    segment->state->v[taken.indices[j] - segment->offset] = taken.values[j] - sent.values[j];
  }
  std::swap(record.entries, taken);
  taken.count = 0;
  impl_->sent.push_back(std::move(record));
}

void Residual::settle_dense(const Segment& segment, std::span<float> sent) {
  State& state = *segment.state;
  require(sent.size() == state.v.size(), "the buffer for parameter " + quoted(state.parameter.name) + " has " +
                                             std::to_string(sent.size()) + " elements, not " +
                                             std::to_string(state.v.size()));
  impl_->sent.push_back({.unit = {segment}, .entries = {}, .masking = false, .whole = sent});
  std::copy(state.v.begin(), state.v.end(), sent.begin());
  std::fill(state.v.begin(), state.v.end(), 0.0f);
}

void Residual::remember(const Segment& segment) {
  impl_->remembered.push_back({.state = segment.state, .v = segment.state->v, .u = segment.state->u});
}

void Residual::restore(const Segment& segment) {
  State* const state = segment.state;
  for (Sent& sent : impl_->sent)
    for (const Segment& part : sent.unit) {
      if (part.state != state) continue;
      sent.whole = {};
      for (std::uint32_t& index : std::span(sent.entries.indices).first(sent.entries.count))
        if (index >= part.offset && index - part.offset < state->v.size()) index = kEmptySlot;
    }
  for (const Remembered& before : impl_->remembered) {
    if (before.state != state) continue;
    state->v = before.v;
    state->u = before.u;
  }
}

void Residual::commit() noexcept {
  impl_->keep_memory();
  impl_->remembered.clear();
}

void Residual::undo() noexcept {
  for (auto sent = impl_->sent.rbegin(); sent != impl_->sent.rend(); ++sent) {
    put_back(sent->unit, sent->entries, sent->masking);
    std::copy(sent->whole.begin(), sent->whole.end(), sent->unit.front().state->v.begin());
  }
  commit();
}

std::vector<ParameterState> Residual::state() const {
  std::vector<ParameterState> states;
  for (const State& state : impl_->states)
    states.push_back({.name = state.parameter.name,
                      .residual = {state.v.begin(), state.v.end()},
                      .velocity = {state.u.begin(), state.u.end()}});
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
  // Nothing can fail any more: the sizes are the same.
  for (State& state : impl_->states) {
    const ParameterState& from = *given.at(&state);
    std::copy(from.residual.begin(), from.residual.end(), state.v.begin());
    std::copy(from.velocity.begin(), from.velocity.end(), state.u.begin());
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
