#include "bench.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <utility>

#include "core/array.h"
#include "reference/selection.h"
#include "select/candidates.h"
#include "thinwire/thinwire.h"
#include "workload.h"

namespace thinwire::tools {
namespace {

constexpr float kMomentum = 0.9f;
constexpr std::size_t kLeastRepetitions = 7;

// What one row is about.
struct Cell {
  std::string stage;
  std::string selector;  // or codec
  std::string distribution;
  std::size_t numel = 0;
  double density = 0;
  int threads = 1;
};

// One stage on one thread's data.
class Trial {
 public:
  virtual ~Trial() = default;
  /// Runs the stage once and compares with the oracle.
  virtual bool verify() = 0;
  /// Runs the stage; only this is timed.
  virtual void run(std::size_t repetition) = 0;
  /// The least that has to be done with the same memory, timed next to `run`.
  virtual void bare() {}
  virtual bool has_bare() const { return false; }

  std::size_t bytes = 0;      // that the stage passes over
  std::size_t entries = 0;    // that come out of it
  double bits_per_entry = 0;  // of a payload
  std::size_t fallbacks = 0;  // in all runs so far
};

Selector selector_of(const std::string& name, double density) {
  if (name == "top_k") return TopK{density};
  if (name == "trimmed_top_k") return TrimmedTopK{density};
  if (name == "hashed_slots_a") return HashedSlots{density, HashedSlots::Layout::a};
  return HashedSlots{density, HashedSlots::Layout::b};
}

bool same(const SparseGradient& a, const SparseGradient& b) {
  return a.indices == b.indices && std::ranges::equal(a.values, b.values) && a.hashed_order == b.hashed_order;
}

// Everything at or above a known threshold: the k-th magnitude.
class Filter : public Trial {
 public:
  Filter(std::vector<float> values, double density) : values_(std::move(values)) {
    bytes = 4 * values_.size();
    entries = target_count(TopK{density}, values_.size());
    expected_ = reference::top_k({&unit_, 1}, density);
    for (const float value : expected_.values) threshold_ = std::min(threshold_, reference::key(value));
  }
  bool verify() override {
    run(0);
    return same(out_, expected_);
  }
  void run(std::size_t) override {
    candidates_.begin(entries, threshold_);
    candidates_.collect(UnitView(&unit_, 1));
    candidates_.finish(out_, taken_);
  }

 private:
  std::vector<float> values_;
  UnitSegment unit_{values_.data(), values_.size(), 0};
  SparseGradient expected_;
  std::uint32_t threshold_ = kNoBound;
  Candidates candidates_;
  SparseGradient out_;
  TakenEntries taken_;
};

class Select : public Trial {
 public:
  Select(std::vector<float> values, const Selector& selector) : values_(std::move(values)), selector_(selector) {
    bytes = 4 * values_.size();
  }
  bool verify() override {
    run(0);
    entries = out_.nnz();
    return same(out_, reference::select(selector_, {&unit_, 1}, 0));
  }
  void run(std::size_t repetition) override {
    select(selector_, {&unit_, 1}, static_cast<std::uint32_t>(repetition), scratch_, out_);
    fallbacks += scratch_.fallbacks();
  }

 private:
  std::vector<float> values_;
  UnitSegment unit_{values_.data(), values_.size(), 0};
  Selector selector_;
  Selection scratch_;
  SparseGradient out_;
};

// The residual of one parameter. Its gradients differ from step to step: windows of one longer array, so that making them
// costs nothing.
class Step : public Trial {
 public:
  Step(std::vector<float> source, std::size_t numel) : numel_(numel), source_(std::move(source)) {
    bytes = 20 * numel;
    residual_.add({"weight", numel}, {kMomentum});
    segment_ = residual_.segment("weight", numel, 0);
    u_.resize(numel);
    v_.resize(numel);
  }
  static std::size_t source_numel(std::size_t numel) { return numel + kWindows * 4096; }
  void bare() override { update_pass(kMomentum, gradient(bare_step_++), u_.data(), v_.data(), numel_); }

 protected:
  const float* gradient(std::size_t step) const { return source_.data() + step * 37 % kWindows * 4096; }
  GradientView view(std::size_t step) const { return {const_cast<float*>(gradient(step)), numel_}; }

  // Two steps, because the first one's u and v are the gradient; then both against the plain formula.
  bool verify_against(const std::function<void(std::size_t step)>& run, const std::function<bool()>& settle) {
    std::ranges::fill(u_, 0.0f);
    std::ranges::fill(v_, 0.0f);
    for (std::size_t step = 0; step < 2; ++step) {
      run(step);
      const float* g = gradient(step);
      for (std::size_t i = 0; i < numel_; ++i) {
        u_[i] = kMomentum * u_[i] + g[i];
        v_[i] += u_[i];
      }
      if (!settle()) return false;
      if (!std::ranges::equal(residual_.residual("weight"), v_)) return false;
      if (!std::ranges::equal(residual_.velocity("weight"), u_)) return false;
    }
    return true;
  }

