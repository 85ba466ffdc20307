// select.h, SampledTopK: what happens when the sample shows too little or too much.
#include <algorithm>
#include <cmath>

#include "cases.h"
#include "helpers.h"
#include "reference/selection.h"
#include "thinwire/select.h"

namespace thinwire::test {
namespace {

constexpr std::size_t kNumel = 200'000;
constexpr SampledTopK kHow{0.01, 0.01};
const std::size_t kTarget = target_count(kHow, kNumel);

SparseGradient selected(Selection& selection, std::span<const float> values, std::uint32_t seed) {
  const UnitSegment unit{values.data(), values.size(), 0};
  SparseGradient out;
  select(kHow, {&unit, 1}, seed, selection, out);
  return out;
}

// Magnitudes grow with the index, so that a cut by index would keep the smallest survivors.
TEST(SampledTopK, KeepsTheLargestOfTooMany) {
  std::vector<float> values(kNumel);
  for (std::size_t i = 0; i < kNumel; ++i) values[i] = float(i + 1) * (i % 3 == 0 ? -1.0f : 1.0f);
  // The sample is told that all are small, so that everything else survives.
  const std::uint32_t seed = 5;
  const reference::Stride sampled = reference::sample_positions(kHow, kNumel, seed);
  ASSERT_EQ(sampled.stride, 97u);
  for (std::size_t i = sampled.start; i < kNumel; i += sampled.stride) values[i] = 0.5f;
  Selection selection;
  const SparseGradient out = selected(selection, values, seed);
  EXPECT_EQ(selection.fallbacks(), 0u);
  ASSERT_EQ(out.nnz(), kTarget);
  const UnitSegment unit{values.data(), kNumel, 0};
  EXPECT_EQ(out.indices, reference::top_k({&unit, 1}, kHow.density).indices);
}

// The sample is told that all are large: the threshold comes down by fifths until enough reach it.
TEST(SampledTopK, LowersAThresholdThatTooFewReach) {
  std::vector<float> values = make_values(Distribution::normal, kNumel, 2);
  const std::uint32_t seed = 5;
  const reference::Stride sampled = reference::sample_positions(kHow, kNumel, seed);
  std::size_t count = 0;
  for (std::size_t i = sampled.start; i < kNumel; i += sampled.stride) {
    values[i] = (count++ % 50 == 0) ? 8.0f : values[i];  // twice as many as the threshold's rank
  }
  Selection selection;
  const SparseGradient out = selected(selection, values, seed);
  EXPECT_GE(selection.fallbacks(), 4u);
  EXPECT_LE(selection.fallbacks(), 6u);  // 8 · 0.8^6 = 2.1, which more than k normal values reach
  EXPECT_GE(double(out.nnz()), 0.8 * double(kTarget));
  EXPECT_LE(out.nnz(), kTarget);
}

// Ten times a fifth less is a tenth: what lies below is not found, and nothing hangs.
TEST(SampledTopK, TakesWhatIsThereAfterTenRounds) {
  std::vector<float> values(kNumel);
  for (std::size_t i = 0; i < kNumel; ++i) values[i] = 1e-6f * float(i % 1000 + 1);
  const std::uint32_t seed = 5;
  const reference::Stride sampled = reference::sample_positions(kHow, kNumel, seed);
  std::size_t large = 0;
  for (std::size_t i = sampled.start, count = 0; i < kNumel; i += sampled.stride)
    if (count++ % 50 == 0) values[i] = -7.0f, ++large;
  Selection selection;
  const SparseGradient out = selected(selection, values, seed);
  EXPECT_EQ(selection.fallbacks(), 10u);
  EXPECT_EQ(out.nnz(), large);
  for (const float value : out.values) EXPECT_EQ(value, -7.0f);
}

// Any seed: about k, never more, and always the largest.
TEST(SampledTopK, ReturnsAboutAsManyAsAskedFor) {
  const std::vector<float> values = make_values(Distribution::student_t3, kNumel, 8);
  const UnitSegment unit{values.data(), kNumel, 0};
  Selection selection;
  std::size_t whole = 0;
  for (std::uint32_t seed = 0; seed < 20; ++seed) {
    const SparseGradient out = selected(selection, values, seed);
    EXPECT_LE(out.nnz(), kTarget);
    EXPECT_GE(double(out.nnz()), 0.8 * double(kTarget));
    EXPECT_EQ(out.indices, reference::top_k({&unit, 1}, double(out.nnz()) / double(kNumel)).indices) << "seed " << seed;
    whole += out.nnz() == kTarget;
  }
  EXPECT_GT(whole, 4u);
  EXPECT_LT(whole, 20u);
}

}  // namespace
}  // namespace thinwire::test
