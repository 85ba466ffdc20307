// reducer.h: what the ranks were given plus what stays in their residuals is what went in, whatever happens to buckets.
// Values are multiples of ranks · 2^-10, so that every sum and the division by the ranks are exact.
#include <algorithm>
#include <map>
#include <mutex>

#include "training.h"

namespace thinwire::test {
namespace {

/// Sums in f64 by parameter and element, over ranks and steps.
class Account {
 public:
  void add(const std::string& name, std::span<const float> values, double weight = 1.0) {
    const std::lock_guard lock(mutex_);
    std::vector<double>& sum = sums_[name];
    sum.resize(values.size());
    for (std::size_t i = 0; i < values.size(); ++i) sum[i] += weight * double(values[i]);
  }
  void add(const Bucket& bucket, std::span<const float> values, double weight = 1.0) {
    std::size_t offset = 0;
    for (std::size_t s = 0; s < bucket.slices.size(); offset += bucket.slices[s++].numel)
      add(bucket.slices[s].name, values.subspan(offset, bucket.slices[s].numel), weight);
  }
  void add(const std::vector<ParameterState>& states) {
    for (const ParameterState& state : states) add(state.name, state.residual);
  }
  const std::map<std::string, std::vector<double>>& sums() const { return sums_; }

 private:
  std::mutex mutex_;
  std::map<std::string, std::vector<double>> sums_;
};

/// All parameters in a random order and grouping; the same on every rank.
std::vector<Bucket> shuffled_buckets(std::uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<Parameter> parameters = model();
  std::shuffle(parameters.begin(), parameters.end(), random);
  std::vector<Bucket> buckets(1 + random() % 3);
  for (const Parameter& parameter : parameters)
    buckets[random() % buckets.size()].slices.push_back({parameter.name, parameter.numel});
  return buckets;
}

struct Totals {
  Account in, out;
};

/// Twelve steps of regrouped buckets with gradients missing here and there, then a flush.
void run(const ReducerOptions& options, int ranks) {
  SCOPED_TRACE(std::to_string(ranks) + " ranks\n" + to_string(options));
  Totals totals;
  run_ranks(ranks, [&](Communicator& communicator) {
    const int rank = communicator.rank();
    const float unit = float(ranks) / 1024;
    Reducer reducer(options, model(), communicator);
    for (std::uint64_t step = 0; step < 12; ++step) {
      reducer.begin_step();
      std::vector<Bucket> buckets = shuffled_buckets(std::uint32_t(step / 2));
      std::vector<std::vector<float>> gradients;
      for (Bucket& bucket : buckets) {
        for (BucketSlice& slice : bucket.slices) slice.has_gradient = gradient_seed(step, rank, slice.name) % 4 != 0;
        gradients.push_back(gradient_of(bucket, step, rank,
                                        [unit](std::size_t n, std::uint32_t s) { return dyadic_values(n, s, unit); }));
        totals.in.add(bucket, gradients.back());
      }
      const auto means = reduce_all(reducer, buckets, gradients);
      for (std::size_t b = 0; b < buckets.size(); ++b)
        if (rank == 0) totals.out.add(buckets[b], means[b], ranks);
    }
    totals.out.add(reducer.residual().state());
  });
  if (options.codec.values != ValueCoding::shared_mean) {
    ASSERT_EQ(totals.in.sums(), totals.out.sums());
    return;
  }
  // What a mean leaves of an entry is rounded. A lost entry would be at least 2^-10.
  for (const auto& [name, in] : totals.in.sums()) {
    const std::vector<double>& out = totals.out.sums().at(name);
    for (std::size_t i = 0; i < in.size(); ++i) ASSERT_NEAR(out[i], in[i], 1e-4) << name << ", " << i;
  }
}

TEST(ReducerConservation, HoldsForEverySelectorAndNumberOfRanks) {
  for (const int ranks : kRanks)
    for (const Selector& selector : selectors(0.01)) run(options_with(selector), ranks);
}

// Rounded values are multiples of 2^-10 too, and a power of two divides their sum exactly.
TEST(ReducerConservation, HoldsForEveryCodec) {
  for (const int ranks : {2, 8})
    for (const Selector& selector : selectors(0.01))
      for (const Codec& codec : codecs_for(selector)) {
        ReducerOptions options = options_with(selector);
        options.codec = codec;
        run(options, ranks);
      }
}

TEST(ReducerConservation, HoldsForUnitsOfWholeBucketsAndWarmUp) {
  for (const int ranks : {3, 5})
    for (const Selector& selector : selectors(0.01)) {
      ReducerOptions options = options_with(selector);
      options.unit = Unit::bucket;
      options.schedule.dense_steps = 5;
      run(options, ranks);
    }
}

// With momentum 1/2 the velocities are exact for a few steps. What goes in is then each step's addend: the new velocity.
TEST(ReducerConservation, HoldsWithMomentum) {
  constexpr int kWorld = 3;
  for (const Selector& selector : selectors(0.01)) {
    Totals totals;
    run_ranks(kWorld, [&](Communicator& communicator) {
      ReducerOptions options = options_with(selector);
      options.momentum = 0.5f;
      Reducer reducer(options, model(), communicator);
      for (std::uint64_t step = 0; step < 6; ++step) {
        const std::vector<ParameterState> before = reducer.residual().state();
        reducer.begin_step();
        const std::vector<Bucket> buckets = shuffled_buckets(std::uint32_t(step));
        std::vector<std::vector<float>> gradients;
        for (const Bucket& bucket : buckets) {
          gradients.push_back(gradient_of(bucket, step, communicator.rank(), [](std::size_t n, std::uint32_t s) {
            return dyadic_values(n, s, 3.0f / 16);
          }));
          totals.in.add(bucket, gradients.back());
        }
        for (const ParameterState& state : before) totals.in.add(state.name, state.velocity, 0.5);
        const auto means = reduce_all(reducer, buckets, gradients);
        for (std::size_t b = 0; b < buckets.size(); ++b)
          if (communicator.rank() == 0) totals.out.add(buckets[b], means[b], kWorld);
      }
      totals.out.add(reducer.residual().state());
    });
    ASSERT_EQ(totals.in.sums(), totals.out.sums()) << to_string(selector);
  }
}

// A flush averages what waits in the residuals, whatever lies in the buffers, and leaves nothing.
TEST(ReducerConservation, FlushEmptiesTheResiduals) {
  for (const int ranks : {1, 2, 5}) {
    Totals totals;
    run_ranks(ranks, [&](Communicator& communicator) {
      ReducerOptions options = options_with(TopK{0.01});
      options.momentum = 0.5f;
      Reducer reducer(options, model(), communicator);
      for (std::uint64_t step = 0; step < 3; ++step) {
        reducer.begin_step();
        std::vector<std::vector<float>> gradients;
        for (const Bucket& bucket : two_buckets())
          gradients.push_back(gradient_of(bucket, step, communicator.rank(), [&](std::size_t n, std::uint32_t s) {
            return dyadic_values(n, s, float(ranks) / 16);
          }));
        reduce_all(reducer, two_buckets(), gradients);
      }
      const std::vector<ParameterState> before = reducer.residual().state();
      totals.in.add(before);
      reducer.begin_step(StepMode::flush);
      std::vector<Bucket> buckets = two_buckets();
      std::vector<std::vector<float>> garbage;
      for (Bucket& bucket : buckets) {
        garbage.emplace_back(numel(bucket), std::nanf(""));
        bucket.slices[0].has_gradient = false;
      }
      const auto means = reduce_all(reducer, buckets, garbage);
      if (communicator.rank() == 0)
        for (std::size_t b = 0; b < buckets.size(); ++b) totals.out.add(buckets[b], means[b], ranks);
      const std::vector<ParameterState> after = reducer.state().parameters;
      for (std::size_t i = 0; i < after.size(); ++i) {
        EXPECT_TRUE(same_bits(after[i].residual, std::vector<float>(after[i].residual.size(), 0.0f))) << after[i].name;
        EXPECT_TRUE(same_bits(after[i].velocity, before[i].velocity)) << "the velocity of " << after[i].name;
      }
      EXPECT_FALSE(reducer.stats().non_finite);
      EXPECT_TRUE(reducer.stats().dense);
    });
    ASSERT_EQ(totals.in.sums(), totals.out.sums()) << ranks << " ranks";
  }
}

// A dense step in between sends everything that waits together with the new gradient.
TEST(ReducerConservation, ADenseStepSendsTheResidualToo) {
  constexpr int kWorld = 3;
  Totals totals;
  run_ranks(kWorld, [&](Communicator& communicator) {
    Reducer reducer(options_with(HashedSlots{0.01}), model(), communicator);
    for (std::uint64_t step = 0; step < 5; ++step) {
      reducer.begin_step(step == 4 ? StepMode::dense : StepMode::scheduled);
      std::vector<std::vector<float>> gradients;
      for (const Bucket& bucket : two_buckets()) {
        gradients.push_back(gradient_of(bucket, step, communicator.rank(),
                                        [](std::size_t n, std::uint32_t s) { return dyadic_values(n, s, 3.0f / 16); }));
        totals.in.add(bucket, gradients.back());
      }
      const auto means = reduce_all(reducer, two_buckets(), gradients);
      for (std::size_t b = 0; b < 2; ++b)
        if (communicator.rank() == 0) totals.out.add(two_buckets()[b], means[b], kWorld);
    }
    EXPECT_EQ(reducer.residual().norm(), 0.0);
  });
  ASSERT_EQ(totals.in.sums(), totals.out.sums());
}

// Nobody has a gradient: residual and velocity stay to the bit, and the mean is zero.
TEST(ReducerConservation, AParameterWithoutGradientAnywhereIsLeftAlone) {
  for (const int ranks : {1, 2, 5})
    for (const bool warm_up : {false, true})
      run_ranks(ranks, [&](Communicator& communicator) {
        ReducerOptions options = options_with(TopK{0.01});
        options.momentum = 0.9f;
        Reducer reducer(options, model(), communicator);
        for (int step = 0; step < 2; ++step) {
          reducer.begin_step();
          reduce_all(reducer, two_buckets(), communicator.rank());
        }
        const std::vector<ParameterState> before = reducer.residual().state();
        reducer.begin_step(warm_up ? StepMode::dense : StepMode::scheduled);
        std::vector<Bucket> buckets = two_buckets();
        std::vector<std::vector<float>> gradients;
        for (Bucket& bucket : buckets) {
          for (BucketSlice& slice : bucket.slices) slice.has_gradient = slice.name == "fc.bias";
          gradients.push_back(gradient_of(bucket, 2, communicator.rank()));
        }
        const auto means = reduce_all(reducer, buckets, gradients);
        EXPECT_TRUE(same_bits(means[0], std::vector<float>(607, 0.0f)));
        EXPECT_TRUE(same_bits(std::span(means[1]).first(1500), std::vector<float>(1500, 0.0f)));
        EXPECT_NE(means[1][1500], 0.0f);
        const std::vector<ParameterState> after = reducer.state().parameters;
        for (std::size_t i = 0; i < after.size(); ++i) {
          if (after[i].name == "fc.bias") continue;
          EXPECT_TRUE(same_bits(after[i].residual, before[i].residual)) << after[i].name;
          EXPECT_TRUE(same_bits(after[i].velocity, before[i].velocity)) << after[i].name;
        }
        reducer.undo_step();  // has nothing to take back there
        EXPECT_TRUE(same_bits(reducer.residual().residual("fc.weight"), before[2].residual));
      });
}

}  // namespace
}  // namespace thinwire::test
