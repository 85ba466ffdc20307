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
#include "select/blocks.h"
#include "select/hashed_slots.h"
#include "select/select_kernels.h"
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
  std::ostringstream text;
  text << field << " of " << selector << " is " << value << ", not in (0, 1]";
  require(value > 0.0 && value <= 1.0, text.str());
}

}  // namespace

std::string to_string(const Selector& selector) {
  std::ostringstream text;
  text.precision(9);
  std::visit(Overloaded{
                 [&](const TopK& s) { text << "top_k(density=" << s.density << ")"; },
                 [&](const TrimmedTopK& s) {
                   text << "trimmed_top_k(density=" << s.density << ", epsilon=" << s.epsilon << ")";
                 },
                 [&](const HashedSlots& s) {
                   text << "hashed_slots(density=" << s.density
                        << ", layout=" << (s.layout == HashedSlots::Layout::a ? 'a' : 'b')
                        << ", sample_fraction=" << s.sample_fraction << ")";
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
  if (hashed == nullptr || hashed->layout == HashedSlots::Layout::a) return k;
  return std::min(numel, k + (k + 3) / 4);
}

struct Selection::Impl {
  std::vector<UnitSegment> unit;
  SelectionPass pass;
  std::size_t numel = 0;
  TopKSelection top_k;
  TrimmedTopKSelection trimmed;
  HashedSlotsSelection hashed;
  std::size_t method = 0;  // index of the selector in the variant

  // What f yields for the selection of the method in use.
  template <class F>
  auto with_method(const F& f) {
    if (method == 0) return f(top_k);
    if (method == 1) return f(trimmed);
    return f(hashed);
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
