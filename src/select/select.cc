// Stage 2: which entries travel. Enters: accumulated values of a unit, block by block. Leaves: a SparseGradient.
#include "thinwire/select.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <sstream>
#include <type_traits>
#include <utility>

#include "core/check.h"
#include "core/magnitude.h"
#include "core/text.h"
#include "select/blocks.h"
#include "select/hashed_slots.h"
#include "select/sampled_top_k.h"
#include "select/select_kernels.h"
#include "select/threshold_search.h"
#include "select/top_k.h"
#include "select/trimmed_top_k.h"

namespace thinwire {
namespace {

template <class... Fs>
struct Overloaded : Fs... {
  using Fs::operator()...;
};
template <class... Fs>
Overloaded(Fs...) -> Overloaded<Fs...>;

void require_share(double value, const char* selector, const char* field) {
  require(value > 0.0 && value <= 1.0,
          std::string(field) + " of " + selector + " is " + text_of(value) + ", not in (0, 1]");
}

}  // namespace

std::string to_string(const Selector& selector) {
  std::ostringstream text;
  std::visit(Overloaded{
                 [&](const TopK& s) { text << "top_k(density=" << text_of(s.density) << ")"; },
                 [&](const TrimmedTopK& s) {
                   text << "trimmed_top_k(density=" << text_of(s.density) << ", epsilon=" << text_of(s.epsilon) << ")";
                 },
                 [&](const HashedSlots& s) {
                   text << "hashed_slots(density=" << text_of(s.density)
                        << ", layout=" << (s.layout == HashedSlots::Layout::a ? 'a' : 'b')
                        << ", sample_fraction=" << text_of(s.sample_fraction) << ")";
                 },
                 [&](const ThresholdSearch& s) {
                   text << "threshold_search(density=" << text_of(s.density) << ", reuse_interval=" << s.reuse_interval
                        << ")";
                 },
                 [&](const SampledTopK& s) {
                   text << "sampled_top_k(density=" << text_of(s.density)
                        << ", sample_fraction=" << text_of(s.sample_fraction) << ")";
                 },
             },
             selector);
  return text.str();
}

void validate(const Selector& selector) {
  std::visit(Overloaded{
                 [](const TopK& s) { require_share(s.density, "TopK", "density"); },
                 [](const TrimmedTopK& s) {
                   require_share(s.density, "TrimmedTopK", "density");
                   require(s.epsilon > 0.0 && s.epsilon < 1.0,
                           "epsilon of TrimmedTopK is " + std::to_string(s.epsilon) + ", not in (0, 1)");
                 },
                 [](const HashedSlots& s) {
                   require_share(s.density, "HashedSlots", "density");
                   require_share(s.sample_fraction, "HashedSlots", "sample_fraction");
                 },
                 [](const ThresholdSearch& s) {
                   require_share(s.density, "ThresholdSearch", "density");
                   require(s.reuse_interval >= 1, "reuse_interval of ThresholdSearch is 0, not at least 1");
                 },
                 [](const SampledTopK& s) {
                   require_share(s.density, "SampledTopK", "density");
                   require_share(s.sample_fraction, "SampledTopK", "sample_fraction");
                 },
             },
             selector);
}

double density(const Selector& selector) noexcept {
  return std::visit([](const auto& s) { return s.density; }, selector);
}

std::size_t target_count(const Selector& selector, std::size_t numel) noexcept {
  if (numel == 0) return 0;
  const double count = std::floor(density(selector) * static_cast<double>(numel) + 0.5);
  return std::clamp<std::size_t>(static_cast<std::size_t>(count), 1, numel);
}

std::size_t capacity(const Selector& selector, std::size_t numel) noexcept {
  const std::size_t k = target_count(selector, numel);
  const auto* hashed = std::get_if<HashedSlots>(&selector);
  const bool may_exceed = std::holds_alternative<ThresholdSearch>(selector) ||
                          (hashed != nullptr && hashed->layout == HashedSlots::Layout::b);
  return may_exceed ? std::min(numel, k + (k + 3) / 4) : k;
}

struct Selection::Impl {
  std::vector<UnitSegment> unit;
  SelectionPass pass;
  std::size_t numel = 0;
  TopKSelection top_k;
  TrimmedTopKSelection trimmed;
  HashedSlotsSelection hashed;
  ThresholdSearchSelection search;
  SampledTopKSelection sampled;
  std::size_t method = 0;  // index of the selector in the variant