  static constexpr std::size_t kWindows = 64;
  std::size_t numel_;
  std::vector<float> source_;
  Residual residual_;
  Residual::Segment segment_;
  FloatArray u_;
  FloatArray v_;
  std::size_t bare_step_ = 0;
};

class UpdateOnly : public Step {
 public:
  using Step::Step;
  bool verify() override {
    return verify_against([this](std::size_t step) { run(step); }, [] { return true; });
  }
  void run(std::size_t repetition) override { Residual::accumulate({&segment_, 1}, view(repetition)); }
  bool has_bare() const override { return true; }
};

// Accumulate, select and settle, as the reducer does it.
class FusedStep : public Step {
 public:
  FusedStep(std::vector<float> source, std::size_t numel, const Selector& selector)
      : Step(std::move(source), numel), selector_(selector) {}
  bool verify() override {
    std::size_t step = 0;
    return verify_against([this](std::size_t s) { run(s); },
                          [&] {
                            const UnitSegment unit{v_.data(), v_.size(), 0};
                            const auto seed = static_cast<std::uint32_t>(step++);
                            const SparseGradient expected = reference::select(selector_, {&unit, 1}, seed);
                            for (const std::uint32_t index : expected.indices)
                              if (index != kEmptySlot) v_[index] = u_[index] = 0.0f;
                            entries = sent_.nnz();
                            return same(sent_, expected);
                          });
  }
  void run(std::size_t repetition) override {
    accumulate_and_select(selector_, {&segment_, 1}, view(repetition), static_cast<std::uint32_t>(repetition), true,
                          scratch_, sent_, taken_);
    residual_.settle({&segment_, 1}, sent_, true, std::move(taken_));
    residual_.commit();
    fallbacks += scratch_.fallbacks();
  }
  bool has_bare() const override { return true; }

 private:
  Selector selector_;
  Selection scratch_;
  SparseGradient sent_;
  TakenEntries taken_;
};

// A payload of one sparse section: the exact top-k of the values.
class Coding : public Trial {
 public:
  Coding(const std::vector<float>& values, double density, const Codec& codec)
      : numel_(values.size()), codec_(codec), sum_(values.size()) {
    const UnitSegment unit{values.data(), values.size(), 0};
    select(TopK{density}, {&unit, 1}, 0, sent_);
    entries = sent_.nnz();
    round_values(codec.values, sent_.values);
    header_.slices = 1;
    const SectionShape shape{.dense = false, .capacity = entries, .extent = static_cast<std::uint32_t>(values.size())};
    payload_.resize(payload_bound(codec_, 1, {&shape, 1}));
    bytes = encode_once();
    bits_per_entry = 8.0 * static_cast<double>(bytes) / static_cast<double>(entries);
  }
  bool verify() override {
    std::ranges::fill(sum_, 0.0f);
    encode_once();
    decode_once();
    std::vector<float> expected(numel_);
    for (std::size_t j = 0; j < sent_.nnz(); ++j) expected[sent_.indices[j]] += sent_.values[j];
    return std::ranges::equal(sum_, expected);
  }

 protected:
  std::size_t encode_once() {
    const std::array<Section, 1> sections = {SparseSection{
        .begin = 0, .extent = static_cast<std::uint32_t>(numel_), .indices = sent_.indices, .values = sent_.values}};
    return encode(codec_, header_, {true}, sections, payload_);
  }
  void decode_once() {
    DecodeCursor cursor;
    const Payload payload = validate(std::span(payload_).first(bytes), numel_);
    decode_add(payload, 0, sum_, cursor);
  }

