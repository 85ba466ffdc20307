// types.h, GradientView::loss_scale: what is kept is in true units, what comes and goes is scaled.
#include <cmath>
#include <stdexcept>

#include "training.h"

namespace thinwire::test {
namespace {

/// Values that `dtype` holds.
std::vector<float> representable(DType dtype, std::vector<float> values) {
  for (float& value : values) value = reference::rounded(dtype, value);
  return values;
}

std::vector<float> times(float factor, std::vector<float> values) {
  for (float& value : values) value *= factor;
  return values;
}

/// A step: gives the gradients times `scale`, and returns what comes back.
std::vector<std::vector<float>> scaled_step(Reducer& reducer, const std::vector<Bucket>& buckets,
                                            const std::vector<std::vector<float>>& gradients, float scale,
                                            DType dtype) {
  std::vector<GradientBuffer> buffers;
  std::vector<Work> works;
  for (const std::vector<float>& gradient : gradients) buffers.emplace_back(times(scale, gradient), dtype);
  reducer.begin_step();
  for (std::size_t i = 0; i < buckets.size(); ++i) {
    GradientView view = buffers[i].view();
    view.loss_scale = scale;
    works.push_back(reducer.reduce(buckets[i], view));
  }
  for (Work& work : works) work.wait();
  std::vector<std::vector<float>> means;
  for (const GradientBuffer& buffer : buffers) means.push_back(buffer.floats());
  return means;
}

ReducerOptions with_momentum(ReducerOptions options) {
  options.momentum = 0.9f;
  options.dense_below = kDenseBelow;
  return options;
}

ReducerOptions clipped() {
  ReducerOptions options = with_momentum(top_k(0.02));
  options.clip_norm = 5.0f;
  return options;
}

// One reducer with scaled gradients, its scale another in each step, beside one without: the same states to the bit, and
// the mean is that of the other times the scale.
TEST(LossScale, LeavesNoTraceInWhatIsKept) {
  const std::vector<float> scales = {65536, 65536, 0.5, 1, 1024, 2};
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16})
    for (const ReducerOptions& options :
         {with_momentum(top_k(0.02)), with_momentum(dragonn()), with_momentum(dense()), clipped()})
      run_ranks(2, [&](Communicator& communicator) {
        Reducer scaled(options, model(), communicator);
        Reducer plain(options, model(), communicator);
        for (std::size_t step = 0; step < scales.size(); ++step) {
          const float scale = dtype == DType::f16 ? std::min(scales[step], 1024.0f) : scales[step];
          std::vector<std::vector<float>> gradients;
          for (const Bucket& bucket : two_buckets())
            gradients.push_back(representable(dtype, gradient_of(bucket, step, communicator.rank())));
          const auto means = scaled_step(scaled, two_buckets(), gradients, scale, dtype);
          const auto expected = scaled_step(plain, two_buckets(), gradients, 1.0f, DType::f32);
          for (std::size_t i = 0; i < means.size(); ++i)
            EXPECT_TRUE(same_bits(means[i], representable(dtype, times(scale, expected[i])))) << to_string(dtype);
          EXPECT_TRUE(same_states(scaled.state().parameters, plain.state().parameters)) << to_string(dtype);
          EXPECT_EQ(scaled.stats().clip_factor, plain.stats().clip_factor);
          EXPECT_FALSE(scaled.stats().non_finite);
        }
      });
}

TEST(LossScale, IsAPowerOfTwo) {
  for (const float scale : {0.0f, -2.0f, 3.0f, 1e-40f, INFINITY, NAN})
    run_ranks(2, [&](Communicator& communicator) {
      Reducer reducer(top_k(0.1), kOne, communicator);
      reducer.begin_step();
      std::vector<float> gradient(2000, 1.0f);
      GradientView view{.data = gradient.data(), .numel = 2000};
      if (communicator.rank() == 1) view.loss_scale = scale;
      const Error error = error_of([&] { reducer.reduce(kOneBucket, view).wait(); });
      EXPECT_TRUE(says(error, communicator.rank() == 1 ? ErrorCode::invalid_argument : ErrorCode::remote,
                       {"the loss scale is", "expected a power of two"}));
    });
}

// A rank that has run out of data does not hear of a changed scale.
TEST(LossScale, MayDifferBetweenRanks) {
  run_ranks(2, [](Communicator& communicator) {
    Reducer reducer(top_k(1.0), kOne, communicator);
    const float scale = communicator.rank() == 0 ? 1024.0f : 512.0f;
    const std::vector<float> gradient(2000, communicator.rank() == 0 ? 1.0f : 4.0f);
    EXPECT_EQ(scaled_step(reducer, {kOneBucket}, {gradient}, scale, DType::f32)[0],
              std::vector<float>(2000, 2.5f * scale));
  });
}