  // What f yields for the selection of the method in use.
  template <class F>
  auto with_method(const F& f) {
    if (method == 0) return f(top_k);
    if (method == 1) return f(trimmed);
    if (method == 2) return f(hashed);
    if (method == 3) return f(search);
    return f(sampled);
  }
};

Selection::Selection() : impl_(std::make_unique<Impl>()) {}
Selection::~Selection() = default;
Selection::Selection(Selection&&) noexcept = default;
Selection& Selection::operator=(Selection&&) noexcept = default;

void Selection::begin(const Selector& selector, UnitView unit, std::uint32_t seed, SelectionTask task) {
  impl_->unit.assign(unit.begin(), unit.end());
  impl_->pass = std::move(task.pass);
  impl_->numel = unit_numel(unit);
  impl_->method = selector.index();
  if (impl_->numel == 0) return;
  const std::size_t k = target_count(selector, impl_->numel);
  const SampleSource source{
      .unit = impl_->unit, .numel = impl_->numel, .seed = seed, .side = task.side, .pass = &impl_->pass};
  std::visit(Overloaded{
                 [&](const TopK&) { impl_->top_k.begin(source, k); },
                 [&](const TrimmedTopK& s) { impl_->trimmed.begin(source, k, s.epsilon); },
                 [&](const HashedSlots& s) { impl_->hashed.begin(source, s, k, capacity(selector, impl_->numel)); },
                 [&](const ThresholdSearch& s) {
                   impl_->search.begin(source, s, k, capacity(selector, impl_->numel), task.memory);
                 },
                 [&](const SampledTopK& s) { impl_->sampled.begin(source, s, k); },
             },
             selector);
}

std::uint32_t Selection::bound() const noexcept {
  if (impl_->numel == 0) return kNoBound;
  return impl_->with_method([](const auto& selection) { return selection.bound(); });
}

void Selection::collect(const UnitBlock& block) {
  impl_->with_method([&](auto& selection) { selection.collect(block); });
}

void Selection::finish(SparseGradient& out, TakenEntries& taken) {
  out.clear();
  taken.count = 0;
  if (impl_->numel != 0) impl_->with_method([&](auto& selection) { selection.finish(out, taken); });
}

void Selection::abandon() noexcept {
  impl_->with_method([](auto& selection) { selection.abandon(); });
}

std::size_t Selection::fallbacks() const noexcept {
  if (impl_->numel == 0) return 0;
  return impl_->with_method([](const auto& selection) { return selection.fallbacks(); });
}

void select(const Selector& selector, UnitView unit, std::uint32_t seed, Selection& selection, SparseGradient& out,
            Side side, SelectionMemory* memory) {
  validate(selector);
  TakenEntries none;
  selection.begin(selector, unit, seed, {.side = side, .memory = memory, .pass = {}});
  std::array<std::uint32_t, kBlock + 1> hits;
  for_each_block(unit, [&](const float* values, std::size_t count, std::uint32_t offset) {
    const std::uint32_t bound = selection.bound();
    const std::size_t found = bound == kNoBound ? 0 : find_at_least(values, count, bound, side, hits.data());
    selection.collect({.values = const_cast<float*>(values),  // only a pass takes entries out
                       .count = count,
                       .offset = offset,
                       .hits = {hits.data(), found}});
  });
  selection.finish(out, none);
}

void select(const Selector& selector, UnitView unit, std::uint32_t seed, SparseGradient& out, Side side,
            SelectionMemory* memory) {
  Selection scratch;
  select(selector, unit, seed, scratch, out, side, memory);
}

}  // namespace thinwire
