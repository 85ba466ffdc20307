// reducer.h, I6: a NaN or infinity on one rank shows on all of them, enters no residual, and the step is taken back.
#include <limits>

#include "failures.h"
#include "reference/reducer.h"

namespace thinwire::test {
namespace {

const float kNaN = std::numeric_limits<float>::quiet_NaN();
const float kInfinity = std::numeric_limits<float>::infinity();

/// Where the bad entries are: offset in bucket `bucket` of two_buckets(), on rank `rank`.
struct Bad {
  int rank;
  std::size_t bucket;
  std::size_t offset;
  float value;
};

struct Scenario {
  int ranks;
  std::uint64_t dense_steps;
  DType dtype;
  std::vector<Bad> bad;
};

/// Three good steps, the bad one, two good ones: all of it as the oracle says, with NaN only where an entry was bad.
void check(const Scenario& scenario) {
  SCOPED_TRACE(::testing::Message() << scenario.ranks << " ranks, " << scenario.dense_steps << " dense steps, "
                                    << to_string(scenario.dtype) << ", bucket " << scenario.bad[0].bucket << ", offset "
                                    << scenario.bad[0].offset);
  constexpr std::uint64_t kSteps = 6, kBadStep = 3;
  ReducerOptions options = options_with(TopK{0.02});
  options.momentum = 0.9f;
  options.schedule.dense_steps = scenario.dense_steps;
  const std::vector<Bucket> buckets = two_buckets();

  std::vector<std::vector<reference::Reducer::Gradients>> gradients(kSteps);  // [step][bucket][rank]
  std::vector<std::vector<std::vector<float>>> means(kSteps);                 // [step][bucket]
  std::vector<std::vector<std::vector<ParameterState>>> states(kSteps);       // [step][rank]
  reference::Reducer oracle(options, model(), kSmall, scenario.ranks);
  for (std::uint64_t step = 0; step < kSteps; ++step) {
    for (std::size_t b = 0; b < buckets.size(); ++b) {
      reference::Reducer::Gradients all;
      for (int rank = 0; rank < scenario.ranks; ++rank) {
        all.push_back(gradient_of(buckets[b], step, rank));
        for (const Bad& bad : scenario.bad)
          if (step == kBadStep && bad.rank == rank && bad.bucket == b) all.back()[bad.offset] = bad.value;
        for (float& value : all.back()) value = reference::rounded(scenario.dtype, value);
      }
      const std::vector<std::vector<bool>> has(std::size_t(scenario.ranks),
                                               std::vector<bool>(buckets[b].slices.size(), true));
      means[step].push_back(oracle.reduce(step, buckets[b], all, has));
      for (float& value : means[step].back()) value = reference::rounded(scenario.dtype, value);
      for (const Bad& bad : scenario.bad)
        if (step == kBadStep && bad.bucket == b) means[step].back()[bad.offset] = kNaN;
      gradients[step].push_back(all);
    }
    if (step == kBadStep)
      oracle.undo();
    else
      oracle.commit();
    for (int rank = 0; rank < scenario.ranks; ++rank) {
      states[step].emplace_back();
      for (const Parameter& parameter : model())
        states[step].back().push_back(
            {parameter.name, oracle.state(parameter.name, rank).v, oracle.state(parameter.name, rank).u});
    }
  }

  run_ranks(scenario.ranks, [&](Communicator& communicator) {
    const auto rank = std::size_t(communicator.rank());
    Reducer reducer(options, model(), communicator);
    for (std::uint64_t step = 0; step < kSteps; ++step) {
      reducer.begin_step();
      EXPECT_EQ(reducer.step(), step);
      std::vector<std::vector<float>> mine;
      for (const auto& bucket : gradients[step]) mine.push_back(bucket[rank]);
      const auto actual = reduce_all(reducer, buckets, mine, scenario.dtype);
      for (std::size_t b = 0; b < buckets.size(); ++b)
        for (std::size_t i = 0; i < actual[b].size(); ++i)
          ASSERT_TRUE(bits_of(actual[b][i]) == bits_of(means[step][b][i]) ||
                      (std::isnan(actual[b][i]) && std::isnan(means[step][b][i])))
              << "step " << step << ", bucket " << b << ", element " << i << " is " << actual[b][i] << ", not "
              << means[step][b][i];
      EXPECT_EQ(reducer.stats().non_finite, step == kBadStep);
      const bool by_state = step % 2 == 1;  // both ways of looking see the step as it ended
      ASSERT_TRUE(same_states(by_state ? reducer.state().parameters : reducer.residual().state(), states[step][rank]))
          << "step " << step;
    }
  });
}

TEST(ReducerNonFinite, ShowsOnEveryRankAndIsTakenBack) {
  for (const int ranks : {1, 2, 3, 5})
    for (const std::uint64_t dense_steps : {0, 2, 100})
      for (const std::size_t offset : {0, 599, 600, 606})  // first and last of a sparse and of a small parameter
        check({ranks, dense_steps, DType::f32, {{ranks - 1, 0, offset, kNaN}}});
}

TEST(ReducerNonFinite, InfinitiesAndHalfPrecision) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16})
    for (const float value : {kInfinity, -kInfinity, -kNaN}) check({3, 0, dtype, {{1, 1, 1499, value}}});
}

