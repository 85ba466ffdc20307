// reducer.h, clip_norm: what is clipped, by how much, and what waits for it.
#include <chrono>
#include <cmath>
#include <limits>
#include <thread>

#include "training.h"

namespace thinwire::test {
namespace {

double norm_of(const std::vector<std::vector<float>>& gradients) {
  double sum = 0;
  for (const std::vector<float>& gradient : gradients)
    for (const float value : gradient) sum += double(value) * value;
  return std::sqrt(sum);
}

std::vector<std::vector<float>> step_gradients(const std::vector<Bucket>& buckets, std::uint64_t step, int rank) {
  std::vector<std::vector<float>> gradients;
  for (const Bucket& bucket : buckets) gradients.push_back(gradient_of(bucket, step, rank));
  return gradients;
}

ReducerOptions clipped_at(float norm, const Selector& selector = TopK{0.1}) {
  ReducerOptions options = options_with(selector);
  options.clip_norm = norm;
  return options;
}

// Each rank's own gradient, over all buckets, to clip_norm·sqrt(P); a gradient that is short enough stays as it is.
TEST(Clip, ClipsTheWholeGradientOfEachRank) {
  for (const int ranks : {1, 2, 4})
    run_ranks(ranks, [&](Communicator& communicator) {
      const int rank = communicator.rank();
      ReducerOptions options = dense();
      options.clip_norm = 20.0f;
      Reducer clipped(options, model(), communicator);
      Reducer plain(dense(), model(), communicator);
      for (std::uint64_t step = 0; step < 3; ++step) {
        auto gradients = step_gradients(two_buckets(), step, rank);
        if (step == 1)  // a short one
          for (auto& gradient : gradients)
            for (float& value : gradient) value *= 1.0f / 1024;
        const double norm = norm_of(gradients), limit = 20.0 * std::sqrt(double(ranks));
        clipped.begin_step();
        const auto means = reduce_all(clipped, two_buckets(), gradients);
        const auto factor = static_cast<float>(std::min(1.0, limit / norm));
        EXPECT_NEAR(clipped.stats().clip_factor, factor, 1e-6);
        EXPECT_EQ(clipped.stats().clip_factor < 1, step != 1);
        EXPECT_GT(clipped.stats().clip_wait_seconds, 0.0);
        const auto used = static_cast<float>(clipped.stats().clip_factor);
        for (auto& gradient : gradients)
          for (float& value : gradient) value *= used;
        EXPECT_LE(norm_of(gradients), limit * (1 + 1e-6));
        plain.begin_step();
        EXPECT_EQ(means, reduce_all(plain, two_buckets(), gradients)) << "rank " << rank << ", step " << step;
      }
      EXPECT_EQ(plain.stats().clip_factor, 1.0);
      EXPECT_EQ(plain.stats().clip_wait_seconds, 0.0);
    });
}

// P equal gradients of norm L·sqrt(P) or less pass unclipped; the reading that takes L/sqrt(P) as the limit of the undivided
// gradient would clip them P times over.
TEST(Clip, TheLimitBelongsToTheGradientDividedByTheRanks) {
  run_ranks(4, [](Communicator& communicator) {
    ReducerOptions options = options_with(TopK{0.01});
    options.clip_norm = 1.0f;
    Reducer reducer(options, kOne, communicator);
    std::vector<float> gradient(2000, 0.0f);
    gradient[5] = 1.9375f;  // below 1·sqrt(4)
    reducer.begin_step();
    EXPECT_EQ(reduce_one(reducer, kOneBucket, gradient)[5], 1.9375f);
    gradient[5] = 4.0f;
    reducer.begin_step();
    EXPECT_EQ(reduce_one(reducer, kOneBucket, gradient)[5], 2.0f);
  });
}

TEST(Clip, NothingIsSentBeforeTheWholeGradientIsThere) {
  run_ranks(2, [](Communicator& communicator) {
    Reducer reducer(clipped_at(1.0f), model(), communicator);
    reducer.begin_step();
    const auto gradients = step_gradients(two_buckets(), 0, communicator.rank());
    GradientBuffer first(gradients[0]), second(gradients[1]);
    Work one = reducer.reduce(two_buckets()[0], first.view());
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    EXPECT_FALSE(one.done());
    EXPECT_EQ(communicator.traffic().calls, 0u);
    Work two = reducer.reduce(two_buckets()[1], second.view());
    one.wait();
    two.wait();
    EXPECT_GE(reducer.stats().clip_wait_seconds, 0.03);
    EXPECT_LT(reducer.stats().clip_factor, 1.0);
  });
}

// Waiting for a bucket before the others came would clip by a part of the norm: refused, on every rank, by name.
TEST(Clip, AMissingParameterIsNamedAndNobodyHangs) {
  run_ranks(3, [](Communicator& communicator) {
    Reducer reducer(clipped_at(1.0f), model(), communicator);
    reducer.begin_step();
    GradientBuffer buffer(gradient_of(two_buckets()[0], 0, communicator.rank()));
    Work work = reducer.reduce(two_buckets()[0], buffer.view());
    const Error error = error_of([&] { work.wait(); });
    EXPECT_TRUE(says(error, error.code(), {"clip_norm", "'fc.bias'"}));
    EXPECT_THROW(reducer.begin_step(), Error);
  });
}

// Its own sentence, not that of a gradient that is not whole.
TEST(Clip, AnUnknownParameterIsNamed) {
  run_ranks(2, [](Communicator& communicator) {
    Reducer reducer(clipped_at(1.0f), model(), communicator);
    reducer.begin_step();
    GradientBuffer buffer(std::vector<float>(5, 1.0f));
    const Error error = error_of([&] { reducer.reduce({{{"stranger", 5}}}, buffer.view()).wait(); });
    EXPECT_TRUE(says(error, error.code(), {"'stranger'"}));
  });
}

// A job that fails takes those held before it with it: what has come is only a part of the norm.
TEST(Clip, AFailedJobFailsThoseHeldBefore) {
  run_ranks(2, [](Communicator& communicator) {
    Reducer reducer(clipped_at(1.0f), model(), communicator);
    reducer.begin_step();
    GradientBuffer buffer(gradient_of(two_buckets()[0], 0, communicator.rank()));
    Work held = reducer.reduce(two_buckets()[0], buffer.view());
    Work failed = reducer.fail("no second bucket");
    for (Work* work : {&held, &failed}) {
      const Error error = error_of([&] { work->wait(); });
      EXPECT_TRUE(says(error, error.code(), {"no second bucket"}));
    }
    EXPECT_EQ(reducer.residual().norm(), 0.0);
  });
}

// Another thread that waits says nothing about what is still to come.
TEST(Clip, OtherThreadsMayWaitForAHeldJob) {
  run_ranks(2, [](Communicator& communicator) {
    Reducer reducer(clipped_at(1.0f), model(), communicator);
    reducer.begin_step();
    const auto gradients = step_gradients(two_buckets(), 0, communicator.rank());
    GradientBuffer first(gradients[0]), second(gradients[1]);
    Work one = reducer.reduce(two_buckets()[0], first.view());
    std::thread waiting([&one] { EXPECT_NO_THROW(one.wait()); });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT_FALSE(one.done());
    reducer.reduce(two_buckets()[1], second.view()).wait();
    waiting.join();
    EXPECT_LT(reducer.stats().clip_factor, 1.0);
  });
}

TEST(Clip, RanksCompareTheirLimits) {
  run_ranks(2, [](Communicator& communicator) {
    ReducerOptions options = options_with(TopK{0.1});
    options.clip_norm = communicator.rank() == 0 ? 1.0f : 2.0f;
    Reducer reducer(options, kOne, communicator);
    reducer.begin_step();
    GradientBuffer buffer(normal(2000, 0, communicator.rank()));
    Work work = reducer.reduce(kOneBucket, buffer.view());
    EXPECT_TRUE(says(error_of([&] { work.wait(); }), ErrorCode::remote, {"clip_norm=1", "clip_norm=2"}));
  });
}

TEST(Clip, HeldJobsEndWithTheReducer) {
  run_ranks(1, [](Communicator& communicator) {
    ReducerOptions options = options_with(TopK{0.1});
    options.clip_norm = 1.0f;
    GradientBuffer buffer(gradient_of(two_buckets()[0], 0, 0));
    Work work;
    {
      Reducer reducer(options, model(), communicator);
      reducer.begin_step();
      work = reducer.reduce(two_buckets()[0], buffer.view());
    }
    EXPECT_TRUE(work.done());
    EXPECT_THROW(work.wait(), Error);
  });
}

// A flush moves what was clipped when it came: bucket by bucket, as ever.
TEST(Clip, LeavesAFlushAlone) {
  run_ranks(2, [](Communicator& communicator) {
    ReducerOptions options = options_with(TopK{0.01});
    options.clip_norm = 1e-3f;
    Reducer reducer(options, model(), communicator);
    reducer.begin_step();
    reduce_all(reducer, two_buckets(), communicator.rank());
    reducer.begin_step(StepMode::flush);
    for (const Bucket& bucket : two_buckets()) reduce_one(reducer, bucket, std::vector<float>(numel(bucket), 1e9f));
    EXPECT_EQ(reducer.residual().norm(), 0.0);
  });
}

TEST(Clip, ANonFiniteGradientIsFlaggedAndUndone) {
  run_ranks(2, [](Communicator& communicator) {
    ReducerOptions options = options_with(TopK{0.01});
    options.clip_norm = 1.0f;
    Reducer reducer(options, kOne, communicator);
    std::vector<float> gradient = normal(2000, 0, communicator.rank());
    if (communicator.rank() == 1) gradient[3] = std::numeric_limits<float>::infinity();
    reducer.begin_step();
    EXPECT_TRUE(std::isnan(reduce_one(reducer, kOneBucket, gradient)[3]));
    EXPECT_TRUE(reducer.stats().non_finite);
    // The finite entries stay accumulated, and keep to the limit.
    EXPECT_LE(reducer.residual().norm(), std::sqrt(2.0) * (1 + 1e-6));
    EXPECT_GT(reducer.residual().norm(), 1.0);
  });
}

}  // namespace
}  // namespace thinwire::test
