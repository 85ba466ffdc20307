// reducer.h: what the options that come from the papers do, each seen in what is sent, what stays and what arrives.
#include <cmath>
#include <map>
#include <mutex>

#include "reference/values.h"
#include "training.h"

namespace thinwire::test {
namespace {

std::size_t nonzeros(std::span<const float> values) {
  return std::size_t(std::count_if(values.begin(), values.end(), [](float value) { return value != 0; }));
}

// ---- quantization ---------------------------------------------------------------------------------------------------

// One rank's entries: on two ranks, the other one's gradient is zero.
TEST(SharedMean, SmallestAndLargestTravelInTurnAsOneNumber) {
  run_ranks(2, [](Communicator& communicator) {
    ReducerOptions options = options_with(TopK{0.01});
    options.codec.values = ValueCoding::shared_mean;
    Reducer reducer(options, kOne, communicator);
    std::vector<float> v(2000, 0.0f);  // what waits on rank 0
    for (std::uint64_t step = 0; step < 6; ++step) {
      reducer.begin_step();
      std::vector<float> gradient = normal(2000, step, 0);
      if (communicator.rank() == 1) gradient.assign(2000, 0.0f);
      const std::vector<float> mean = reduce_one(reducer, kOneBucket, gradient);
      const std::vector<float> sent_by_0 = normal(2000, step, 0);
      std::vector<std::pair<float, std::size_t>> order;
      for (std::size_t i = 0; i < v.size(); ++i) {
        v[i] += sent_by_0[i];
        order.emplace_back(step % 2 == 0 ? v[i] : -v[i], i);
      }
      std::sort(order.begin(), order.end());
      std::vector<std::size_t> places;
      for (std::size_t j = 0; j < 20; ++j) places.push_back(order[j].second);
      std::sort(places.begin(), places.end());
      std::vector<float> values;
      for (const std::size_t i : places) values.push_back(v[i]);
      const float shared = reference::shared_mean(values);
      EXPECT_TRUE(step % 2 == 0 ? shared < 0 : shared > 0) << "step " << step;
      std::vector<float> expected(2000, 0.0f);
      for (const std::size_t i : places) {
        expected[i] = shared / 2;
        v[i] -= shared;
      }
      EXPECT_TRUE(same_bits(mean, expected)) << "step " << step;
      if (communicator.rank() == 0) {
        EXPECT_TRUE(same_bits(reducer.residual().residual("w"), v)) << "step " << step;
      }
    }
  });
}

/// ‖Σ sent + what is left − Σ gradients‖ / ‖Σ gradients‖ over all ranks after 40 steps.
double lost(bool rounding_feedback) {
  std::mutex mutex;
  std::vector<double> balance(2000, 0.0), in(2000, 0.0);
  run_ranks(3, [&](Communicator& communicator) {
    ReducerOptions options = options_with(TopK{0.01});
    options.codec.values = ValueCoding::shared_mean;
    options.rounding_feedback = rounding_feedback;
    Reducer reducer(options, kOne, communicator);
    for (std::uint64_t step = 0; step < 40; ++step) {
      reducer.begin_step();
      const std::vector<float> gradient = normal(2000, step, communicator.rank());
      const std::vector<float> mean = reduce_one(reducer, kOneBucket, gradient);
      const std::lock_guard lock(mutex);
      for (std::size_t i = 0; i < balance.size(); ++i) {
        in[i] += gradient[i];
        balance[i] += double(mean[i]) - gradient[i];  // each of the three ranks counts its third of what was sent
      }
    }
    const std::lock_guard lock(mutex);
    for (std::size_t i = 0; i < balance.size(); ++i) balance[i] += reducer.residual().residual("w")[i];
  });
  double off = 0, all = 0;
  for (std::size_t i = 0; i < balance.size(); ++i) off += balance[i] * balance[i], all += in[i] * in[i];
  return std::sqrt(off / all);
}

// The papers' rule throws away what the mean does not say; true error feedback keeps it.
TEST(SharedMean, ThePapersRuleLosesWhatErrorFeedbackKeeps) {
  EXPECT_LT(lost(true), 1e-5);
  EXPECT_GT(lost(false), 0.01);
}

TEST(SharedMean, HalvesTheBytesOfTheEntries) {
  run_ranks(2, [](Communicator& communicator) {
    std::map<ValueCoding, std::uint64_t> bytes;
    for (const ValueCoding values : {ValueCoding::f32, ValueCoding::shared_mean}) {
      ReducerOptions options = options_with(TopK{0.1});
      options.codec.values = values;
      Reducer reducer(options, kOne, communicator);
      for (std::uint64_t step = 0; step < 3; ++step) {
        reducer.begin_step();
        reduce_one(reducer, kOneBucket, normal(2000, step, communicator.rank()));
      }
      bytes[values] = reducer.stats().bytes_sent;
    }
    EXPECT_EQ(bytes[ValueCoding::f32] - bytes[ValueCoding::shared_mean], 4u * 200);
  });
}

// What the output layer sends are its own values, of both signs, in whatever unit its neighbours are.
TEST(SharedMean, TheOutputLayerIsExemptByPattern) {
  for (const Unit unit : {Unit::parameter, Unit::bucket})
    run_ranks(2, [&](Communicator& communicator) {
      ReducerOptions options = redsync_quantized(0.01, {"decoder.*"});
      options.unit = unit;
      options.dense_below = 0;
      const std::vector<Parameter> parameters = {{"lstm.weight", 2000}, {"decoder.weight", 3000}};
      Reducer reducer(options, parameters, communicator);
      reducer.begin_step();
      std::vector<float> gradient = normal(5000, 0, 0);
      if (communicator.rank() == 1) gradient.assign(5000, 0.0f);
      const std::vector<float> mean =
          reduce_one(reducer, {{{"lstm.weight", 2000}, {"decoder.weight", 3000}}}, gradient);
      std::map<float, std::size_t> lstm;
      std::size_t positive = 0, negative = 0;
      const std::vector<float> sent = normal(5000, 0, 0);
      for (std::size_t i = 0; i < 5000; ++i) {
        if (mean[i] == 0) continue;
        if (i < 2000) {
          ++lstm[mean[i]];
          continue;
        }
        EXPECT_EQ(mean[i], sent[i] / 2);
        ++(mean[i] > 0 ? positive : negative);
      }
      EXPECT_EQ(lstm.size(), 1u) << "one mean";
      EXPECT_EQ(lstm.begin()->second, 20u);
      EXPECT_EQ(positive + negative, 30u);
      EXPECT_GT(positive, 0u);
      EXPECT_GT(negative, 0u);
    });
}

// ---- selectors by size ----------------------------------------------------------------------------------------------

TEST(SelectorBySize, TheLastLimitThatAUnitExceedsDecides) {
  run_ranks(2, [](Communicator& communicator) {
    ReducerOptions options = options_with(TopK{0.1});
    options.selector_by_size = {{600, TopK{0.05}}, {1499, TopK{0.01}}};
    options.rules = {{"rule", {}, {}, {}, TopK{0.2}, {}}};
    const std::vector<std::pair<std::string, std::size_t>> expected = {
        {"a", 60}, {"b", 30}, {"c", 75}, {"d", 15}, {"rule", 300}};
    const std::vector<std::size_t> sizes = {600, 601, 1499, 1500, 1500};
    std::vector<Parameter> parameters;
    for (std::size_t i = 0; i < sizes.size(); ++i) parameters.push_back({expected[i].first, sizes[i]});
    Reducer reducer(options, parameters, communicator);
    reducer.begin_step();
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      const Bucket bucket = {{{expected[i].first, sizes[i]}}};
      std::vector<float> gradient(sizes[i], 0.0f);
      if (communicator.rank() == 0) gradient = normal(sizes[i], 0, 0);
      EXPECT_EQ(nonzeros(reduce_one(reducer, bucket, gradient)), expected[i].second) << expected[i].first;
    }
  });
}

TEST(SelectorBySize, RedsyncsLimitsInElementsAndInBytes) {
  const auto limits = [](const ReducerOptions& options) {
    return std::vector<std::size_t>{options.selector_by_size.at(0).above, options.selector_by_size.at(1).above};
  };
  EXPECT_EQ(limits(redsync()), (std::vector<std::size_t>{131'072, 4'194'304}));
  EXPECT_EQ(limits(redsync(0.001, kRedsyncBytes)), (std::vector<std::size_t>{32'768, 1'048'576}));
}

// Few slots lose much: small tensors send more.
TEST(SelectorBySize, DragonnRaisesTheDensityOfSmallUnits) {
  run_ranks(2, [](Communicator& communicator) {
    ReducerOptions options = dragonn({.density = 0.001, .small_density = 0.01, .small = 20'000});
    const std::vector<Parameter> parameters = {{"small", 20'000}, {"large", 20'001}};
    Reducer reducer(options, parameters, communicator);
    reducer.begin_step();
    std::map<std::string, std::size_t> sent;
    for (const auto& [name, numel] : parameters) {
      std::vector<float> gradient(numel, 0.0f);
      if (communicator.rank() == 0) gradient = normal(numel, 0, 0);
      sent[name] = nonzeros(reduce_one(reducer, {{{name, numel}}}, gradient));
    }
    EXPECT_GT(sent["small"], 140u);
    EXPECT_LE(sent["small"], 250u);
    EXPECT_LE(sent["large"], 25u);
    EXPECT_GT(sent["large"], 5u);
  });
}

// ---- schedule -------------------------------------------------------------------------------------------------------

TEST(Ramp, FollowsDgcsDensities) {
  const Schedule schedule{.dense_steps = 5, .ramp_steps = 20, .ramp_stages = 4};
  const std::vector<std::pair<std::uint64_t, double>> expected = {{4, 1.0},       {5, 0.251189},  {9, 0.251189},
                                                                  {10, 0.063096}, {15, 0.015849}, {20, 0.003981},
                                                                  {24, 0.003981}, {25, 0.001},    {1000, 0.001}};
  for (const auto& [step, density] : expected) EXPECT_NEAR(density_at(schedule, step, 0.001), density, 1e-6) << step;
  EXPECT_EQ(schedule_in_epochs(10, 0.5, 4), (Schedule{.dense_steps = 5, .ramp_steps = 40, .ramp_stages = 4}));
  EXPECT_EQ(schedule_in_epochs(10, 2), (Schedule{.dense_steps = 20, .ramp_steps = 0, .ramp_stages = 4}));
  EXPECT_THROW(schedule_in_epochs(0, 1), Error);
  EXPECT_THROW(schedule_in_epochs(10, -1), Error);
  EXPECT_THROW(schedule_in_epochs(std::uint64_t{1} << 62, 2), Error);
  EXPECT_THROW(schedule_in_epochs(std::uint64_t{1} << 62, 0, 4), Error);
}

// Products of steps and stages need more than 64 bits here.
TEST(Ramp, HasRoomForAnyNumberOfStepsAndStages) {
  const std::uint64_t half = std::uint64_t{1} << 62;
  const Schedule long_ramp{.dense_steps = 0, .ramp_steps = 2 * half, .ramp_stages = 4};
  EXPECT_NEAR(density_at(long_ramp, half / 2, 0.001), 0.063096, 1e-6);
  EXPECT_NEAR(density_at(long_ramp, half, 0.001), 0.015849, 1e-6);
  const Schedule many_stages{.dense_steps = 0, .ramp_steps = 10, .ramp_stages = ~std::uint32_t{0}};
  EXPECT_NEAR(density_at(many_stages, 5, 0.0001), 0.01, 1e-6);
}

/// The entries of each step, and the residual at the end.
struct RampRun {
  std::vector<std::size_t> sent;
  std::vector<float> v;
};
RampRun run_ramp(Communicator& communicator, std::uint64_t resume_after) {
  ReducerOptions options = options_with(TopK{0.01});
  options.schedule = {.dense_steps = 2, .ramp_steps = 4, .ramp_stages = 2};
  options.momentum = 0.5f;
  RampRun run;
  ReducerState state;
  const auto steps = [&](Reducer& reducer, std::uint64_t begin, std::uint64_t end) {
    for (std::uint64_t step = begin; step < end; ++step) {
      reducer.begin_step();
      reduce_one(reducer, kOneBucket, normal(2000, step, communicator.rank()));
      run.sent.push_back(reducer.stats().dense ? 2000 : reducer.stats().entries_sent);
    }
    state = reducer.state();
  };
  {
    Reducer first(options, kOne, communicator);
    steps(first, 0, resume_after);
  }
  Reducer second(options, kOne, communicator);
  second.load(state);
  steps(second, resume_after, 8);
  run.v = state.parameters[0].residual;
  return run;
}

// A checkpoint goes on at the right point of the schedule, wherever it was taken.
TEST(Ramp, ChangesTheDensityStepByStepAndResumes) {
  run_ranks(2, [](Communicator& communicator) {
    const RampRun whole = run_ramp(communicator, 8);
    EXPECT_EQ(whole.sent, (std::vector<std::size_t>{2000, 2000, 431, 431, 93, 93, 20, 20}));
    for (const std::uint64_t after : {1, 2, 3, 4, 5, 6, 7}) {
      const RampRun resumed = run_ramp(communicator, after);
      EXPECT_EQ(resumed.sent, whole.sent) << after;
      EXPECT_TRUE(same_bits(resumed.v, whole.v)) << after;
    }
  });
}

// The ratio that ThresholdSearch reuses is part of the state: a resumed run does not search where the whole one did not.
TEST(Reuse, IsPartOfTheState) {
  run_ranks(2, [](Communicator& communicator) {
    ReducerOptions options = options_with(ThresholdSearch{.density = 0.05, .reuse_interval = 4});
    std::vector<std::vector<float>> means;
    ReducerState saved;
    Reducer whole(options, kOne, communicator);
    for (std::uint64_t step = 0; step < 9; ++step) {
      whole.begin_step();
      means.push_back(reduce_one(whole, kOneBucket, normal(2000, step, communicator.rank())));
      if (step == 2) saved = whole.state();
    }
    ASSERT_EQ(saved.selections.size(), 1u);
    EXPECT_GT(saved.selections.at("w").uses, 0u);
    Reducer resumed(options, kOne, communicator);
    resumed.load(saved);
    for (std::uint64_t step = 3; step < 9; ++step) {
      resumed.begin_step();
      EXPECT_TRUE(same_bits(reduce_one(resumed, kOneBucket, normal(2000, step, communicator.rank())), means[step]));
    }
  });
}

// A step that is taken back takes its use of the ratio back too, and a state with an impossible ratio is refused.
TEST(Reuse, IsUndoneAndChecked) {
  run_ranks(2, [](Communicator& communicator) {
    ReducerOptions options = options_with(ThresholdSearch{.density = 0.05, .reuse_interval = 4});
    Reducer reducer(options, kOne, communicator);
    for (std::uint64_t step = 0; step < 2; ++step) {
      reducer.begin_step();
      reduce_one(reducer, kOneBucket, normal(2000, step, communicator.rank()));
    }
    const std::uint32_t uses = reducer.state().selections.at("w").uses;
    std::vector<float> bad = normal(2000, 2, communicator.rank());
    bad[11] = std::numeric_limits<float>::infinity();
    reducer.begin_step();
    reduce_one(reducer, kOneBucket, bad);
    EXPECT_EQ(reducer.state().selections.at("w").uses, uses);
    EXPECT_EQ(reducer.state().selections.at("w").uses, uses) << "asked again";
    ReducerState state = reducer.state();
    state.selections.at("w").ratio = std::numeric_limits<double>::quiet_NaN();
    EXPECT_TRUE(says(error_of([&] { reducer.load(state); }), ErrorCode::invalid_argument, {"ratio", "'w'"}));
  });
}

// ---- decay ----------------------------------------------------------------------------------------------------------

TEST(Decay, WhatWaitsFades) {
  run_ranks(2, [](Communicator& communicator) {
    ReducerOptions options = options_with(TopK{0.001});
    options.residual_decay = 0.5f;
    Reducer reducer(options, kOne, communicator);
    std::vector<float> gradient(2000, 0.0f);
    gradient[7] = 1.0f, gradient[8] = 64.0f, gradient[9] = 32.0f;  // two entries travel in a step
    for (int step = 0; step < 3; ++step) {
      reducer.begin_step();
      const std::vector<float> mean = reduce_one(reducer, kOneBucket, gradient);
      EXPECT_EQ(mean[8], 64.0f);
      EXPECT_EQ(mean[9], 32.0f);
      EXPECT_EQ(mean[7], 0.0f);
    }
    EXPECT_EQ(reducer.residual().residual("w")[7], 1.75f);  // 1, 0.5 + 1, 0.75 + 1
  });
}

// ---- switching ------------------------------------------------------------------------------------------------------

// Dense, sparse, dense: nothing is handed over, nothing is lost, and a flush empties the residual.
TEST(Switching, LosesNothingAndAFlushEmptiesTheResidual) {
  for (const ReducerOptions& preset : {top_k(0.01), redsync(0.01), dragonn({.density = 0.01}), dgc(0.01)})
    run_ranks(2, [&](Communicator& communicator) {
      ReducerOptions options = preset;
      options.dense_below = kDenseBelow;
      options.schedule.dense_steps = 3;
      Reducer reducer(options, kOne, communicator);
      std::vector<double> in(2000, 0.0), out(2000, 0.0);
      const auto account = [&](const std::vector<float>& mean, bool with_gradients) {
        for (int rank = 0; with_gradients && rank < 2; ++rank) {
          const std::vector<float> gradient = normal(2000, reducer.step(), rank);
          for (std::size_t i = 0; i < in.size(); ++i) in[i] += gradient[i] / 2;
        }
        for (std::size_t i = 0; i < out.size(); ++i) out[i] += mean[i];
      };
      for (std::uint64_t step = 0; step < 12; ++step) {
        reducer.begin_step(step < 8 ? StepMode::scheduled : StepMode::dense);
        account(reduce_one(reducer, kOneBucket, normal(2000, step, communicator.rank())), true);
        EXPECT_EQ(reducer.stats().dense, step < 3 || step >= 8);
        EXPECT_EQ(reducer.residual().norm() == 0, step < 3 || step >= 8);
      }
      reducer.begin_step(StepMode::flush);
      account(reduce_one(reducer, kOneBucket, std::vector<float>(2000, 1.0f)), false);
      EXPECT_EQ(reducer.residual().norm(), 0.0);
      for (std::size_t i = 0; i < in.size(); ++i) ASSERT_NEAR(out[i], in[i], 1e-4) << i;
    });
}

}  // namespace
}  // namespace thinwire::test
