// reducer.h against the slow reducer of reference/reducer.h: means, residuals and velocities, to the bit, on every rank.
#include <chrono>
#include <thread>

#include "reference/reducer.h"
#include "training.h"

namespace thinwire::test {
namespace {

/// What all ranks do in one step, and what it must come to.
struct Step {
  std::vector<Bucket> buckets;                               ///< has_gradient as on rank 0
  std::vector<std::vector<std::vector<bool>>> has_gradient;  ///< [bucket][rank][slice]
  std::vector<reference::Reducer::Gradients> gradients;      ///< [bucket][rank]
  std::vector<std::vector<float>> means;                     ///< [bucket], rounded to the type
  std::vector<std::vector<ParameterState>> states;           ///< [rank], after the step
};

struct Scenario {
  ReducerOptions options;
  int ranks = 1;
  DType dtype = DType::f32;
  bool absent = true;                    ///< some gradients are missing, on one rank or on all
  std::set<std::string> dense = kSmall;  ///< what the options keep dense
  std::string name() const { return std::to_string(ranks) + " ranks, " + to_string(dtype) + "\n" + to_string(options); }
};

std::vector<Step> plan(const Scenario& scenario, std::size_t steps) {
  reference::Reducer oracle(scenario.options, model(), scenario.dense, scenario.ranks);
  std::vector<Step> plan(steps);
  for (std::uint64_t number = 0; number < steps; ++number) {
    Step& step = plan[number];
    step.buckets = number < 4 ? two_buckets() : three_buckets();
    for (const Bucket& bucket : step.buckets) {
      reference::Reducer::Gradients gradients;
      std::vector<std::vector<bool>> has;
      for (int rank = 0; rank < scenario.ranks; ++rank) {
        Bucket local = bucket;
        has.emplace_back();
        for (BucketSlice& slice : local.slices) {
          const bool missing_here = number == 3 && rank == 0 && (slice.name == "fc.weight" || slice.name == "scale");
          const bool missing_everywhere = number == 5 && (slice.name == "conv.bias" || slice.name == "fc.weight");
          slice.has_gradient = !scenario.absent || !(missing_here || missing_everywhere);
          has.back().push_back(slice.has_gradient);
        }
        gradients.push_back(gradient_of(local, number, rank));
        for (float& value : gradients.back()) value = reference::rounded(scenario.dtype, value);
      }
      step.gradients.push_back(gradients);
      step.has_gradient.push_back(has);
    }
    const std::vector<float> factors = oracle.clip_factors(step.gradients);
    for (std::size_t b = 0; b < step.buckets.size(); ++b) {
      reference::Reducer::Gradients clipped = step.gradients[b];
      for (std::size_t r = 0; r < clipped.size(); ++r)
        for (float& value : clipped[r]) value = reference::multiply(value, factors[r]);
      std::vector<float> mean = oracle.reduce(number, step.buckets[b], clipped, step.has_gradient[b]);
      for (float& value : mean) value = reference::rounded(scenario.dtype, value);
      step.means.push_back(mean);
    }
    oracle.commit();
    for (int rank = 0; rank < scenario.ranks; ++rank) {
      step.states.emplace_back();
      for (const Parameter& parameter : model()) {
        const reference::ResidualState& state = oracle.state(parameter.name, rank);
        step.states.back().push_back({parameter.name, state.v, state.u});
      }
    }
  }
  return plan;
}

void check(const Scenario& scenario, bool delays = false) {
  SCOPED_TRACE(scenario.name());
  const std::vector<Step> steps = plan(scenario, 7);
  run_ranks(scenario.ranks, [&](Communicator& communicator) {
    const auto rank = static_cast<std::size_t>(communicator.rank());
    std::mt19937 random(static_cast<std::uint32_t>(rank));
    Reducer reducer(scenario.options, model(), communicator);
    for (std::size_t number = 0; number < steps.size(); ++number) {
      const Step& step = steps[number];
      reducer.begin_step();
      std::vector<GradientBuffer> buffers;
      std::vector<Work> works;
      for (std::size_t b = 0; b < step.buckets.size(); ++b)
        buffers.emplace_back(step.gradients[b][rank], scenario.dtype, rank % 2);
      for (std::size_t b = 0; b < step.buckets.size(); ++b) {
        Bucket bucket = step.buckets[b];
        for (std::size_t s = 0; s < bucket.slices.size(); ++s)
          bucket.slices[s].has_gradient = step.has_gradient[b][rank][s];
        if (delays) std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
        works.push_back(reducer.reduce(bucket, buffers[b].view()));
      }
      for (std::size_t b = 0; b < works.size(); ++b) {
        works[b].wait();
        ASSERT_TRUE(same_bits(buffers[b].floats(), step.means[b]))
            << "rank " << rank << ", step " << number << ", bucket " << b;
        ASSERT_TRUE(buffers[b].intact());
      }
      ASSERT_TRUE(same_states(reducer.residual().state(), step.states[rank])) << "rank " << rank << ", step " << number;
    }
  });
}

TEST(ReducerOracle, EverySelectorOnEveryNumberOfRanks) {
  for (const int ranks : kRanks)
    for (const Selector& selector : selectors(0.02))
      for (const bool momentum : {false, true}) {
        Scenario scenario{options_with(selector), ranks};
        scenario.options.seed = 0x1234567890ull + std::uint64_t(ranks);
        scenario.options.schedule.dense_steps = momentum ? 1 : 0;
        scenario.options.momentum = momentum ? 0.9f : 0.0f;
        check(scenario);
      }
}

TEST(ReducerOracle, EveryCodec) {
  for (const int ranks : {2, 3, 5})
    for (const Selector& selector : selectors(0.02))
      for (const Codec& codec : codecs_for(selector)) {
        Scenario scenario{options_with(selector), ranks};
        scenario.options.codec = codec;
        scenario.options.momentum = 0.9f;
        check(scenario);
      }
}

// The biases compete too; the smallest parameters leave gaps in the unit.
TEST(ReducerOracle, UnitsOfWholeBuckets) {
  for (const int ranks : {2, 3, 5})
    for (const Selector& selector : selectors(0.02)) {
      Scenario scenario{options_with(selector), ranks, DType::f32, false, {"scale", "nothing"}};
      scenario.options.unit = Unit::bucket;
      scenario.options.dense_below = 5;
      scenario.options.momentum = 0.5f;
      check(scenario);
    }
}

TEST(ReducerOracle, EvenTheSmallestParametersSparsely) {
  for (const Unit unit : {Unit::parameter, Unit::bucket})
    for (const Selector& selector : selectors(0.02)) {
      Scenario scenario{options_with(selector), 3, DType::f32, unit == Unit::parameter, {}};
      scenario.options.unit = unit;
      scenario.options.dense_below = 0;
      scenario.options.momentum = 0.5f;
      check(scenario);
    }
}

TEST(ReducerOracle, HalfPrecisionGradients) {
  for (const DType dtype : {DType::f16, DType::bf16})
    for (const int ranks : {1, 3, 5})
      for (const Selector& selector : {Selector(TopK{0.05}), Selector(HashedSlots{0.05, HashedSlots::Layout::a})}) {
        Scenario scenario{options_with(selector), ranks, dtype};
        scenario.options.momentum = 0.9f;
        scenario.options.schedule.dense_steps = 2;
        check(scenario);
      }
}

TEST(ReducerOracle, NesterovWithoutMasking) {
  for (const int ranks : {1, 3}) {
    Scenario scenario{options_with(TrimmedTopK{0.05}), ranks};
    scenario.options.momentum = 0.9f;
    scenario.options.nesterov = true;
    scenario.options.momentum_masking = false;
    check(scenario);
  }
}

// The control: v <- g, so that what is not sent is gone.
TEST(ReducerOracle, WithoutErrorFeedback) {
  Scenario scenario{options_with(TopK{0.05}), 3};
  scenario.options.error_feedback = false;
  check(scenario);
}

TEST(ReducerOracle, ThePapersQuantizationRule) {
  for (const Selector& selector : {Selector(TopK{0.05}), Selector(ThresholdSearch{0.05, 1})}) {
    Scenario scenario{options_with(selector), 3};
    scenario.options.codec.values = ValueCoding::shared_mean;
    scenario.options.rounding_feedback = false;
    scenario.options.momentum = 0.9f;
    scenario.options.rules = {{"fc.weight", {}, {}, {}, TopK{0.01}, ValueCoding::f32}};
    check(scenario);
  }
}

TEST(ReducerOracle, SelectorsBySize) {
  Scenario scenario{options_with(TopK{0.05}), 3};
  scenario.options.selector_by_size = {{600, HashedSlots{0.02}}};
  check(scenario);
  scenario.options.selector_by_size = {{599, ThresholdSearch{0.02, 3}}, {1499, SampledTopK{0.02}}};
  check(scenario);
}

TEST(ReducerOracle, ARamp) {
  for (const Selector& selector : selectors(0.01)) {
    Scenario scenario{options_with(selector), 2};
    scenario.options.schedule = {.dense_steps = 1, .ramp_steps = 5, .ramp_stages = 3};
    scenario.options.momentum = 0.9f;
    check(scenario);
  }
}

TEST(ReducerOracle, Decay) {
  for (const bool momentum : {false, true}) {
    Scenario scenario{options_with(TopK{0.05}), 3};
    scenario.options.residual_decay = 0.875f;
    scenario.options.momentum = momentum ? 0.9f : 0.0f;
    scenario.options.nesterov = momentum;
    check(scenario);
  }
}

TEST(ReducerOracle, LocalClipping) {
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const int ranks : {1, 3, 5})
      for (const Selector& selector : selectors(0.02)) {
        Scenario scenario{options_with(selector), ranks, dtype};
        scenario.options.clip_norm = 15.0f;
        scenario.options.momentum = 0.9f;
        scenario.options.schedule.dense_steps = 1;
        check(scenario);
      }
}

TEST(ReducerOracle, DenseWhateverTheSelector) {
  for (const int ranks : {2, 5}) {
    Scenario scenario{options_with(TopK{0.05}), ranks};
    scenario.options.all_reduce = SparseAllReduce::dense;
    scenario.options.momentum = 0.9f;
    check(scenario);
  }
}

TEST(ReducerOracle, WhateverTheOrderOfArrival) {
  for (const int ranks : {3, 8}) {
    Scenario scenario{options_with(HashedSlots{0.02}), ranks};
    scenario.options.momentum = 0.9f;
    check(scenario, true);
  }
}

TEST(ReducerOracle, OnEveryTarget) {
  on_every_target([] {
    for (const Selector& selector : selectors(0.02)) {
      Scenario scenario{options_with(selector), 2};
      scenario.options.momentum = 0.9f;
      check(scenario);
    }
  });
}

/// Two steps of one bucket against the oracle, all parameters sparse.
template <class Values>
void check_bucket(const ReducerOptions& options, const std::vector<Parameter>& parameters, int ranks,
                  const Values& values) {
  SCOPED_TRACE(std::to_string(ranks) + " ranks\n" + to_string(options));
  Bucket bucket;
  for (const Parameter& parameter : parameters) bucket.slices.push_back({parameter.name, parameter.numel});
  reference::Reducer oracle(options, parameters, {}, ranks);
  const std::vector<std::vector<bool>> has(std::size_t(ranks), std::vector<bool>(parameters.size(), true));
  std::vector<reference::Reducer::Gradients> gradients(2);
  std::vector<std::vector<float>> means;
  for (std::uint64_t step = 0; step < 2; ++step) {
    for (int rank = 0; rank < ranks; ++rank) gradients[step].push_back(gradient_of(bucket, step, rank, values));
    means.push_back(oracle.reduce(step, bucket, gradients[step], has));
  }
  run_ranks(ranks, [&](Communicator& communicator) {
    Reducer reducer(options, parameters, communicator);
    for (std::size_t step = 0; step < 2; ++step) {
      reducer.begin_step();
      const auto rank = static_cast<std::size_t>(communicator.rank());
      ASSERT_TRUE(same_bits(reduce_all(reducer, {bucket}, {gradients[step][rank]})[0], means[step])) << "step " << step;
    }
    for (const Parameter& parameter : parameters)
      EXPECT_TRUE(
          same_bits(reducer.residual().residual(parameter.name), oracle.state(parameter.name, communicator.rank()).v))
          << parameter.name;
  });
}

// One parameter of each size in a bucket.
TEST(ReducerOracle, EverySizeAndDistribution) {
  std::vector<Parameter> parameters;
  for (const std::size_t numel : kSizes) parameters.push_back({"p" + std::to_string(numel), numel});
  for (const int ranks : kRanks)
    for (const Distribution distribution : kDistributions)
      for (const Selector& selector : selectors(0.01)) {
        SCOPED_TRACE(to_string(distribution));
        ReducerOptions options = options_with(selector);
        options.dense_below = 0;
        options.momentum = ranks % 2 == 0 ? 0.9f : 0.0f;
        check_bucket(options, parameters, ranks,
                     [&](std::size_t n, std::uint32_t seed) { return make_values(distribution, n, seed); });
      }
}

#ifndef THINWIRE_SMALL_TESTS
// Above the sizes at which selectors sample and decoding works in tiles.
TEST(ReducerOracle, LargeParameters) {
  const std::vector<Parameter> parameters = {{"large", 150'001}, {"odd", 70'003}};
  for (const Unit unit : {Unit::parameter, Unit::bucket})
    for (const Selector& selector : selectors(0.01)) {
      ReducerOptions options = options_with(selector);
      options.momentum = 0.9f;
      options.unit = unit;
      check_bucket(options, parameters, 2,
                   [](std::size_t n, std::uint32_t seed) { return make_values(Distribution::normal, n, seed); });
    }
}
#endif

}  // namespace
}  // namespace thinwire::test
