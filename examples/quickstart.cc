// Four ranks, here threads, fit one linear model of 100,001 parameters, each rank on examples of its own.
#include <thinwire/thinwire.h>

#include <cstdio>
#include <exception>
#include <functional>
#include <future>
#include <numeric>
#include <random>
#include <stdexcept>
#include <vector>

constexpr int kRanks = 4, kSteps = 60;
constexpr std::size_t kFeatures = 100'000, kExamples = 32;  // examples: of each rank
constexpr float kLearningRate = 0.02f;

float dot(const float* a, const float* b) { return std::inner_product(a, a + kFeatures, b, 0.0f); }

// Trains this rank's replica and returns it: the weights, then the bias.
std::vector<float> train(thinwire::Communicator& communicator) {
  std::mt19937 random(static_cast<unsigned>(communicator.rank()));
  std::normal_distribution<float> normal;
  std::vector<float> truth(kFeatures), x(kExamples * kFeatures), y(kExamples);
  for (std::size_t j = 0; j < kFeatures; j += kFeatures / 10) truth[j] = 1;  // ten features count
  for (float& value : x) value = normal(random);
  for (std::size_t i = 0; i < kExamples; ++i) y[i] = dot(&x[i * kFeatures], truth.data()) + 0.5f;

  thinwire::Reducer reducer(thinwire::redsync(0.001), {{"weight", kFeatures}, {"bias", 1}}, communicator);
  const thinwire::Bucket bucket{{{"weight", kFeatures}, {"bias", 1}}};
  std::vector<float> model(kFeatures + 1), gradient(kFeatures + 1);
  for (int step = 1; step <= kSteps; ++step) {
    float loss = 0;  // half the mean squared error on this rank's examples
    gradient.assign(gradient.size(), 0);
    for (std::size_t i = 0; i < kExamples; ++i) {
      const float error = dot(&x[i * kFeatures], model.data()) + model[kFeatures] - y[i];
      for (std::size_t j = 0; j < kFeatures; ++j) gradient[j] += error * x[i * kFeatures + j] / kExamples;
      gradient[kFeatures] += error / kExamples;
      loss += error * error / (2 * kExamples);
    }

    reducer.begin_step();
    reducer.reduce(bucket, {gradient.data(), gradient.size()}).wait();  // now it is the mean over the ranks
    for (std::size_t j = 0; j < model.size(); ++j) model[j] -= kLearningRate * gradient[j];

    if (communicator.rank() == 0 && (step == 1 || step % 10 == 0)) {
      const thinwire::StepStats stats = reducer.stats();
      std::printf("step %2d  loss %.3f  density %.2f %%  sent %.1f kB, dense %.1f kB\n", step, loss,
                  100 * stats.density, static_cast<double>(stats.bytes_sent) / 1e3,
                  static_cast<double>(stats.dense_bytes) / 1e3);
    }
  }
  return model;
}

int main() try {
  const auto communicators = thinwire::make_thread_communicators(kRanks);
  std::vector<std::future<std::vector<float>>> ranks;
  for (const auto& rank : communicators) ranks.push_back(std::async(std::launch::async, train, std::ref(*rank)));
  std::vector<std::vector<float>> replicas;
  for (auto& rank : ranks) replicas.push_back(rank.get());
  for (const auto& replica : replicas)
    if (replica != replicas[0]) throw std::runtime_error("the replicas differ");
  std::printf("all %d replicas are the same, bit for bit\n", kRanks);
} catch (const std::exception& error) {
  std::fprintf(stderr, "quickstart: %s\n", error.what());
  return 1;
}
