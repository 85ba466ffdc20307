// What hashing into slots does to a gradient, against theory. l candidates in S slots, i.e. HashedSlots of k = 1 % of a
// unit: A has l = 2k, S = k; B has l = k, S = 4k. The larger magnitude wins a slot, so the candidate of rank j (0 = largest)
// survives iff none of the j larger ones shares its slot, with probability (1-1/S)^j. Seeds are fixed; tolerances are
// multiples of the standard deviation of what is averaged, kSigmas unless said. What is measured goes to the report that
// --gtest_output=xml:FILE writes.
#include <algorithm>
#include <iomanip>
#include <numeric>
#include <set>
#include <sstream>

#include "cases.h"
#include "core/hash.h"
#include "helpers.h"
#include "reference/murmur3.h"
#include "thinwire/reducer.h"
#include "thinwire/select.h"

namespace thinwire::test {
namespace {

using Layout = HashedSlots::Layout;

constexpr double kSigmas = 4.0;
#ifdef THINWIRE_SMALL_TESTS
constexpr int kShrink = 8;
#else
constexpr int kShrink = 1;
#endif

std::uint32_t seed_of(int trial) { return reference::hash_counter(std::uint32_t(trial), 2022); }

std::size_t kept(const SparseGradient& out) {
  return out.nnz() - std::size_t(std::count(out.indices.begin(), out.indices.end(), kEmptySlot));
}

/// How many of `slots` hold something after `candidates` have been hashed into them, and how much that varies.
double expected_kept(double slots, double candidates) { return slots * (1 - std::pow(1 - 1 / slots, candidates)); }
double kept_deviation(double slots, double candidates) {
  const double one_free = std::pow(1 - 1 / slots, candidates);
  const double two_free = std::pow(1 - 2 / slots, candidates);
  return std::sqrt(slots * (slots - 1) * two_free + slots * one_free - slots * slots * one_free * one_free);
}
/// What a layout does with a unit of which k elements are to travel.
double slots_of(Layout layout, double k) { return layout == Layout::a ? k : 4 * k; }
double candidates_of(Layout layout, double k) { return layout == Layout::a ? 2 * k : k; }
/// The share of ‖v‖² that hashing sends at least, on the average: (S/d)(1-(1-1/S)^l).
double delta_of(Layout layout, double k, double numel) {
  return expected_kept(slots_of(layout, k), candidates_of(layout, k)) / numel;
}

/// The whole unit is read for the threshold, so that l is exact.
HashedSlots exact(double density, Layout layout) { return {density, layout, 1.0}; }

/// Zeros but for `count` random places, which hold distinct magnitudes in random order, or equal ones.
std::vector<float> scattered(std::size_t numel, std::size_t count, std::uint32_t seed, bool equal = false) {
  std::mt19937 random(seed);
  std::vector<float> values(numel, 0.0f);
  for (std::size_t i = 0; i < count; ++i) values[i] = equal ? 1.0f : 1.0f + float(i) / float(numel);
  for (std::size_t i = 0; i < count; ++i) values[i] *= random() % 2 == 0 ? 1.0f : -1.0f;
  std::shuffle(values.begin(), values.end(), random);
  return values;
}

std::string name(Layout layout) { return layout == Layout::a ? "a" : "b"; }

/// Three decimals, for the report.
void record(const std::string& what, double value) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(3) << value;
  ::testing::Test::RecordProperty(what, text.str());
}

struct Average {
  double sum = 0, squares = 0, count = 0;
  void add(double value) {
    sum += value;
    squares += value * value;
    ++count;
  }
  double mean() const { return sum / count; }
  double deviation() const { return std::sqrt(std::max(0.0, (squares - sum * sum / count) / (count - 1))); }
  double error() const { return deviation() / std::sqrt(count); }
};

// ---- survival ------------------------------------------------------------------------------------------------------

struct Budget {
  Layout layout;
  double candidates;  // in k
  double kept;        // in k, for large k
  bool equal = false;
};
const std::vector<Budget> kBudgets = {{Layout::a, 1, 0.632},      {Layout::a, 2, 0.865}, {Layout::a, 4, 0.982, true},
                                      {Layout::b, 0.5, 0.470},    {Layout::b, 1, 0.885}, {Layout::a, 2, 0.865, true},
                                      {Layout::b, 1, 0.885, true}};

TEST(DragonnTheory, CandidatesSurviveAsOccupancySays) {
  const int trials = 400 / kShrink;
  for (const std::size_t k : {100u, 400u})
    for (const Budget& budget : kBudgets) {
      SCOPED_TRACE("layout " + name(budget.layout) + ", k = " + std::to_string(k) + ", " +
                   std::to_string(budget.candidates) + " k candidates");
      const std::size_t numel = 10 * k;
      const double slots = slots_of(budget.layout, double(k));
      const double candidates = budget.candidates * double(k);
      Average average;
      SparseGradient out;
      const std::vector<float> values = scattered(numel, std::size_t(candidates), 7, budget.equal);
      const UnitSegment unit{values.data(), numel, 0};
      for (int trial = 0; trial < trials; ++trial) {
        select(exact(0.1, budget.layout), {&unit, 1}, seed_of(trial), out);
        average.add(double(kept(out)));
      }
      const double deviation = kept_deviation(slots, candidates);
      EXPECT_NEAR(average.mean(), expected_kept(slots, candidates), kSigmas * deviation / std::sqrt(trials));
      EXPECT_NEAR(average.deviation() / deviation, 1.0, kSigmas / std::sqrt(2.0 * trials));
      std::ostringstream what;
      what << name(budget.layout) << "." << budget.candidates << "k" << (budget.equal ? ".equal" : "");
      if (k == 400) record(what.str(), average.mean() / double(k));
      // (1-1/S)^l has come to e^(-l/S) up to l/(2S^2): 0.2 % of k for k = 100.
      EXPECT_NEAR(expected_kept(slots, candidates) / double(k), budget.kept, 0.0005 + 0.2 / double(k));
    }
}

// Without error feedback each step has the same candidates, and another seed.
TEST(DragonnTheory, TheReducerSendsAsManyAsSurvive) {
  const int steps = 100 / kShrink;
  constexpr std::size_t kNumel = 2000;
  constexpr std::size_t kTarget = 200;
  for (const Layout layout : {Layout::a, Layout::b}) {
    ReducerOptions options = dragonn();
    options.selector = exact(0.1, layout);
    options.dense_below = 0;
    options.error_feedback = false;
    const double slots = slots_of(layout, kTarget);
    const double candidates = candidates_of(layout, kTarget);
    run_ranks(2, [&](Communicator& communicator) {
      Reducer reducer(options, {{"weight", kNumel}}, communicator);
      Average average;
      for (int step = 0; step < steps; ++step) {
        std::vector<float> gradient = scattered(kNumel, std::size_t(candidates), std::uint32_t(communicator.rank()));
        reducer.begin_step();
        reducer.reduce({{{"weight", kNumel}}}, {gradient.data(), kNumel}).wait();
        average.add(double(reducer.stats().entries_sent));
      }
      const double deviation = kept_deviation(slots, candidates);
      EXPECT_NEAR(average.mean(), expected_kept(slots, candidates), kSigmas * deviation / std::sqrt(steps));
      EXPECT_NEAR(average.deviation() / deviation, 1.0, kSigmas / std::sqrt(2.0 * steps));
    });
  }
}

/// How often each index was sent in `trials` selections with another seed each; `values(trial)` may change too.
template <class Values>
std::vector<int> times_sent(const HashedSlots& how, std::size_t numel, int trials, const Values& values) {
  std::vector<int> times(numel, 0);
  SparseGradient out;
  for (int trial = 0; trial < trials; ++trial) {
    const std::vector<float> now = values(trial);
    const UnitSegment unit{now.data(), numel, 0};
    select(how, {&unit, 1}, seed_of(trial), out);
    for (const std::uint32_t index : out.indices)
      if (index != kEmptySlot) ++times[index];
  }
  return times;
}

/// Every count is binomial with its own probability: none off by more than 5 standard deviations, and their squares
/// together are what independent ones have, up to 6 deviations (the counts of one table depend on each other a little).
void expect_binomial(const std::vector<int>& times, const std::vector<double>& chances, int trials) {
  double squares = 0;
  std::size_t free = 0;
  for (std::size_t i = 0; i < times.size(); ++i) {
    const double deviation = std::sqrt(trials * chances[i] * (1 - chances[i]));
    if (deviation == 0) {
      EXPECT_EQ(times[i], std::lround(trials * chances[i])) << "candidate " << i;
      continue;
    }
    const double off = (times[i] - trials * chances[i]) / deviation;
    EXPECT_LT(std::fabs(off), 5.0) << "candidate " << i << " was sent " << times[i] << " times of " << trials
                                   << ", chance " << chances[i];
    squares += off * off;
    ++free;
  }
  EXPECT_NEAR(squares / double(free), 1.0, 6 * std::sqrt(2.0 / double(free)));
}

// Survival depends on the rank among the candidates alone; of equal magnitudes the smaller index ranks higher. So it is
// the larger entries that survive, and among equal ones those in front.
TEST(DragonnTheory, SurvivalFollowsRank) {
  const int trials = 4000 / kShrink;
  for (const Layout layout : {Layout::a, Layout::b})
    for (const bool equal : {false, true}) {
      SCOPED_TRACE("layout " + name(layout) + (equal ? ", equal" : ", distinct"));
      const double slots = slots_of(layout, 50);
      const auto candidates = std::size_t(candidates_of(layout, 50));
      const std::vector<float> values = scattered(candidates, candidates, 11, equal);  // nothing but candidates
      const std::vector<int> times = times_sent(exact(50.0 / double(candidates), layout), candidates, trials,
                                                [&](int) -> const std::vector<float>& { return values; });
      std::vector<double> chances;
      for (const float value : values) {
        const auto larger = std::count_if(values.begin(), values.end(),
                                          [&](float other) { return std::fabs(other) > std::fabs(value); });
        chances.push_back(std::pow(1 - 1 / slots, equal ? double(chances.size()) : double(larger)));
      }
      expect_binomial(times, chances, trials);
      EXPECT_NEAR(std::accumulate(chances.begin(), chances.end(), 0.0), expected_kept(slots, double(candidates)), 1e-9);
    }
}

// Averaged over what stands where, no place is better than another: q = (S/l)(1-(1-1/S)^l) each.
TEST(DragonnTheory, SurvivalDoesNotDependOnThePlace) {
  const int trials = 4000 / kShrink;
  for (const Layout layout : {Layout::a, Layout::b}) {
    const double slots = slots_of(layout, 50);
    const auto candidates = std::size_t(candidates_of(layout, 50));
    const std::vector<int> times =
        times_sent(exact(50.0 / double(candidates), layout), candidates, trials,
                   [&](int trial) { return scattered(candidates, candidates, 1000 + std::uint32_t(trial)); });
    const double chance = expected_kept(slots, double(candidates)) / double(candidates);
    expect_binomial(times, std::vector<double>(candidates, chance), trials);
  }
}

// ---- contraction ---------------------------------------------------------------------------------------------------

enum class Shape { normal, laplace, student_t3, nearly_equal };
constexpr std::array<Shape, 4> kShapes = {Shape::normal, Shape::laplace, Shape::student_t3, Shape::nearly_equal};
std::string name(Shape shape) {
  constexpr std::array<const char*, 4> kNames = {"normal", "laplace", "student_t3", "nearly_equal"};
  return kNames[static_cast<std::size_t>(shape)];
}

std::vector<float> values_of(Shape shape, std::size_t numel, std::uint32_t seed) {
  if (shape == Shape::normal) return make_values(Distribution::normal, numel, seed);
  if (shape == Shape::laplace) return make_values(Distribution::laplace, numel, seed);
  if (shape == Shape::student_t3) return make_values(Distribution::student_t3, numel, seed);
  std::vector<float> values = scattered(numel, numel, seed);  // 1 … 2, all different
  for (float& value : values) value = std::copysign(1 + (std::fabs(value) - 1) / 1024, value);
  return values;
}

double squares(std::span<const float> values) {
  double sum = 0;
  for (const float value : values) sum += double(value) * value;
  return sum;
}

struct Contraction {
  double measured = 0, error = 0;  // E‖v-C(v)‖² / ‖v‖² over seeds
  double exact = 0;                // 1 - Σ_j (1-1/S)^j v_j² / ‖v‖², by rank
  double uniform_winner = 0;       // 1 - q·Σ v_j² / ‖v‖² over the candidates
  double bound = 0;                // 1 - delta
};

Contraction contraction_of(const std::vector<float>& values, double density, Layout layout, int trials) {
  const std::size_t numel = values.size();
  const double all = squares(values);
  const UnitSegment unit{values.data(), numel, 0};
  Average average;
  SparseGradient out;
  for (int trial = 0; trial < trials; ++trial) {
    select(exact(density, layout), {&unit, 1}, seed_of(trial), out);
    average.add(1 - squares(out.values) / all);  // free slots hold 0
  }
  const double k = std::round(density * double(numel));
  const double slots = slots_of(layout, k);
  const double candidates = candidates_of(layout, k);
  std::vector<float> ranked = values;
  std::sort(ranked.begin(), ranked.end(), [](float a, float b) { return std::fabs(a) > std::fabs(b); });
  Contraction result{average.mean(), average.error(), 1, 1, 1 - delta_of(layout, k, double(numel))};
  for (std::size_t j = 0; j < std::size_t(candidates); ++j) {
    const double share = double(ranked[j]) * ranked[j] / all;
    result.exact -= std::pow(1 - 1 / slots, double(j)) * share;
    result.uniform_winner -= expected_kept(slots, candidates) / candidates * share;
  }
  return result;
}

// E‖v-C(v)‖² <= (1-delta)‖v‖², with equality where all magnitudes are equal; and since the larger magnitude wins a slot,
// never more than with a winner by lot.
TEST(DragonnTheory, HashingIsAContraction) {
  const int trials = 64 / kShrink;
  for (const std::size_t numel : {std::size_t{2000}, std::size_t(kShrink > 1 ? 4000 : 20'000)})
    for (const double density : {0.01, 0.05})
      for (const Layout layout : {Layout::a, Layout::b})
        for (const Shape shape : kShapes) {
          SCOPED_TRACE(name(shape) + ", density " + std::to_string(density) + ", layout " + name(layout) + ", " +
                       std::to_string(numel) + " elements");
          const Contraction c =
              contraction_of(values_of(shape, numel, 31 + std::uint32_t(shape)), density, layout, trials);
          if (density == 0.01) {
            const std::string what = name(shape) + "." + name(layout) + ".";
            record(what + "sent", 1 - c.measured);
            record(what + "uniform_winner", 1 - c.uniform_winner);
            record(what + "delta", 1 - c.bound);
          }
          EXPECT_NEAR(c.measured, c.exact, kSigmas * c.error + 1e-9);
          EXPECT_LE(c.exact, c.uniform_winner + 1e-12);
          EXPECT_LE(c.uniform_winner, c.bound + 1e-12);
          EXPECT_LE(c.measured, c.bound + kSigmas * c.error);
          if (shape == Shape::nearly_equal)
            EXPECT_NEAR(c.measured, c.bound, kSigmas * c.error + 0.003 * (1 - c.bound));  // magnitudes differ by 0.1 %
          else
            EXPECT_LT(c.measured, c.bound - 2 * (1 - c.bound));  // these send three times delta and more
        }
}

/// ‖v‖² on rank 0 after each of `steps` steps, relative to the squares of one gradient. `fresh`: a new gradient in every
/// step, else only in the first one.
std::vector<Average> residuals_over(int steps, int runs, Layout layout, Shape shape, bool fresh) {
  constexpr std::size_t kNumel = 2000;
  std::vector<Average> over(std::size_t(steps), Average{});
  for (int run = 0; run < runs; ++run)
    run_ranks(2, [&](Communicator& communicator) {
      ReducerOptions options = dragonn();
      options.selector = exact(0.05, layout);
      options.dense_below = 0;
      options.seed = std::uint64_t(run) + 1;
      Reducer reducer(options, {{"weight", kNumel}}, communicator);
      double one = 0;  // the largest so far
      for (int step = 0; step < steps; ++step) {
        std::vector<float> gradient(kNumel, 0.0f);
        if (fresh || step == 0) gradient = values_of(shape, kNumel, std::uint32_t(100 * step + communicator.rank()));
        one = std::max(one, squares(gradient));
        reducer.begin_step();
        reducer.reduce({{{"weight", kNumel}}}, {gradient.data(), kNumel}).wait();
        if (communicator.rank() == 0) over[std::size_t(step)].add(squares(reducer.residual().residual("weight")) / one);
      }
    });
  return over;
}

// What one gradient leaves in the residual shrinks at least by (1-delta) a step: E‖v_t‖² <= (1-delta)^t ‖g‖².
TEST(DragonnTheory, AGradientLeavesTheResidualGeometrically) {
  constexpr int kSteps = 12;
  for (const Layout layout : {Layout::a, Layout::b}) {
    const double delta = delta_of(layout, 100, 2000);
    // Of ‖v‖² after one step where all magnitudes are equal; a few runs alone do not tell.
    const double deviation = kept_deviation(slots_of(layout, 100), candidates_of(layout, 100)) / 2000;
    for (const Shape shape : kShapes) {
      const int runs = 16 / kShrink;
      const std::vector<Average> over = residuals_over(kSteps, runs, layout, shape, false);
      for (int t = 1; t <= kSteps; ++t) {
        const Average& left = over[std::size_t(t) - 1];
        const double error = std::max(left.error(), deviation * std::sqrt(double(t) / runs));
        EXPECT_LE(left.mean(), std::pow(1 - delta, t) + kSigmas * error) << name(shape) << ", t " << t;
        EXPECT_GT(left.mean(), 0.0);
      }
    }
  }
}

// With a new gradient in every step the residual stays bounded: by the triangle inequality its root mean square is at most
// ‖g‖·Σ (1-delta)^(i/2), i = 1 … t.
TEST(DragonnTheory, TheResidualStaysBounded) {
  constexpr int kSteps = 40;
  for (const Layout layout : {Layout::a, Layout::b}) {
    const double delta = delta_of(layout, 100, 2000);
    for (const Shape shape : {Shape::normal, Shape::student_t3}) {
      const std::vector<Average> over = residuals_over(kSteps, 8 / kShrink + 1, layout, shape, true);
      double bound = 0;
      for (int t = 1; t <= kSteps; ++t) {
        bound += std::pow(1 - delta, 0.5 * t);
        const Average& left = over[std::size_t(t) - 1];
        EXPECT_LE(std::sqrt(left.mean() + kSigmas * left.error()), bound) << name(shape) << ", t " << t;
      }
    }
  }
}

// ---- the sampled threshold -----------------------------------------------------------------------------------------

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

// ---- a new seed in every step --------------------------------------------------------------------------------------

TEST(DragonnTheory, EveryStepAndUnitHasASeedOfItsOwn) {
  std::set<std::uint32_t> seeds;
  for (const std::uint64_t seed : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{1} << 32})
    for (std::uint64_t step = 0; step < 500; ++step)
      for (const char* name : {"fc.weight", "fc.weighu", "gc.weight", "w", "conv1.weight", "conv2.weight"})
        seeds.insert(unit_seed(seed, step, name));
  EXPECT_EQ(seeds.size(), 3u * 500 * 6);
}

// A pair shares one of S slots in one step of S, and in two successive steps in one of S².
TEST(DragonnTheory, SuccessiveStepsCollideIndependently) {
  constexpr std::uint32_t kSlots = 16;
  constexpr int kSteps = 500;
  constexpr int kPairs = 400;
  int once = 0;
  int twice = 0;
  for (std::uint32_t pair = 0; pair < kPairs; ++pair) {
    bool before = false;
    for (std::uint64_t step = 0; step < kSteps; ++step) {
      const std::uint32_t seed = unit_seed(3, step, "weight");
      const bool now =
          scale_hash(murmur3_32(pair, seed), kSlots) == scale_hash(murmur3_32(pair * 7 + 1000, seed), kSlots);
      once += now;
      twice += now && before;
      before = now;
    }
  }
  const double both = 1.0 / (kSlots * kSlots);
  EXPECT_NEAR(once, kPairs * kSteps / double(kSlots), kSigmas * std::sqrt(kPairs * kSteps / double(kSlots)));
  EXPECT_NEAR(twice, kPairs * (kSteps - 1) * both, kSigmas * std::sqrt(kPairs * kSteps * both));
}

// 200 units, in each the same 15 large entries in every step and a small one in the first: with 8 slots the small one loses
// to some rival with chance 1-(7/8)^15 in a step. It stays in the residual, and of the units that still hold it that share
// remains after each step; were seeds shared by units, all would let go together, and were they shared by steps, none.
TEST(DragonnTheory, AFixedLoserIsSentSoonerOrLater) {
  constexpr std::size_t kUnits = 200;
  constexpr std::size_t kNumel = 64;
  constexpr std::size_t kSmall = 20;
  constexpr int kSteps = 40;
  std::vector<Parameter> parameters;
  Bucket bucket;
  for (std::size_t i = 0; i < kUnits; ++i) {
    parameters.push_back({"unit" + std::to_string(i), kNumel});
    bucket.slices.push_back({parameters.back().name, kNumel});
  }
  ReducerOptions options = dragonn({.density = 0.125, .layout = Layout::a});
  options.dense_below = 0;
  const double loses = 1 - std::pow(7.0 / 8, 15);
  run_ranks(2, [&](Communicator& communicator) {
    Reducer reducer(options, parameters, communicator);
    double waited = 0;
    std::set<std::vector<float>> left;  // by a unit after the first step
    for (int step = 1; step <= kSteps; ++step) {
      std::vector<float> gradient(kUnits * kNumel, 0.0f);
      for (std::size_t unit = 0; unit < kUnits; ++unit)
        for (std::size_t i = 0; i < 16; ++i)
          if (i != 5 || step == 1) gradient[unit * kNumel + 4 * i] = i == 5 ? 0.001f : 1.0f + float(i) / 16;
      reducer.begin_step();
      reducer.reduce(bucket, {gradient.data(), gradient.size()}).wait();
      double holding = 0;
      for (const Parameter& parameter : parameters) {
        const auto residual = reducer.residual().residual(parameter.name);
        holding += residual[kSmall] != 0.0f;
        if (step == 1) left.insert(std::vector<float>(residual.begin(), residual.end()));
      }
      const double expected = std::pow(loses, step);
      if (communicator.rank() == 0) record("still_waiting." + std::to_string(step), holding / kUnits);
      EXPECT_NEAR(holding / kUnits, expected, kSigmas * std::sqrt(expected * (1 - expected) / kUnits)) << step;
      waited += holding / kUnits;
    }
    EXPECT_GT(left.size(), kUnits * 9 / 10);  // the same gradient, but other entries travel
    // Steps that a loser waits: geometric, mean L/(1-L), standard deviation sqrt(L)/(1-L); cut at kSteps.
    const double mean = loses * (1 - std::pow(loses, kSteps)) / (1 - loses);
    EXPECT_NEAR(waited, mean, kSigmas * std::sqrt(loses) / (1 - loses) / std::sqrt(double(kUnits)));
  });
}

}  // namespace
}  // namespace thinwire::test
