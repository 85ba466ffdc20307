// Two models whose gradients fit on a page, trained by plain data-parallel momentum SGD: what a dense reducer must equal.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "thinwire/parameter.h"

namespace thinwire::reference {

/// Parameters and gradients by parameter, in the order of `parameters`.
using Tensors = std::vector<std::vector<float>>;

struct TinyModel {
  std::vector<Parameter> parameters;
  Tensors start;
  /// Gradient of the mean squared error on one rank's own batch.
  std::function<Tensors(const Tensors& theta, int rank)> gradient;
};

inline std::vector<float> noise(std::size_t count, std::uint32_t seed, float scale) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

/// y = w·x + b on 30 inputs.
inline TinyModel linear_model() {
  constexpr std::size_t kInputs = 30, kBatch = 16;
  TinyModel model;
  model.parameters = {{"w", kInputs}, {"b", 1}};
  model.start = {noise(kInputs, 1, 0.1f), {0.0f}};
  const std::vector<float> truth = noise(kInputs, 2, 1.0f);
  model.gradient = [truth](const Tensors& theta, int rank) {
    const std::vector<float> x = noise(kBatch * kInputs, 100 + std::uint32_t(rank), 1.0f);
    Tensors g = {std::vector<float>(kInputs, 0.0f), {0.0f}};
    for (std::size_t n = 0; n < kBatch; ++n) {
      float error = theta[1][0] - 0.5f;
      for (std::size_t i = 0; i < kInputs; ++i) error += (theta[0][i] - truth[i]) * x[n * kInputs + i];
      for (std::size_t i = 0; i < kInputs; ++i) g[0][i] += 2.0f / kBatch * error * x[n * kInputs + i];
      g[1][0] += 2.0f / kBatch * error;
    }
    return g;
  };
  return model;
}

/// y = w2 · relu(w1 · x + b1) with 10 inputs, 24 hidden units and 3 outputs.
inline TinyModel relu_model() {
  constexpr std::size_t kInputs = 10, kHidden = 24, kOutputs = 3, kBatch = 16;
  TinyModel model;
  model.parameters = {{"w1", kHidden * kInputs}, {"b1", kHidden}, {"w2", kOutputs * kHidden}};
  model.start = {noise(kHidden * kInputs, 3, 0.3f), std::vector<float>(kHidden, 0.01f),
                 noise(kOutputs * kHidden, 4, 0.3f)};
  model.gradient = [](const Tensors& theta, int rank) {
    const std::vector<float> x = noise(kBatch * kInputs, 200 + std::uint32_t(rank), 1.0f);
    const std::vector<float> y = noise(kBatch * kOutputs, 300 + std::uint32_t(rank), 1.0f);
    Tensors g = {std::vector<float>(kHidden * kInputs, 0.0f), std::vector<float>(kHidden, 0.0f),
                 std::vector<float>(kOutputs * kHidden, 0.0f)};
    for (std::size_t n = 0; n < kBatch; ++n) {
      std::vector<float> h(kHidden), dh(kHidden, 0.0f);
      for (std::size_t j = 0; j < kHidden; ++j) {
        h[j] = theta[1][j];
        for (std::size_t i = 0; i < kInputs; ++i) h[j] += theta[0][j * kInputs + i] * x[n * kInputs + i];
      }
      for (std::size_t o = 0; o < kOutputs; ++o) {
        float error = -y[n * kOutputs + o];
        for (std::size_t j = 0; j < kHidden; ++j) error += theta[2][o * kHidden + j] * std::max(h[j], 0.0f);
        error *= 2.0f / float(kBatch * kOutputs);
        for (std::size_t j = 0; j < kHidden; ++j) {
          g[2][o * kHidden + j] += error * std::max(h[j], 0.0f);
          dh[j] += error * theta[2][o * kHidden + j];
        }
      }
      for (std::size_t j = 0; j < kHidden; ++j) {
        if (h[j] <= 0) continue;
        g[1][j] += dh[j];
        for (std::size_t i = 0; i < kInputs; ++i) g[0][j * kInputs + i] += dh[j] * x[n * kInputs + i];
      }
    }
    return g;
  };
  return model;
}

/// Plain data-parallel SGD: the ranks' mean gradient, then momentum as PyTorch has it.
inline Tensors train_plainly(const TinyModel& model, int ranks, int steps, float rate, float momentum, bool nesterov) {
  Tensors theta = model.start, velocity = model.start;
  for (auto& u : velocity) u.assign(u.size(), 0.0f);
  for (int step = 0; step < steps; ++step) {
    std::vector<Tensors> gradients;
    for (int rank = 0; rank < ranks; ++rank) gradients.push_back(model.gradient(theta, rank));
    for (std::size_t p = 0; p < theta.size(); ++p)
      for (std::size_t i = 0; i < theta[p].size(); ++i) {
        float g = 0;
        for (const Tensors& one : gradients) g += one[p][i];
        g /= float(ranks);
        float& u = velocity[p][i];
        u = momentum * u + g;
        theta[p][i] -= rate * (nesterov ? g + momentum * u : u);
      }
  }
  return theta;
}

/// ||a - b|| / ||b||
inline double relative_distance(const Tensors& a, const Tensors& b) {
  double difference = 0, norm = 0;
  for (std::size_t p = 0; p < a.size(); ++p)
    for (std::size_t i = 0; i < a[p].size(); ++i) {
      difference += (double(a[p][i]) - b[p][i]) * (double(a[p][i]) - b[p][i]);
      norm += double(b[p][i]) * b[p][i];
    }
  return std::sqrt(difference / norm);
}

}  // namespace thinwire::reference
