// A stranger's program: two ranks as threads compress a few steps, nothing gets lost on the way, and the cost model says
// that it was worth it.
#include <thinwire/thinwire.h>

#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

namespace {

constexpr int kRanks = 2;
constexpr int kSteps = 5;
constexpr std::size_t kNumel = 20'000;

// A multiple of 1/64 that differs by rank, step and element: sums of a few thousand of them are exact in f64.
float gradient_entry(int rank, int step, std::size_t i) {
  return static_cast<float>((i * 37 + static_cast<std::size_t>(step * 101 + rank * 7) * 13) % 257) / 64.0f - 2.0f;
}

struct Sums {
  double gradients = 0, means = 0, residual = 0;
};

void train(int rank, thinwire::Communicator& communicator, Sums& sums) {
  thinwire::Reducer reducer(thinwire::top_k(0.01), {{"weight", kNumel}}, communicator);
  std::vector<float> buffer(kNumel);
  for (int step = 0; step < kSteps; ++step) {
    for (std::size_t i = 0; i < kNumel; ++i) {
      buffer[i] = gradient_entry(rank, step, i);
      sums.gradients += buffer[i];
    }
    reducer.begin_step();
    reducer.reduce({{{"weight", kNumel}}}, {buffer.data(), kNumel}).wait();
    for (float mean : buffer) sums.means += mean;
  }
  for (float v : reducer.residual().residual("weight")) sums.residual += v;
}

}  // namespace

int main() {
  auto communicators = thinwire::make_thread_communicators(kRanks);
  Sums sums[kRanks];
  {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < kRanks; ++rank) {
      threads.emplace_back([&, rank] { train(rank, *communicators[static_cast<std::size_t>(rank)], sums[rank]); });
    }
  }
  const double in = sums[0].gradients + sums[1].gradients;
  const double out = kRanks * sums[0].means + sums[0].residual + sums[1].residual;
  const bool something_travelled = sums[0].means != 0 && sums[0].residual != 0;
  const bool conserved = std::abs(in - out) < 1e-3 && sums[0].means == sums[1].means;
  const bool worth_it =
      thinwire::worth_compressing(kRanks, {.dense_bytes = 4.0 * kNumel, .density = 0.01}, {.seconds_per_byte = 8e-9});
  std::printf("thinwire %d.%d.%d: gradients %.6f, means and residuals %.6f\n", THINWIRE_VERSION_MAJOR,
              THINWIRE_VERSION_MINOR, THINWIRE_VERSION_PATCH, in, out);
  return something_travelled && conserved && worth_it ? EXIT_SUCCESS : EXIT_FAILURE;
}
