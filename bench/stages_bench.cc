// How long each stage of a gradient's path takes on this machine, on one core.
//
// Axes: elements, density, selector, ranks. Gradients are Laplace-distributed (heavier tails than normal, as gradients
// are). Every benchmark checks one result of its stage before it is timed and stops with an error if that is wrong.
// bytes_per_second counts the memory that the stage has to pass over, so that it compares to the memory's bandwidth.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <span>
#include <variant>
#include <vector>

#include "thinwire/thinwire.h"

namespace {

using namespace thinwire;

constexpr std::size_t kBlock = 4096;  // what the residual's sweep hands over at a time

std::vector<float> laplace(std::size_t numel, unsigned seed) {
  std::mt19937 random(seed);
  std::exponential_distribution<float> magnitude(1000.0f);
  std::vector<float> values(numel);
  for (float& value : values) value = (random() & 1u) != 0 ? magnitude(random) : -magnitude(random);
  return values;
}

GradientView view(std::vector<float>& values) { return {values.data(), values.size()}; }

// Densities travel through Google Benchmark's integers as parts per million.
double density_of(std::int64_t ppm) { return static_cast<double>(ppm) * 1e-6; }

Selector selector_of(std::int64_t kind, double density) {
  switch (kind) {
    case 0:
      return TopK{density};
    case 1:
      return TrimmedTopK{density};
    case 2:
      return HashedSlots{density, HashedSlots::Layout::a};
    default:
      return HashedSlots{density, HashedSlots::Layout::b};
  }
}

// One parameter that fills its bucket, with its residual. Its gradients differ from step to step: windows of one longer
// array, so that making them costs nothing.
struct OneParameter {
  OneParameter(std::size_t size, float momentum) : numel(size), source(laplace(size + kWindows * kBlock, 1)) {
    residual.add({"weight", numel}, {momentum});
    segment = residual.segment("weight", numel, 0);
  }
  std::span<const Residual::Segment> segments() const { return {&segment, 1}; }
  GradientView gradient(std::size_t step) { return {source.data() + step * 37 % kWindows * kBlock, numel}; }

  static constexpr std::size_t kWindows = 64;
  std::size_t numel;
  std::vector<float> source;
  Residual residual;
  Residual::Segment segment;
};

void set_bytes(benchmark::State& state, std::size_t bytes_per_iteration) {
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(bytes_per_iteration));
}

// 20 B per element with momentum (g read, u and v read and written), 12 B without.
void accumulate(benchmark::State& state) {
  const auto numel = static_cast<std::size_t>(state.range(0));
  const float momentum = state.range(1) != 0 ? 0.9f : 0.0f;
  OneParameter unit(numel, momentum);
  Residual::accumulate(unit.segments(), unit.gradient(0));
  if (!std::ranges::equal(unit.residual.residual("weight"), std::span(unit.source).first(numel))) {
    state.SkipWithError("after one step the residual must be the gradient");
    return;
  }
  std::size_t step = 1;
  for (auto _ : state) Residual::accumulate(unit.segments(), unit.gradient(step++));
  set_bytes(state, numel * (momentum != 0 ? 20 : 12));
}
BENCHMARK(accumulate)->ArgNames({"numel", "momentum"})->ArgsProduct({{1 << 16, 1 << 20, 1 << 24}, {0, 1}});

