// How noisy a sampled threshold is, against theory: a plain sample, and the one that HashedSlots takes.
#include <set>
#include <utility>

#include "dragonn_theory.h"

namespace thinwire::test {
namespace {

#ifndef THINWIRE_SMALL_TESTS

/// A plain sample with replacement, 1 % of the unit, threshold at its ceil(1 %·n·D)-th value: how many elements reach the
/// threshold, in k. Only ranks matter, so elements are their ranks 1 … n; n is a power of two.
double plain_sample_selects(std::uint32_t numel, double density, std::mt19937& random) {
  const auto samples = std::uint32_t(std::ceil(0.01 * numel));
  const auto wanted = std::ptrdiff_t(std::ceil(samples * density));
  std::vector<std::uint32_t> best;  // a 64th of the sample: 20 draws and more, of which at most a tenth is wanted
  for (std::uint32_t i = 0; i < samples; ++i)
    if (const std::uint32_t rank = random() & (numel - 1); rank < numel / 64) best.push_back(rank + 1);
  if (std::ssize(best) < wanted) return 1.0 / 64 / density;
  std::nth_element(best.begin(), best.begin() + wanted - 1, best.end());
  return double(best[std::size_t(wanted) - 1]) / std::round(density * numel);
}

struct Spread {
  std::uint32_t numel;
  double low, high;  // 5 and 95 percentile of selected / k
  int trials;
};

// Each end has 5 % beyond it: up to the standard deviation of a share, and 0.4 % since the ends have two digits.
TEST(DragonnTheory, APlainSampleIsTooNoisyForSmallTensors) {
  std::mt19937 random(1);
  for (const Spread& spread :
       {Spread{1u << 17, 0.28, 3.6, 4000}, Spread{1u << 20, 0.59, 1.63, 2000}, Spread{1u << 22, 0.76, 1.27, 1000}}) {
    double below = 0;
    double above = 0;
    for (int trial = 0; trial < spread.trials; ++trial) {
      const double selected = plain_sample_selects(spread.numel, 0.001, random);
      below += (selected < spread.low) / double(spread.trials);
      above += (selected > spread.high) / double(spread.trials);
    }
    record("below." + std::to_string(spread.numel), below);
    record("above." + std::to_string(spread.numel), above);
    const double tolerance = kSigmas * std::sqrt(0.05 * 0.95 / spread.trials) + 0.004;
    EXPECT_NEAR(below, 0.05, tolerance) << spread.numel << " elements";
    EXPECT_NEAR(above, 0.05, tolerance) << spread.numel << " elements";
  }
}

/// A unit whose element of rank r has the magnitude n + 1 - r, in an order that a sample cannot notice.
std::vector<float> ranks_as_values(std::uint32_t numel) {
  std::vector<float> values(numel);
  for (std::uint32_t i = 0; i < numel; ++i) values[i] = float(((i * 2654435761u) & (numel - 1)) + 1);
  return values;
}

/// The last rank among the entries that `select` sends: the number of candidates, less the one or two that lost behind it.
double last_rank_sent(const HashedSlots& how, const std::vector<float>& values, std::uint32_t seed,
                      SparseGradient& out) {
  const UnitSegment unit{values.data(), values.size(), 0};
  select(how, {&unit, 1}, seed, out);
  float least = float(values.size());
  for (std::size_t i = 0; i < out.nnz(); ++i)
    if (out.indices[i] != kEmptySlot) least = std::min(least, std::fabs(out.values[i]));
  return double(values.size()) + 1 - double(least);
}

// thinwire samples for 64 candidates whatever the size: the spread is 1/sqrt(64) everywhere.
TEST(DragonnTheory, ThinwiresThresholdIsAsGoodForSmallTensors) {
  SparseGradient out;
  for (const auto& [log2, trials] : {std::pair{17, 100}, std::pair{20, 40}, std::pair{22, 10}})
    for (const Layout layout : {Layout::a, Layout::b}) {
      SCOPED_TRACE("2^" + std::to_string(log2) + " elements, layout " + name(layout));
      const std::vector<float> values = ranks_as_values(1u << log2);
      const double rank = candidates_of(layout, std::round(0.001 * double(values.size())));
      Average average;
      double outside = 0;  // further off than two standard deviations
      for (int trial = 0; trial < trials; ++trial) {
        const double selected = last_rank_sent({0.001, layout, 0.01}, values, seed_of(trial), out) / rank;
        average.add(selected);
        outside += std::fabs(selected - 1) > 2 * 0.125;
      }
      record("mean.2_to_" + std::to_string(log2) + "." + name(layout), average.mean());
      record("deviation.2_to_" + std::to_string(log2) + "." + name(layout), average.deviation());
      EXPECT_NEAR(average.mean(), 1.0, kSigmas * 0.125 / std::sqrt(trials) + 0.02);
      EXPECT_NEAR(average.deviation() / 0.125, 1.0, kSigmas / std::sqrt(2.0 * trials));
      EXPECT_LE(outside, 0.1 * trials + kSigmas * std::sqrt(0.1 * 0.9 * trials));  // of the 5 to 95 percentile
    }
}

// Up to 2·64/D elements there is no sample, so no noise: never an entry beyond the rank, and every one of them at times.
TEST(DragonnTheory, UnitsBelowTwiceTheSampleAreReadWhole) {
  SparseGradient out;
  for (const Layout layout : {Layout::a, Layout::b}) {
    const std::vector<float> values = ranks_as_values(1u << 16);
    const double numel = double(values.size());
    const double rank = candidates_of(layout, layout == Layout::a ? 33 : 66);
    const HashedSlots how{layout == Layout::a ? 0.0005 : 0.001, layout, 0.01};
    std::set<float> ever;
    for (int trial = 0; trial < 60; ++trial) {
      EXPECT_LE(last_rank_sent(how, values, seed_of(trial), out), rank);
      ever.insert(out.values.begin(), out.values.end());
    }
    ever.erase(0.0f);
    EXPECT_EQ(double(ever.size()), rank);
    EXPECT_EQ(double(*ever.begin()), numel + 1 - rank);
  }
}

#endif

}  // namespace
}  // namespace thinwire::test
