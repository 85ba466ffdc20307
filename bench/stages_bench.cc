// How long each stage of a gradient's path takes on this machine, on one core.
//
// Axes: elements, density, selector, codec, ranks. Gradients are Laplace-distributed (heavier tails than normal, as gradients
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
    case 3:
      return HashedSlots{density, HashedSlots::Layout::b};
    case 4:
      return ThresholdSearch{density};
    default:
      return SampledTopK{density};
  }
}

// The value coding in the last digit, the index coding before it.
Codec codec_of(std::int64_t codec) {
  return {static_cast<IndexCoding>(codec / 10), static_cast<ValueCoding>(codec % 10)};
}
const std::vector<std::int64_t> kCodecs = {0, 1, 2, 10, 11, 12};

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
  const bool exact = std::holds_alternative<TopK>(selector) || std::holds_alternative<TrimmedTopK>(selector);
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
    ->ArgsProduct({{1 << 16, 1 << 20, 1 << 24}, {1000, 10'000}, {0, 1, 2, 3, 4, 5}});

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
    ->ArgsProduct({{1 << 20, 1 << 24}, {1000, 10'000}, {0, 1, 2, 3, 4, 5}});

void set_entries(benchmark::State& state, std::size_t entries_per_iteration) {
  using benchmark::Counter;
  state.counters["per_entry"] =
      Counter(static_cast<double>(entries_per_iteration), Counter::kIsIterationInvariantRate | Counter::kInvert);
}

// A payload of one sparse section, with the entries it was made of.
struct Encoded {
  Encoded(std::size_t numel, double density, unsigned seed, const Codec& with = {}) : codec(with) {
    const std::vector<float> values = laplace(numel, seed);
    const UnitSegment segment{values.data(), numel, 0};
    thinwire::select(TopK{density}, {&segment, 1}, 0, selected);
    round_values(codec.values, selected.values);
    const SectionShape shape{false, selected.nnz(), numel};
    bytes.resize(payload_bound(codec, 1, {&shape, 1}) / sizeof(std::uint64_t));
    header.slices = 1;
    header.block_bytes = bytes.size() * sizeof(std::uint64_t);
    section = SparseSection{0, static_cast<std::uint32_t>(numel), false, 0, selected.indices, selected.values};
    encode();
  }
  Encoded(const Encoded&) = delete;
  std::size_t encode() {
    return thinwire::encode(codec, header, {true}, {&section, 1}, std::as_writable_bytes(std::span(bytes)));
  }
  std::span<const std::byte> view() const { return std::as_bytes(std::span(bytes)); }
  bool is_in(const Payload& payload) const {
    const auto* read = payload.sections.empty() ? nullptr : std::get_if<SparseSection>(payload.sections.data());
    return read != nullptr && std::ranges::equal(read->indices, selected.indices) &&
           std::ranges::equal(read->values, selected.values);
  }

  Codec codec;
  SparseGradient selected;
  PayloadHeader header;
  Section section;
  std::vector<std::uint64_t> bytes;
};

void encode(benchmark::State& state) {
  const auto numel = static_cast<std::size_t>(state.range(0));
  Encoded encoded(numel, density_of(state.range(1)), 3, codec_of(state.range(2)));
  if (!encoded.is_in(validate(encoded.view(), numel))) {
    state.SkipWithError("the payload does not hold what was encoded");
    return;
  }
  for (auto _ : state) encoded.encode();
  set_entries(state, encoded.selected.nnz());
  state.counters["bits_per_entry"] =
      static_cast<double>(8 * encoded.encode()) / static_cast<double>(encoded.selected.nnz());
  state.SetLabel(to_string(encoded.codec));
}
BENCHMARK(encode)->ArgNames({"numel", "ppm", "codec"})->ArgsProduct({{1 << 20, 1 << 24}, {1000, 10'000}, kCodecs});

// What rounding costs before that.
void round_values(benchmark::State& state) {
  const Codec codec = codec_of(state.range(0));
  std::vector<float> values = laplace(1 << 17, 4);
  for (auto _ : state) {
    round_values(codec.values, values);
    benchmark::ClobberMemory();
  }
  set_entries(state, values.size());
  state.SetLabel(to_string(codec));
}
BENCHMARK(round_values)->ArgNames({"codec"})->ArgsProduct({{1, 2}});

// Checksum, checks and decode_add of one payload, into one tile that stays in the cache.
void decode(benchmark::State& state) {
  constexpr std::size_t kTile = 1 << 16;
  const auto numel = static_cast<std::size_t>(state.range(0));
  const Encoded encoded(numel, density_of(state.range(1)), 3, codec_of(state.range(2)));
  if (!encoded.is_in(validate(encoded.view(), numel))) {
    state.SkipWithError("the payload does not hold what was encoded");
    return;
  }
  std::vector<float> tile(kTile);
  for (auto _ : state) {
    const Payload payload = validate(encoded.view(), numel);
    DecodeCursor cursor;
    for (std::size_t first = 0; first < numel; first += kTile)
      decode_add(payload, static_cast<std::uint32_t>(first), tile, cursor);
  }
  set_entries(state, encoded.selected.nnz());
  state.SetLabel(to_string(encoded.codec));
}
BENCHMARK(decode)->ArgNames({"numel", "ppm", "codec"})->ArgsProduct({{1 << 20, 1 << 24}, {1000, 10'000}, kCodecs});

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