// A selection of its own, over values that already lie in memory: 4 B per element if it passes over them once.
void select(benchmark::State& state) {
  const auto numel = static_cast<std::size_t>(state.range(0));
  const Selector selector = selector_of(state.range(2), density_of(state.range(1)));
  const std::vector<float> values = laplace(numel, 2);
  const UnitSegment segment{values.data(), numel, 0};
  SparseGradient selected;
  const auto run = [&] { thinwire::select(selector, {&segment, 1}, 7, selected); };
  run();

  std::vector<float> magnitudes(numel);
  std::ranges::transform(values, magnitudes.begin(), [](float value) { return std::abs(value); });
  const std::size_t k = target_count(selector, numel);
  std::ranges::nth_element(magnitudes, magnitudes.begin() + static_cast<std::ptrdiff_t>(k - 1), std::greater<>());
  const bool exact = !std::holds_alternative<HashedSlots>(selector);
  std::size_t found = 0;
  for (std::size_t j = 0; j < selected.nnz(); ++j) {
    if (selected.indices[j] == kEmptySlot) continue;
    const float value = selected.values[j];
    if (value != values[selected.indices[j]] || (exact && std::abs(value) < magnitudes[k - 1])) {
      state.SkipWithError("an entry was selected that is not among the largest");
      return;
    }
    ++found;
  }
  if (exact ? found != k : found < k / 2) {
    state.SkipWithError("too few or too many entries were selected");
    return;
  }

  for (auto _ : state) run();
  set_bytes(state, numel * 4);
  state.SetLabel(to_string(selector));
}
BENCHMARK(select)
    ->ArgNames({"numel", "ppm", "selector"})
    ->ArgsProduct({{1 << 16, 1 << 20, 1 << 24}, {1000, 10'000}, {0, 1, 2, 3}});

// What the reducer does: the selection rides on the pass that accumulates, and what was selected leaves the residual.
void accumulate_select_settle(benchmark::State& state) {
  const auto numel = static_cast<std::size_t>(state.range(0));
  const Selector selector = selector_of(state.range(2), density_of(state.range(1)));
  OneParameter unit(numel, 0.9f);
  Selection selection;
  SparseGradient selected;
  TakenEntries taken;
  std::size_t step = 0;
  const auto run = [&] {
    const GradientView gradient = unit.gradient(step++);
    accumulate_and_select(selector, unit.segments(), gradient, 7, true, selection, selected, taken);
    unit.residual.settle(unit.segments(), selected, true, std::move(taken));
    unit.residual.commit();
  };
  run();
  double conserved = 0;
  for (float value : selected.values) conserved += value;
  for (float value : unit.residual.residual("weight")) conserved += value;
  for (float value : std::span(unit.source).first(numel)) conserved -= value;
  if (std::abs(conserved) > 1e-6) {
    state.SkipWithError("what was selected and what stayed do not add up to the gradient");
    return;
  }
  for (auto _ : state) run();
  set_bytes(state, numel * 20);
  state.SetLabel(to_string(selector));
}
BENCHMARK(accumulate_select_settle)
    ->ArgNames({"numel", "ppm", "selector"})
    ->ArgsProduct({{1 << 20, 1 << 24}, {1000, 10'000}, {0, 1, 2, 3}});

// A payload of one sparse section, with the entries it was made of.
struct Encoded {
  Encoded(std::size_t numel, double density, unsigned seed) {
    const std::vector<float> values = laplace(numel, seed);
    const UnitSegment segment{values.data(), numel, 0};
    thinwire::select(TopK{density}, {&segment, 1}, 0, selected);
    const SectionShape shape{false, selected.nnz()};
    bytes.resize(payload_bound({}, 1, {&shape, 1}) / sizeof(std::uint64_t));
    header.slices = 1;
    header.block_bytes = bytes.size() * sizeof(std::uint64_t);
    section = SparseSection{0, static_cast<std::uint32_t>(numel), false, 0, selected.indices, selected.values};
    encode();
  }
  Encoded(const Encoded&) = delete;
  void encode() { thinwire::encode({}, header, {true}, {&section, 1}, std::as_writable_bytes(std::span(bytes))); }
  std::span<const std::byte> view() const { return std::as_bytes(std::span(bytes)); }

  SparseGradient selected;
  PayloadHeader header;
  Section section;
  std::vector<std::uint64_t> bytes;
};

void encode(benchmark::State& state) {
  const auto numel = static_cast<std::size_t>(state.range(0));
  Encoded encoded(numel, density_of(state.range(1)), 3);
  const Payload payload = validate(encoded.view(), numel);
  const auto* section = payload.sections.empty() ? nullptr : std::get_if<SparseSection>(payload.sections.data());
  if (section == nullptr || !std::ranges::equal(section->indices, encoded.selected.indices) ||
      !std::ranges::equal(section->values, encoded.selected.values)) {
    state.SkipWithError("the payload does not hold what was encoded");
    return;
  }
  for (auto _ : state) encoded.encode();
  set_bytes(state, encoded.selected.nnz() * 8);
}
BENCHMARK(encode)->ArgNames({"numel", "ppm"})->ArgsProduct({{1 << 20, 1 << 24}, {1000, 10'000}});

// What a rank does with the payloads of all ranks.
void validate_decode_mean(benchmark::State& state) {
  const auto numel = static_cast<std::size_t>(state.range(0));
  const auto ranks = static_cast<unsigned>(state.range(2));
  std::vector<std::unique_ptr<Encoded>> encoded;
  for (unsigned rank = 0; rank < ranks; ++rank) {
    encoded.push_back(std::make_unique<Encoded>(numel, density_of(state.range(1)), 10 + rank));
  }
  std::vector<float> mean(numel);
  std::vector<Payload> payloads;
  const auto run = [&] {
    payloads.clear();
    for (const auto& one : encoded) payloads.push_back(validate(one->view(), numel));
    decode_mean(payloads, view(mean));
  };
  run();

  std::vector<float> expected(numel);
  for (const auto& one : encoded) {
    for (std::size_t j = 0; j < one->selected.nnz(); ++j) expected[one->selected.indices[j]] += one->selected.values[j];
  }
  for (float& value : expected) value /= static_cast<float>(ranks);
  if (mean != expected) {
    state.SkipWithError("the mean is not the sum of the entries divided by the ranks");
    return;
  }
  for (auto _ : state) run();
  set_bytes(state, numel * 4);
}
BENCHMARK(validate_decode_mean)
    ->ArgNames({"numel", "ppm", "ranks"})
    ->ArgsProduct({{1 << 20, 1 << 24}, {1000, 10'000}, {4, 16}});

}  // namespace

BENCHMARK_MAIN();
