#include "info.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "core/simd_target.h"
#include "thinwire/thinwire.h"
#include "workload.h"

namespace thinwire::tools {
namespace {

std::string cpu_name() {
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);)
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  return "unknown";
}

std::size_t cache_bytes(int name) { return static_cast<std::size_t>(std::max(sysconf(name), 0L)); }

// Bytes per second of `threads` read passes side by side over 64 MiB each; the best of several.
double read_bandwidth(int threads) {
  constexpr std::size_t kNumel = std::size_t{16} << 20;
  std::vector<std::vector<float>> values(static_cast<std::size_t>(threads), std::vector<float>(kNumel, 1.0f));
  volatile float sink = 0;
  Team team(threads);
  double best = 1e9;
  for (int repetition = 0; repetition < 7; ++repetition)
    best = std::min(best, team.time([&](int thread) { sink = read_pass(values[static_cast<std::size_t>(thread)]); }));
  return threads * static_cast<double>(kNumel) * 4 / best;
}

}  // namespace

void print_info(bool json) {
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  std::string others;
  for (const std::int64_t target : simd_targets()) others += (others.empty() ? "" : ", ") + simd_target_name(target);
  nlohmann::ordered_json info = {
      {"version", THINWIRE_VERSION},
      {"compiler", __VERSION__},
      {"cpu", cpu_name()},
      {"cores", cores},
      {"l1_bytes", cache_bytes(_SC_LEVEL1_DCACHE_SIZE)},
      {"l2_bytes", cache_bytes(_SC_LEVEL2_CACHE_SIZE)},
      {"l3_bytes", cache_bytes(_SC_LEVEL3_CACHE_SIZE)},
      {"simd", simd_target_name(current_simd_target())},
      {"simd_targets", others},
      {"read_gb_per_s", read_bandwidth(1) * 1e-9},
      {"read_gb_per_s_all_cores", read_bandwidth(std::max(cores, 1)) * 1e-9},
  };
  if (json) {
    std::puts(info.dump(2).c_str());
    return;
  }
  for (const auto& [name, value] : info.items()) {
    std::ostringstream text;
    if (value.is_string())
      text << value.get<std::string>();
    else if (value.is_number_float())
      text << std::round(value.get<double>() * 10) / 10;
    else
      text << value;
    std::printf("%-24s %s\n", name.c_str(), text.str().c_str());
  }
}

}  // namespace thinwire::tools
