#include "bench.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>

#include "thinwire/thinwire.h"
#include "trials.h"
#include "workload.h"

namespace thinwire::tools {
namespace {

constexpr std::size_t kLeastRepetitions = 7;

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

  void measure(const Cell& cell) {
    std::vector<std::unique_ptr<Trial>> trials;
    std::vector<std::vector<float>> read;
    for (int thread = 0; thread < cell.threads; ++thread) {
      trials.push_back(make_trial(cell, [&](std::size_t numel) { return values(cell, numel, thread); }));
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
  static const std::vector<std::string> names = {"top_k",          "trimmed_top_k",    "hashed_slots_a",
                                                 "hashed_slots_b", "threshold_search", "sampled_top_k"};
  return names;
}

bool run_bench(const BenchOptions& options) { return Bench(options).run(); }

}  // namespace thinwire::tools
