// Which candidates survive hashing into slots, against theory. The larger magnitude wins a slot, so the candidate of rank j
// (0 = largest) survives iff none of the j larger ones shares its slot, with probability (1-1/S)^j. The seed of a step
// decides who meets whom.
#include <numeric>
#include <set>

#include "core/hash.h"
#include "dragonn_theory.h"
#include "thinwire/reducer.h"

namespace thinwire::test {
namespace {

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

// ---- a new seed in every step ---------------------------------------------------------------------------------------

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