 private:
  std::size_t numel_;
  Codec codec_;
  PayloadHeader header_;
  SparseGradient sent_;
  std::vector<std::byte> payload_;
  std::vector<float> sum_;
};

class Encode : public Coding {
 public:
  using Coding::Coding;
  void run(std::size_t) override { encode_once(); }
};

// Validate and add to the sum.
class Decode : public Coding {
 public:
  using Coding::Coding;
  void run(std::size_t) override { decode_once(); }
};

const std::vector<std::pair<std::string, Codec>>& codecs() {
  static const std::vector<std::pair<std::string, Codec>> list = [] {
    std::vector<std::pair<std::string, Codec>> all;
    for (const IndexCoding indices : {IndexCoding::raw_u32, IndexCoding::elias_fano})
      for (const ValueCoding values : {ValueCoding::f32, ValueCoding::bf16, ValueCoding::f16})
        all.emplace_back(to_string(Codec{indices, values}), Codec{indices, values});
    return all;
  }();
  return list;
}

double percentile(std::vector<double> values, double share) {
  std::ranges::sort(values);
  const double at = share * static_cast<double>(values.size() - 1);
  return values[static_cast<std::size_t>(std::lround(at))];
}

class Bench {
 public:
  explicit Bench(const BenchOptions& options) : options_(options) {
    if (!(options.seconds > 0 && options.seconds <= 3600))
      throw Error(ErrorCode::invalid_argument,
                  "--seconds is " + std::to_string(options.seconds) + ", not in (0, 3600]");
    for (const double density : options.density) validate(selector_of("top_k", density));
    if (!options.input.empty()) input_ = read_npy(options.input);
    if (!options.json.empty()) {
      json_.open(options.json);
      if (!json_) throw Error(ErrorCode::invalid_argument, "'" + options.json + "' cannot be written");
    }
    std::printf("%-12s %-17s %-10s %10s %8s %4s  %9s %9s %9s %9s %8s %8s  %s\n", "stage", "selector", "values", "numel",
                "density", "thr", "min ms", "p50 ms", "p99 ms", "x read", "x bare", "GB/s", "");
  }

  bool run() {
    const std::vector<std::string> distributions =
        input_.empty() ? options_.distributions
                       : std::vector<std::string>{options_.input.substr(options_.input.find_last_of('/') + 1)};
    for (const int threads : options_.threads)
      for (const std::size_t numel : options_.numel)
        for (const std::string& distribution : distributions)
          for (const std::string& stage : options_.stages.empty() ? stages() : options_.stages)
            run_stage({.stage = stage,
                       .selector = "",
                       .distribution = distribution,
                       .numel = numel,
                       .density = 0,
                       .threads = threads});
    if (json_.is_open()) {
      json_ << rows_.dump(2) << '\n';
      if (!json_.flush()) throw Error(ErrorCode::system, "'" + options_.json + "' could not be written");
    }
    return all_verified_;
  }

 private:
  void run_stage(Cell cell) {
    if (cell.stage == "update_only") return measure(cell);
    for (const double density : options_.density) {
      cell.density = density;
      std::vector<std::string> names = {"top_k"};
      if (cell.stage == "select" || cell.stage == "fused_step")
        names = options_.selectors.empty() ? selectors() : options_.selectors;
      if (cell.stage == "encode" || cell.stage == "decode") {
        names.clear();
        for (const auto& [name, codec] : codecs()) names.push_back(name);
      }
      for (const std::string& name : names) {
        cell.selector = name;
        measure(cell);
      }
    }
  }

  std::vector<float> values(const Cell& cell, std::size_t numel, int thread) const {
    return input_.empty() ? make_values(cell.distribution, numel, static_cast<unsigned>(thread) + 1)
                          : tile(input_, numel);
  }

  std::unique_ptr<Trial> make(const Cell& cell, int thread) const {
    if (cell.stage == "update_only" || cell.stage == "fused_step") {
      std::vector<float> source = values(cell, Step::source_numel(cell.numel), thread);
      if (cell.stage == "update_only") return std::make_unique<UpdateOnly>(std::move(source), cell.numel);
      return std::make_unique<FusedStep>(std::move(source), cell.numel, selector_of(cell.selector, cell.density));
    }
    std::vector<float> data = values(cell, cell.numel, thread);
    if (cell.stage == "filter") return std::make_unique<Filter>(std::move(data), cell.density);
    if (cell.stage == "select")
      return std::make_unique<Select>(std::move(data), selector_of(cell.selector, cell.density));
    const auto codec = std::ranges::find(codecs(), cell.selector, &std::pair<std::string, Codec>::first)->second;
    if (cell.stage == "encode") return std::make_unique<Encode>(data, cell.density, codec);
    return std::make_unique<Decode>(data, cell.density, codec);
  }

