// What the reducer's tests share: a model of several parameters, its buckets, gradients that differ everywhere, and steps.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "cases.h"
#include "helpers.h"
#include "thinwire/reducer.h"

namespace thinwire::test {

/// Two large parameters, small ones around them, one of a single element and one of none.
inline std::vector<Parameter> model() {
  return {{"conv.weight", 600}, {"conv.bias", 7}, {"fc.weight", 1500}, {"fc.bias", 33}, {"scale", 1}, {"nothing", 0}};
}
inline constexpr std::size_t kDenseBelow = 50;  ///< what makes all but the weights small
inline const std::set<std::string> kSmall = {"conv.bias", "fc.bias", "scale", "nothing"};

inline std::size_t numel_of(const std::string& name) {
  for (const Parameter& parameter : model())
    if (parameter.name == name) return parameter.numel;
  return 0;
}
inline Bucket bucket_of(const std::vector<std::string>& names) {
  Bucket bucket;
  for (const std::string& name : names) bucket.slices.push_back({name, numel_of(name)});
  return bucket;
}
inline std::vector<Bucket> two_buckets() {
  return {bucket_of({"conv.weight", "conv.bias"}), bucket_of({"nothing", "fc.weight", "fc.bias", "scale"})};
}
/// The same parameters in another order and grouping.
inline std::vector<Bucket> three_buckets() {
  return {bucket_of({"fc.bias", "scale", "fc.weight"}), bucket_of({"nothing"}),
          bucket_of({"conv.bias", "conv.weight"})};
}

inline std::uint32_t gradient_seed(std::uint64_t step, int rank, const std::string& name) {
  return static_cast<std::uint32_t>(1 + step * 1009 + std::uint64_t(rank) * 131 + name.size() * 17 +
                                    std::uint8_t(name[0]));
}
/// The gradient of a bucket on one rank, zeros where it has none. `values` makes those of one parameter from a seed.
template <class Values>
std::vector<float> gradient_of(const Bucket& bucket, std::uint64_t step, int rank, const Values& values) {
  std::vector<float> all;
  for (const BucketSlice& slice : bucket.slices) {
    const std::vector<float> one = values(slice.numel, gradient_seed(step, rank, slice.name));
    for (const float value : one) all.push_back(slice.has_gradient ? value : 0.0f);
  }
  return all;
}
inline std::vector<float> gradient_of(const Bucket& bucket, std::uint64_t step, int rank) {
  return gradient_of(bucket, step, rank,
                     [](std::size_t n, std::uint32_t s) { return make_values(Distribution::normal, n, s); });
}

/// Gives all buckets of a step to the reducer, waits for all, and returns their means. begin_step is the caller's.
inline std::vector<std::vector<float>> reduce_all(Reducer& reducer, const std::vector<Bucket>& buckets,
                                                  const std::vector<std::vector<float>>& gradients,
                                                  DType dtype = DType::f32) {
  std::vector<GradientBuffer> buffers;
  std::vector<Work> works;
  for (const std::vector<float>& gradient : gradients) buffers.emplace_back(gradient, dtype);
  for (std::size_t i = 0; i < buckets.size(); ++i) works.push_back(reducer.reduce(buckets[i], buffers[i].view()));
  for (Work& work : works) work.wait();
  std::vector<std::vector<float>> means;
  for (const GradientBuffer& buffer : buffers) {
    EXPECT_TRUE(buffer.intact());
    means.push_back(buffer.floats());
  }
  return means;
}
/// The same with the usual gradients.
inline std::vector<std::vector<float>> reduce_all(Reducer& reducer, const std::vector<Bucket>& buckets, int rank) {
  std::vector<std::vector<float>> gradients;
  for (const Bucket& bucket : buckets) gradients.push_back(gradient_of(bucket, reducer.step(), rank));
  return reduce_all(reducer, buckets, gradients);
}

inline ReducerOptions options_with(const Selector& selector) {
  ReducerOptions options;
  options.selector = selector;
  options.dense_below = kDenseBelow;
  return options;
}

inline ::testing::AssertionResult same_states(const std::vector<ParameterState>& actual,
                                              const std::vector<ParameterState>& expected) {
  if (actual.size() != expected.size()) return ::testing::AssertionFailure() << actual.size() << " parameters";
  for (std::size_t i = 0; i < actual.size(); ++i) {
    if (actual[i].name != expected[i].name)
      return ::testing::AssertionFailure() << actual[i].name << " instead of " << expected[i].name;
    if (auto same = same_bits(actual[i].residual, expected[i].residual); !same)
      return same << " (residual of " << actual[i].name << ")";
    if (auto same = same_bits(actual[i].velocity, expected[i].velocity); !same)
      return same << " (velocity of " << actual[i].name << ")";
  }
  return ::testing::AssertionSuccess();
}

/// A model of one parameter, normal gradients for it or others, and a step of one bucket.
inline const std::vector<Parameter> kOne = {{"w", 2000}};
inline const Bucket kOneBucket = {{{"w", 2000}}};

inline std::vector<float> normal(std::size_t numel, std::uint64_t step, int rank) {
  return make_values(Distribution::normal, numel, static_cast<std::uint32_t>(1 + 1000 * step + std::uint64_t(rank)));
}

/// Reduces one gradient and returns the mean.
inline std::vector<float> reduce_one(Reducer& reducer, const Bucket& bucket, const std::vector<float>& gradient) {
  return reduce_all(reducer, {bucket}, {gradient})[0];
}

}  // namespace thinwire::test