// Two gradients of 60 000 with momentum make a mean that f16 does not hold, and of 1 100 under a scale of 2^117 one that f32
// does not hold: it shows as infinity on every rank, and what was sent comes back.
TEST(LossScale, AMeanThatIsTooLargeUndoesTheStep) {
  struct Case {
    DType dtype;
    float value;
    float scale;
  };
  for (const Case& c : {Case{DType::f16, 60000.0f, 1.0f}, Case{DType::f32, 1100.0f, 0x1p117f}})
    for (ReducerOptions options : {dense(), options_with(TopK{0.1})}) {
      options.momentum = 0.9f;
      options.momentum_masking = false;
      run_ranks(3, [&](Communicator& communicator) {
        Reducer reducer(options, kOne, communicator);
        const std::vector<float> gradient(2000, c.value);
        for (int step = 0; step < 2; ++step) {
          const auto mean = scaled_step(reducer, {kOneBucket}, {gradient}, c.scale, c.dtype)[0];
          EXPECT_EQ(reducer.stats().non_finite, step == 1);
          const auto largest = *std::max_element(mean.begin(), mean.end());
          EXPECT_EQ(std::isinf(largest), step == 1);
        }
        double waits = 0;
        const ReducerState state = reducer.state();
        for (const float v : state.parameters[0].residual) waits += v;
        const double sent_before = options.all_reduce == SparseAllReduce::dense ? 2000.0 : 200.0;
        EXPECT_NEAR(waits, c.value * (2000 * 2.9 - sent_before), c.value);
      });
    }
}

TEST(Prepare, RunsBeforeTheGradientIsReadAndMaySetTheScale) {
  for (const float clip : {0.0f, 1e6f})
    run_ranks(2, [&](Communicator& communicator) {
      ReducerOptions options = dense();
      options.clip_norm = clip;
      Reducer reducer(options, kOne, communicator);
      reducer.begin_step();
      std::vector<float> gradient(2000, -1.0f);
      const std::thread::id caller = std::this_thread::get_id();
      int calls = 0;
      reducer
          .reduce(kOneBucket, {.data = gradient.data(), .numel = 2000}, {},
                  [&](GradientView& view) {
                    ++calls;
                    EXPECT_NE(std::this_thread::get_id(), caller);
                    std::fill(gradient.begin(), gradient.end(), 8.0f);
                    view.loss_scale = 4.0f;
                  })
          .wait();
      EXPECT_EQ(calls, 1);
      EXPECT_EQ(gradient, std::vector<float>(2000, 8.0f));
    });
}

TEST(Prepare, FailsTheJobOnEveryRankByThrowing) {
  for (const float clip : {0.0f, 1.0f})
    run_ranks(2, [&](Communicator& communicator) {
      ReducerOptions options = top_k(0.1);
      options.clip_norm = clip;
      Reducer reducer(options, kOne, communicator);
      reducer.begin_step();
      std::vector<float> gradient(2000, 1.0f);
      const auto prepare = [&](GradientView&) {
        if (communicator.rank() == 0) throw Error(ErrorCode::system, "the copy to the host failed");
      };
      const Error error =
          error_of([&] { reducer.reduce(kOneBucket, {.data = gradient.data(), .numel = 2000}, {}, prepare).wait(); });
      EXPECT_TRUE(says(error, communicator.rank() == 0 ? ErrorCode::system : ErrorCode::remote,
                       {"the copy to the host failed"}));
    });
}

// Under local clipping a gradient is prepared while the caller still gives others, or gives up.
TEST(Prepare, MayFailWhileTheCallerGivesUp) {
  for (int round = 0; round < 20; ++round)
    run_ranks(1, [](Communicator& communicator) {
      ReducerOptions options = top_k(0.1);
      options.clip_norm = 1.0f;
      Reducer reducer(options, model(), communicator);
      reducer.begin_step();
      GradientBuffer buffer(gradient_of(two_buckets()[0], 0, 0));
      const auto prepare = [](GradientView&) { throw Error(ErrorCode::system, "the copy to the host failed"); };
      Work work = reducer.reduce(two_buckets()[0], buffer.view(), {}, prepare);
      EXPECT_THROW(work.wait(), Error);
    });
}

}  // namespace
}  // namespace thinwire::test