  void measure(const Cell& cell) {
    std::vector<std::unique_ptr<Trial>> trials;
    std::vector<std::vector<float>> read;
    for (int thread = 0; thread < cell.threads; ++thread) {
      trials.push_back(make(cell, thread));
      read.emplace_back(cell.numel, 1.0f);
    }
    bool verified = true;
    for (const auto& trial : trials) verified = trial->verify() && verified;
    all_verified_ = all_verified_ && verified;

    Team team(cell.threads);
    std::vector<double> times, read_ratios, bare_ratios;
    volatile float sink = 0;
    double spent = 0;
    const auto enough = [&] {
      if (options_.repetitions > 0) return times.size() >= options_.repetitions;
      return times.size() >= kLeastRepetitions && spent >= options_.seconds;
    };
    const std::size_t fallbacks_before = trials[0]->fallbacks;
    // One round that does not count warms up caches, page tables and memory that grows.
    for (std::size_t repetition = 0; verified && !enough(); ++repetition) {
      const auto at = [](int thread) { return static_cast<std::size_t>(thread); };
      const double read_time = team.time([&](int thread) { sink = read_pass(read[at(thread)]); });
      double bare_time = 0;
      if (trials[0]->has_bare()) bare_time = team.time([&](int thread) { trials[at(thread)]->bare(); });
      const double time = team.time([&](int thread) { trials[at(thread)]->run(repetition + 2); });
      spent += read_time + bare_time + time;
      if (repetition == 0) continue;
      times.push_back(time);
      read_ratios.push_back(time / read_time);
      if (bare_time > 0) bare_ratios.push_back(time / bare_time);
    }
    report(cell, *trials[0], verified, times, read_ratios, bare_ratios, trials[0]->fallbacks - fallbacks_before);
  }

  void report(const Cell& cell, const Trial& trial, bool verified, const std::vector<double>& times,
              const std::vector<double>& read_ratios, const std::vector<double>& bare_ratios, std::size_t fallbacks) {
    nlohmann::ordered_json row = {
        {"stage", cell.stage},     {"selector", cell.selector},         {"numel", cell.numel},
        {"density", cell.density}, {"distribution", cell.distribution}, {"threads", cell.threads},
        {"verified", verified}};
    std::printf("%-12s %-17s %-10.10s %10zu %8g %4d  ", cell.stage.c_str(), cell.selector.c_str(),
                cell.distribution.c_str(), cell.numel, cell.density, cell.threads);
    if (!verified) {
      std::printf("WRONG RESULT\n");
      rows_.push_back(row);
      return;
    }
    const double p50 = percentile(times, 0.5);
    const double gb_per_s = 1e-9 * static_cast<double>(trial.bytes) * cell.threads / p50;
    row["repetitions"] = times.size();
    row["min_ms"] = 1e3 * percentile(times, 0);
    row["p50_ms"] = 1e3 * p50;
    row["p99_ms"] = 1e3 * percentile(times, 0.99);
    row["read_pass_ratio"] = percentile(read_ratios, 0.5);
    if (!bare_ratios.empty()) row["update_ratio"] = percentile(bare_ratios, 0.5);
    row["gb_per_s"] = gb_per_s;
    row["elements_per_s"] = static_cast<double>(cell.numel) * cell.threads / p50;
    if (trial.entries > 0) row["entries_per_s"] = static_cast<double>(trial.entries) * cell.threads / p50;
    if (trial.bits_per_entry > 0) {
      row["ns_per_entry"] = 1e9 * p50 / static_cast<double>(trial.entries);
      row["bits_per_entry"] = trial.bits_per_entry;
    }
    if (cell.stage == "select" || cell.stage == "fused_step") row["fallbacks"] = fallbacks;
    std::printf("%9.3f %9.3f %9.3f %9.2f ", row["min_ms"].get<double>(), 1e3 * p50, row["p99_ms"].get<double>(),
                row["read_pass_ratio"].get<double>());
    if (bare_ratios.empty())
      std::printf("%8s ", "");
    else
      std::printf("%8.3f ", row["update_ratio"].get<double>());
    std::printf("%8.2f  ", gb_per_s);
    if (trial.bits_per_entry > 0)
      std::printf("%.2f ns and %.2f bits per entry", row["ns_per_entry"].get<double>(), trial.bits_per_entry);
    else if (fallbacks > 0)
      std::printf("%zu fallbacks in %zu", fallbacks, times.size());
    std::printf("\n");
    std::fflush(stdout);
    rows_.push_back(row);
  }

  BenchOptions options_;
  std::vector<float> input_;
  std::ofstream json_;
  nlohmann::ordered_json rows_ = nlohmann::ordered_json::array();
  bool all_verified_ = true;
};

}  // namespace

const std::vector<std::string>& stages() {
  static const std::vector<std::string> names = {"filter", "select", "fused_step", "update_only", "encode", "decode"};
  return names;
}

const std::vector<std::string>& selectors() {
  static const std::vector<std::string> names = {"top_k", "trimmed_top_k", "hashed_slots_a", "hashed_slots_b"};
  return names;
}

bool run_bench(const BenchOptions& options) { return Bench(options).run(); }

}  // namespace thinwire::tools