TEST(ReducerNonFinite, OnSeveralRanksAndInSeveralBuckets) {
  check({3, 0, DType::f32, {{0, 0, 10, kNaN}, {1, 0, 602, kInfinity}, {2, 1, 700, kNaN}, {2, 0, 10, kNaN}}});
  check({5, 100, DType::f32, {{0, 0, 10, kNaN}, {1, 0, 602, kInfinity}, {2, 1, 700, kNaN}, {4, 1, 1533, kNaN}}});
}

// Of several bad entries of one rank the first is named, whichever slice it lies in.
TEST(ReducerNonFinite, ShowsTheFirstOfABucket) {
  run_ranks(2, [](Communicator& communicator) {
    Reducer reducer(options_with(TopK{0.02}), model(), communicator);
    const Bucket bucket = bucket_of({"fc.bias", "fc.weight", "scale", "conv.weight"});  // dense, sparse, dense, sparse
    for (const std::vector<std::size_t>& places :
         {std::vector<std::size_t>{5, 100, 1533, 1700}, {100, 1533, 1700}, {1533, 1700}}) {
      std::vector<float> gradient = gradient_of(bucket, reducer.step(), communicator.rank());
      if (communicator.rank() == 1)
        for (const std::size_t place : places) gradient[place] = kNaN;
      reducer.begin_step();
      const auto mean = reduce_all(reducer, {bucket}, {gradient})[0];
      for (std::size_t i = 0; i < mean.size(); ++i) ASSERT_EQ(std::isnan(mean[i]), i == places[0]) << i;
    }
  });
}

// The step after next starts without asking in between for what the bad step left.
TEST(ReducerNonFinite, IsTakenBackByTheNextStep) {
  run_ranks(3, [](Communicator& communicator) {
    Reducer reducer(options_with(HashedSlots{0.02}), model(), communicator);
    const Bucket bucket = bucket_of({"fc.weight"});
    std::vector<float> gradient = gradient_of(bucket, 0, communicator.rank());
    if (communicator.rank() == 0) gradient[3] = kNaN;
    reducer.begin_step();
    reduce_all(reducer, {bucket}, {gradient});
    reducer.begin_step();
    if (communicator.rank() == 0) gradient[3] = 0;
    EXPECT_TRUE(same_bits(reducer.residual().residual("fc.weight"), gradient));
    const auto mean = reduce_all(reducer, {bucket}, {std::vector<float>(1500, 0.0f)});
    EXPECT_TRUE(std::isfinite(mean[0][3]));
    EXPECT_FALSE(reducer.stats().non_finite);
  });
}

// For a mean that was thrown away on every rank: the sends come back, the gradient stays.
TEST(ReducerNonFinite, UndoStepTakesTheSendsBack) {
  for (const int ranks : {1, 3})
    for (const Selector& selector : selectors(0.02))
      run_ranks(ranks, [&](Communicator& communicator) {
        ReducerOptions options = options_with(selector);
        options.momentum = 0.5f;
        Reducer reducer(options, model(), communicator);
        for (int step = 0; step < 3; ++step) {
          reducer.begin_step();
          reduce_all(reducer, two_buckets(), communicator.rank());
        }
        const std::vector<ParameterState> before = reducer.residual().state();
        reducer.begin_step();
        std::vector<std::vector<float>> gradients;
        for (const Bucket& bucket : two_buckets()) gradients.push_back(gradient_of(bucket, 3, communicator.rank()));
        reduce_all(reducer, two_buckets(), gradients);
        const std::vector<ParameterState> expected = accumulated(before, two_buckets(), gradients, {0.5f, false, true});
        EXPECT_FALSE(same_states(reducer.residual().state(), expected));
        reducer.undo_step();
        EXPECT_TRUE(same_states(reducer.residual().state(), expected));
        reducer.undo_step();
        EXPECT_TRUE(same_states(reducer.state().parameters, expected));
        reducer.begin_step();
        reduce_all(reducer, two_buckets(), communicator.rank());
        EXPECT_EQ(reducer.step(), 4u);
      });
}

}  // namespace
}  // namespace thinwire::test
