// reducer.h: how many calls and bytes a job costs, and what StepStats says of it.
#include <mutex>

#include "core/tuning.h"
#include "failures.h"

namespace thinwire::test {
namespace {

using Calls = std::vector<std::uint64_t>;

/// The communicator calls of each bucket of a step.
Calls calls_of_step(Reducer& reducer, Communicator& communicator, const std::vector<Bucket>& buckets,
                    StepMode mode = StepMode::scheduled) {
  reducer.begin_step(mode);
  Calls calls;
  for (const Bucket& bucket : buckets) {
    const std::uint64_t before = communicator.traffic().calls;
    GradientBuffer buffer(gradient_of(bucket, reducer.step(), communicator.rank()));
    reducer.reduce(bucket, buffer.view()).wait();
    calls.push_back(communicator.traffic().calls - before);
  }
  std::uint64_t sum = 0;
  for (const std::uint64_t one : calls) sum += one;
  EXPECT_EQ(reducer.stats().calls, sum);
  EXPECT_EQ(reducer.stats().jobs, buckets.size());
  return calls;
}

const std::vector<Bucket> kBuckets = {bucket_of({"conv.weight", "conv.bias"}), bucket_of({"fc.weight"}),
                                      bucket_of({"fc.bias", "scale"})};
const std::vector<Bucket> kRegrouped = {bucket_of({"fc.bias", "fc.weight", "scale"}), bucket_of({"conv.weight"}),
                                        bucket_of({"conv.bias"})};

// The first step agrees on sizes. Then one call is enough, unless small parameters are better reduced on their own.
TEST(Protocol, OneCallPerBucket) {
  for (const int ranks : {2, 3, 4, kDenseSectionMaxRanks, kDenseSectionMaxRanks + 1})
    for (const Selector& selector : selectors(0.01))
      run_ranks(ranks, [&](Communicator& communicator) {
        Reducer reducer(options_with(selector), model(), communicator);
        const bool apart = ranks > kDenseSectionMaxRanks;
        const Calls usual = apart ? Calls{2, 1, 2} : Calls{1, 1, 1};
        EXPECT_EQ(calls_of_step(reducer, communicator, kBuckets), (apart ? Calls{3, 2, 3} : Calls{2, 2, 2}));
        for (int step = 1; step < 5; ++step) EXPECT_EQ(calls_of_step(reducer, communicator, kBuckets), usual) << step;
        // Other buckets need other sizes: one round more, once. The last had and keeps no sparse unit when they travel apart.
        EXPECT_EQ(calls_of_step(reducer, communicator, kRegrouped), (apart ? Calls{3, 2, 2} : Calls{2, 2, 2}));
        for (int step = 6; step < 9; ++step)
          EXPECT_EQ(calls_of_step(reducer, communicator, kRegrouped), (apart ? Calls{2, 1, 2} : Calls{1, 1, 1}))
              << step;
      });
}

TEST(Protocol, WarmUpThenSparse) {
  for (const int ranks : {2, 4})
    run_ranks(ranks, [](Communicator& communicator) {
      ReducerOptions options = options_with(TopK{0.01});
      options.schedule.dense_steps = 3;
      Reducer reducer(options, model(), communicator);
      EXPECT_EQ(calls_of_step(reducer, communicator, kBuckets), (Calls{3, 3, 3}));
      EXPECT_EQ(calls_of_step(reducer, communicator, kBuckets), (Calls{2, 2, 2}));  // header and all-reduce
      EXPECT_EQ(calls_of_step(reducer, communicator, kBuckets), (Calls{2, 2, 2}));
      EXPECT_EQ(calls_of_step(reducer, communicator, kBuckets), (Calls{2, 2, 2}));  // new sizes
      for (int step = 4; step < 7; ++step) EXPECT_EQ(calls_of_step(reducer, communicator, kBuckets), (Calls{1, 1, 1}));
      EXPECT_EQ(calls_of_step(reducer, communicator, kBuckets, StepMode::flush), (Calls{3, 3, 3}));
      EXPECT_EQ(calls_of_step(reducer, communicator, kBuckets), (Calls{2, 2, 2}));
      EXPECT_EQ(calls_of_step(reducer, communicator, kBuckets), (Calls{1, 1, 1}));
    });
}

TEST(Protocol, ASelectionOfAnySizeFillsTheSameBlock) {
  run_ranks(3, [](Communicator& communicator) {
    Reducer reducer(options_with(TopK{0.01}), model(), communicator);
    const Bucket bucket = bucket_of({"fc.weight"});
    for (int step = 0; step < 6; ++step) {
      reducer.begin_step();
      std::vector<float> gradient(1500, 0.0f);  // rank and step decide how many entries there are: none to all
      for (std::size_t i = 0; i < std::size_t(communicator.rank() * step * 3); ++i) gradient[i] = float(i + 1);
      reduce_all(reducer, {bucket}, {gradient});
      EXPECT_EQ(reducer.stats().calls, step == 0 ? 2u : 1u);
    }
  });
}

// Each block says whose it is: step, job, options, slices, the size it has; and it is a payload of the format.
TEST(Protocol, BlocksAreSelfDescribing) {
  std::mutex mutex;
  std::set<std::uint64_t> options_hashes, layout_hashes;
  run_ranks(3, [&](Communicator& inner) {
    std::uint64_t step = 0;
    std::size_t job = 0;
    bool steady = false;
    MeddlingCommunicator communicator(inner, {}, [&](std::uint64_t, std::span<std::byte> received) {
      for (std::size_t r = 0; r < 3; ++r) {
        const auto block = std::span<const std::byte>(received).subspan(r * received.size() / 3, received.size() / 3);
        const PayloadHeader header = read_header(block);
        EXPECT_EQ(header.step, step);
        EXPECT_EQ(header.job, job);
        EXPECT_EQ(header.slices, kBuckets[job].slices.size());
        EXPECT_EQ(header.non_finite, std::nullopt);
        EXPECT_TRUE(!steady || header.flags == 0);
        EXPECT_TRUE(!steady || header.block_bytes == block.size());
        if (steady) {
          EXPECT_EQ(validate(block, numel(kBuckets[job])).has_gradient, std::vector<bool>(header.slices, true));
        }
        const std::lock_guard lock(mutex);
        options_hashes.insert(header.options_hash);
        layout_hashes.insert(header.layout_hash);
      }
    });
    Reducer reducer(options_with(HashedSlots{0.02}), model(), communicator);
    for (; step < 4; ++step) {
      reducer.begin_step();
      for (job = 0; job < kBuckets.size(); ++job) {
        GradientBuffer buffer(gradient_of(kBuckets[job], step, inner.rank()));
        reducer.reduce(kBuckets[job], buffer.view()).wait();
      }
      steady = step >= 1;
    }
  });
  EXPECT_EQ(options_hashes.size(), 1u);
  EXPECT_EQ(layout_hashes.size(), kBuckets.size());
}

// (P-1) blocks of header, one word of gradient bits, section header and 8 bytes an entry, rounded up to 8 bytes.
TEST(Stats, BytesOfSparseJobs) {
  for (const int ranks : {2, 3, 5, 8})
    for (const Selector& selector : selectors(0.02))
      run_ranks(ranks, [&](Communicator& communicator) {
        Reducer reducer(options_with(selector), model(), communicator);
        const std::vector<Bucket> buckets = {bucket_of({"fc.weight"}), bucket_of({"conv.weight"})};
        for (int step = 0; step < 3; ++step) calls_of_step(reducer, communicator, buckets);
        const auto others = std::uint64_t(ranks - 1);
        std::uint64_t blocks = 0;
        for (const std::size_t numel : {1500, 600}) blocks += (64 + 4 + 32 + 8 * capacity(selector, numel) + 7) / 8 * 8;
        const StepStats stats = reducer.stats();
        EXPECT_EQ(stats.bytes_sent, others * blocks);
        EXPECT_EQ(stats.bytes_received, others * blocks);
        EXPECT_EQ(stats.small_bytes_sent, 0u);
        EXPECT_EQ(stats.dense_bytes,
                  2 * others * 4 * 1500 / std::uint64_t(ranks) + 2 * others * 4 * 600 / std::uint64_t(ranks));
        EXPECT_EQ(stats.sparse_numel, 2100u);
        EXPECT_LE(stats.entries_sent, capacity(selector, 1500) + capacity(selector, 600));
        if (is_exact(selector)) {
          EXPECT_EQ(stats.entries_sent, 30u + 12u);
        }
        EXPECT_EQ(stats.density, double(stats.entries_sent) / 2100);
        EXPECT_TRUE(stats.active);
        EXPECT_FALSE(stats.dense);
        EXPECT_EQ(stats.step, 2u);
      });
}

TEST(Stats, BytesOfSmallParameters) {
  for (const int ranks : {2, 4, kDenseSectionMaxRanks, kDenseSectionMaxRanks + 1, 12})
    run_ranks(ranks, [&](Communicator& communicator) {
      Reducer reducer(options_with(TopK{0.02}), model(), communicator);
      const std::vector<Bucket> buckets = {bucket_of({"fc.weight", "fc.bias"})};
      for (int step = 0; step < 3; ++step) calls_of_step(reducer, communicator, buckets);
      const auto others = std::uint64_t(ranks - 1);
      const std::uint64_t sparse = 64 + 4 + 32 + 8 * 30;
      const StepStats stats = reducer.stats();
      if (ranks <= kDenseSectionMaxRanks) {
        EXPECT_EQ(stats.bytes_sent, others * ((sparse + 32 + 4 * 33 + 7) / 8 * 8));
        EXPECT_GE(stats.small_bytes_sent, others * 4 * 33);
        EXPECT_LE(stats.small_bytes_sent, others * (4 * 33 + 32));
      } else {
        const std::uint64_t apart = 2 * others * 4 * 33 / std::uint64_t(ranks);
        EXPECT_EQ(stats.bytes_sent, others * ((sparse + 7) / 8 * 8) + apart);
        EXPECT_EQ(stats.small_bytes_sent, apart);
      }
      EXPECT_EQ(stats.sparse_numel, 1500u);
    });
}

TEST(Stats, BytesOfDenseJobs) {
  for (const int ranks : {2, 3, 5})
    run_ranks(ranks, [&](Communicator& communicator) {
      ReducerOptions options = dense();
      Reducer reducer(options, model(), communicator);
      const std::vector<Bucket> buckets = {bucket_of({"fc.weight", "fc.bias"})};
      for (int step = 0; step < 3; ++step) calls_of_step(reducer, communicator, buckets);
      const auto others = std::uint64_t(ranks - 1);
      const std::uint64_t all_reduce = 2 * others * 4 * 1533 / std::uint64_t(ranks);
      const StepStats stats = reducer.stats();
      EXPECT_EQ(stats.bytes_sent, others * 72 + all_reduce);  // header and one word of gradient bits, rounded up
      EXPECT_EQ(stats.dense_bytes, all_reduce);
      EXPECT_TRUE(stats.dense);
      EXPECT_FALSE(stats.active);
      EXPECT_EQ(stats.density, 1.0);
      EXPECT_EQ(stats.sparse_numel, 0u);
      EXPECT_NE(stats.reason, "");
    });
}

TEST(Stats, SayWhyAStepIsDense) {
  const auto reason = [](int ranks, const ReducerOptions& options, StepMode mode) {
    std::string text;
    run_ranks(ranks, [&](Communicator& communicator) {
      Reducer reducer(options, model(), communicator);
      calls_of_step(reducer, communicator, {bucket_of({"fc.weight"})}, mode);
      EXPECT_FALSE(reducer.stats().active);
      if (communicator.rank() == 0) text = reducer.stats().reason;
    });
    return text;
  };
  ReducerOptions options = options_with(TopK{0.01}), warm_up = options, small = options;
  warm_up.schedule.dense_steps = 17;
  small.dense_below = 10'000;
  EXPECT_NE(reason(2, warm_up, StepMode::scheduled).find("17"), std::string::npos);
  EXPECT_NE(reason(2, options, StepMode::dense).find("asked"), std::string::npos);
  EXPECT_NE(reason(2, options, StepMode::flush).find("flush"), std::string::npos);
  EXPECT_NE(reason(1, options, StepMode::scheduled).find("one rank"), std::string::npos);
  EXPECT_NE(reason(2, small, StepMode::scheduled), "");
}

TEST(Stats, NormsOfResidualAndGradient) {
  run_ranks(2, [](Communicator& communicator) {
    Reducer reducer(options_with(TopK{0.01}), model(), communicator);
    double gradient = 0;
    for (const Bucket& bucket : kBuckets)
      for (const float value : gradient_of(bucket, 0, communicator.rank())) gradient += double(value) * value;
    calls_of_step(reducer, communicator, kBuckets);
    const StepStats first = reducer.stats();
    EXPECT_NEAR(first.gradient_norm, std::sqrt(gradient), 1e-9 * std::sqrt(gradient));
    EXPECT_NEAR(first.residual_norm, reducer.residual().norm(), 1e-9 * first.residual_norm);
    EXPECT_GT(first.residual_norm, 0.0);
    calls_of_step(reducer, communicator, kBuckets);
    EXPECT_EQ(reducer.stats().residual_norm, first.residual_norm) << "refreshed every 50 steps only";
    for (int step = 2; step <= 50; ++step) calls_of_step(reducer, communicator, kBuckets);
    EXPECT_NEAR(reducer.stats().residual_norm, reducer.residual().norm(), 1e-9 * reducer.residual().norm());
    EXPECT_NE(reducer.stats().residual_norm, first.residual_norm);
  });
}

TEST(Stats, TimesAreCounted) {
  run_ranks(2, [](Communicator& communicator) {
    Reducer reducer(options_with(TopK{0.01}), model(), communicator);
    reducer.begin_step();
    if (communicator.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(60));
    reduce_all(reducer, kBuckets, communicator.rank());
    const StepStats stats = reducer.stats();
    if (communicator.rank() == 0) {
      EXPECT_GT(stats.exchange_seconds, 0.03);
      EXPECT_GT(stats.exposed_wait_seconds, 0.03);
    }
    EXPECT_GT(stats.select_seconds, 0.0);
    EXPECT_GT(stats.encode_seconds, 0.0);
    EXPECT_GT(stats.decode_seconds, 0.0);
    EXPECT_LT(stats.select_seconds + stats.encode_seconds + stats.decode_seconds, 5.0);
  });
}

}  // namespace
}  // namespace thinwire::test
