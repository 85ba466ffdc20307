// reducer.h, I5: one rank fails; every rank is told in one sentence, nobody waits, and u and v are as before the sends.
#include <atomic>

#include "failures.h"
#include "reference/wire.h"

namespace thinwire::test {
namespace {

using namespace std::chrono_literals;

const MomentumRule kRule{0.9f, false, true};
const std::vector<Bucket> kBuckets = {bucket_of({"conv.weight", "conv.bias"}), bucket_of({"fc.weight", "scale"}),
                                      bucket_of({"fc.bias"})};

ReducerOptions failing_options() {
  ReducerOptions options = options_with(HashedSlots{0.02});
  options.momentum = kRule.momentum;
  return options;
}

std::vector<std::vector<float>> gradients_of_step(std::uint64_t step, int rank) {
  std::vector<std::vector<float>> gradients;
  for (const Bucket& bucket : kBuckets) gradients.push_back(gradient_of(bucket, step, rank));
  return gradients;
}

/// What is wrong with the second job of rank 1.
struct Fault {
  std::string name;
  std::function<void(Bucket&, GradientView&)> spoil;  ///< none: Reducer::fail instead of reduce
  std::vector<std::string> words;
};

const std::vector<Fault> kFaults = {
    {"unknown parameter", [](Bucket& b, GradientView&) { b.slices[0].name = "stranger"; }, {"'stranger'"}},
    {"wrong numel of a slice",
     [](Bucket& b, GradientView& g) {
       --b.slices[0].numel;
       --g.numel;
     },
     {"'fc.weight'", "1499", "1500"}},
    {"wrong numel of the gradient", [](Bucket&, GradientView& g) { --g.numel; }, {"1500", "1501"}},
    {"doubled parameter",
     [](Bucket& b, GradientView&) {
       b.slices = bucket_of({"conv.bias", "conv.bias"}).slices;
     },
     {}},
    {"parameter of an earlier bucket",
     [](Bucket& b, GradientView& g) {
       b = bucket_of({"conv.weight"});
       g.numel = 600;
     },
     {"'conv.weight'"}},
    {"wrong dtype", [](Bucket&, GradientView& g) { g.dtype = static_cast<DType>(9); }, {"dtype"}},
    {"wrong device",
     [](Bucket&, GradientView& g) {
       g.device = {DeviceType::cuda, 0};
     },
     {"CUDA"}},
    {"no memory", [](Bucket&, GradientView& g) { g.data = nullptr; }, {"memory"}},
    {"failed before reduce", {}, {"the hook was given a sparse tensor"}},
};

/// Three jobs at once, the second of which is spoiled on rank 1 at step `when`.
void run_fault(const Fault& fault, int ranks, std::uint64_t when) {
  SCOPED_TRACE(fault.name + ", " + std::to_string(ranks) + " ranks, step " + std::to_string(when));
  run_ranks(ranks, [&](Communicator& communicator) {
    const int rank = communicator.rank();
    Reducer reducer(failing_options(), model(), communicator);
    for (std::uint64_t step = 0; step < when; ++step) {
      reducer.begin_step();
      reduce_all(reducer, kBuckets, rank);
    }
    const std::vector<ParameterState> before = reducer.residual().state();
    reducer.begin_step();
    const auto gradients = gradients_of_step(when, rank);
    std::vector<GradientBuffer> buffers;
    for (const auto& gradient : gradients) buffers.emplace_back(gradient);
    Work first = reducer.reduce(kBuckets[0], buffers[0].view());
    Bucket bucket = kBuckets[1];
    GradientView view = buffers[1].view();
    const bool guilty = rank == ranks - 1;
    if (guilty && fault.spoil) fault.spoil(bucket, view);
    std::vector<std::exception_ptr> reported;
    const auto note = [&](std::exception_ptr error) { reported.push_back(std::move(error)); };
    Work second = guilty && !fault.spoil ? reducer.fail("the hook was given a sparse tensor", note)
                                         : reducer.reduce(bucket, view, note);
    Work third = reducer.reduce(kBuckets[2], buffers[2].view(), note);

    EXPECT_NO_THROW(first.wait());
    const Error error = error_of([&] { second.wait(); });
    std::vector<std::string> words = fault.words;
    words.push_back("rank " + std::to_string(ranks - 1));
    words.push_back("step " + std::to_string(when));
    EXPECT_TRUE(says(error, guilty ? ErrorCode::invalid_argument : ErrorCode::remote, words));
    EXPECT_STREQ(error_of([&] { third.wait(); }).what(), error.what());
    reducer.residual();  // both jobs are over
    EXPECT_EQ(reported.size(), 2u);
    EXPECT_TRUE(reported.size() == 2 && reported[0] != nullptr && reported[1] != nullptr);

    // The guilty bucket was not looked at; of the others what was sent came back, and the third was never touched.
    const std::vector<Bucket> taken(kBuckets.begin(), kBuckets.begin() + (guilty ? 1 : 2));
    EXPECT_TRUE(same_states(reducer.residual().state(), accumulated(before, taken, gradients, kRule)));
    EXPECT_TRUE(same_bits(buffers[2].floats(), gradients[2])) << "the buffer of a failed job";
    expect_dead(reducer, error);
    EXPECT_TRUE(same_states(reducer.state().parameters, accumulated(before, taken, gradients, kRule)));
  });
}

TEST(ReducerFailure, EveryRankIsTold) {
  for (const Fault& fault : kFaults)
    for (const int ranks : {1, 2, 3}) run_fault(fault, ranks, 4);
  for (const int ranks : {5, 8}) run_fault(kFaults[0], ranks, 4);
}

TEST(ReducerFailure, InTheFirstStepToo) {
  for (const int ranks : {1, 3, 5}) run_fault(kFaults[0], ranks, 0);
  run_fault(kFaults.back(), 3, 1);
}

TEST(ReducerFailure, WithoutAStep) {
  run_ranks(2, [](Communicator& communicator) {
    Reducer reducer(failing_options(), model(), communicator);
    GradientBuffer buffer(gradient_of(kBuckets[0], 0, 0));
    if (communicator.rank() == 1) reducer.begin_step();
    Work work = reducer.reduce(kBuckets[0], buffer.view());
    EXPECT_TRUE(says(error_of([&] { work.wait(); }),
                     communicator.rank() == 0 ? ErrorCode::invalid_argument : ErrorCode::remote,
                     {"rank 0", "begin_step"}));
  });
}

// A rank that never calls: the others time out, and it learns of it when it comes.
TEST(ReducerFailure, AStalledRankIsATimeout) {
  for (const bool in_dense_step : {false, true})
    run_ranks(
        3,
        [&](Communicator& communicator) {
          const int rank = communicator.rank();
          ReducerOptions options = failing_options();
          if (in_dense_step) options.schedule.dense_steps = 100;
          Reducer reducer(options, model(), communicator);
          for (int step = 0; step < 2; ++step) {
            reducer.begin_step();
            reduce_all(reducer, kBuckets, rank);
          }
          const std::vector<ParameterState> before = reducer.residual().state();
          reducer.begin_step();
          const auto gradients = gradients_of_step(2, rank);
          std::vector<GradientBuffer> buffers;
          for (const auto& gradient : gradients) buffers.emplace_back(gradient);
          Work first = reducer.reduce(kBuckets[0], buffers[0].view());
          first.wait();
          if (rank == 2) {
            std::this_thread::sleep_for(1500ms);
            Work late = reducer.reduce(kBuckets[1], buffers[1].view());
            EXPECT_EQ(error_of([&] { late.wait(); }).code(), ErrorCode::timeout);
          } else {
            const auto start = std::chrono::steady_clock::now();
            Work second = reducer.reduce(kBuckets[1], buffers[1].view());
            const Error error = error_of([&] { second.wait(); });
            EXPECT_TRUE(says(error, ErrorCode::timeout, {"rank 2"}));
            EXPECT_LT(std::chrono::steady_clock::now() - start, 1400ms);
            expect_dead(reducer, error);
          }
          EXPECT_TRUE(same_states(reducer.residual().state(),
                                  accumulated(before, {kBuckets[0], kBuckets[1]}, gradients, kRule)));
        },
        700ms);
}

// The transport of one rank breaks in the middle of a job.
TEST(ReducerFailure, ABrokenTransportIsToldToTheOthers) {
  for (const bool in_all_reduce : {false, true})
    run_ranks(3, [&](Communicator& inner) {
      const int rank = inner.rank();
      std::atomic<bool> broken = false;
      std::atomic<int> calls = 0;
      MeddlingCommunicator communicator(inner, [&](std::uint64_t) {
        if (broken && rank == 1 && ++calls > (in_all_reduce ? 1 : 0))
          throw Error(ErrorCode::system, "the cable was pulled");
      });
      ReducerOptions options = failing_options();
      if (in_all_reduce) options.schedule.dense_steps = 100;
      Reducer reducer(options, model(), communicator);
      for (int step = 0; step < 2; ++step) {
        reducer.begin_step();
        reduce_all(reducer, kBuckets, rank);
      }
      const std::vector<ParameterState> before = reducer.residual().state();
      reducer.begin_step();
      broken = true;
      GradientBuffer buffer(gradient_of(kBuckets[1], 2, rank));
      Work work = reducer.reduce(kBuckets[1], buffer.view());
      const Error error = error_of([&] { work.wait(); });
      EXPECT_TRUE(says(error, rank == 1 ? ErrorCode::system : ErrorCode::remote, {"the cable was pulled"}));
      EXPECT_TRUE(rank == 1 || says(error, ErrorCode::remote, {"rank 1"}));
      EXPECT_TRUE(same_states(reducer.residual().state(),
                              accumulated(before, {kBuckets[1]}, {gradient_of(kBuckets[1], 2, rank)}, kRule)));
      expect_dead(reducer, error);
    });
}

// One rank receives damaged bytes. It alone knows; the others hear of it in the next job.
TEST(ReducerFailure, ACorruptPayloadIsRefusedAndReported) {
  const std::vector<std::function<void(std::span<std::byte>)>> damages = {
      [](std::span<std::byte> block) { block[120] ^= std::byte{4}; },
      [](std::span<std::byte> block) { block[5] ^= std::byte{4}; },  // in the header
      [](std::span<std::byte> block) {                               // a sound one, but without the payload
        reference::Bytes header(block.begin(), block.begin() + 64);
        reference::overwrite(header, reference::kFlagsAt, PayloadHeader::relayout, 2);
        reference::overwrite(header, reference::kPayloadBytesAt, 64, 8);
        reference::seal(header);
        std::copy(header.begin(), header.end(), block.begin());
      }};
  for (const auto& damage : damages)
    run_ranks(3, [&](Communicator& inner) {
      const int rank = inner.rank();
      std::atomic<bool> corrupt = false;
      MeddlingCommunicator communicator(inner, {}, [&](std::uint64_t, std::span<std::byte> received) {
        if (corrupt.exchange(false)) damage(received.subspan(received.size() / 3 * 2));
      });
      Reducer reducer(failing_options(), model(), communicator);
      for (int step = 0; step < 2; ++step) {
        reducer.begin_step();
        reduce_all(reducer, kBuckets, rank);
      }
      const std::vector<ParameterState> before = reducer.residual().state();
      reducer.begin_step();
      corrupt = rank == 1;
      const auto gradients = gradients_of_step(2, rank);
      std::vector<GradientBuffer> buffers;
      for (const auto& gradient : gradients) buffers.emplace_back(gradient);
      Work first = reducer.reduce(kBuckets[0], buffers[0].view());
      Work second = reducer.reduce(kBuckets[1], buffers[1].view());
      if (rank == 1) {
        const Error error = error_of([&] { first.wait(); });
        EXPECT_TRUE(says(error, ErrorCode::corrupt_payload, {"rank 2"}));
        EXPECT_TRUE(error.position().has_value());
      } else {
        EXPECT_NO_THROW(first.wait());
      }
      const Error error = error_of([&] { second.wait(); });
      EXPECT_TRUE(says(error, rank == 1 ? ErrorCode::corrupt_payload : ErrorCode::remote, {"rank 1", "rank 2"}));
      const std::vector<Bucket> taken(kBuckets.begin(), kBuckets.begin() + (rank == 1 ? 1 : 2));
      EXPECT_TRUE(same_states(reducer.residual().state(), accumulated(before, taken, gradients, kRule)));
      expect_dead(reducer, error);
    });
}

// The same in the round that agrees on the size of a job, after which the others go on to one of a size that rank 1 does
// not know: it makes no call more.
TEST(ReducerFailure, ACorruptHeaderRoundEndsTheCommunicator) {
  run_ranks(3, [&](Communicator& inner) {
    const int rank = inner.rank();
    MeddlingCommunicator communicator(inner, {}, [&](std::uint64_t call, std::span<std::byte> received) {
      ASSERT_TRUE(rank != 1 || call == 0) << "rank 1 makes a call after the damage";
      if (rank == 1) received[received.size() / 3 * 2 + 5] ^= std::byte{4};
    });
    Reducer reducer(failing_options(), model(), communicator);
    const std::vector<ParameterState> before = reducer.residual().state();
    reducer.begin_step();
    const auto gradients = gradients_of_step(0, rank);
    std::vector<GradientBuffer> buffers;
    for (const auto& gradient : gradients) buffers.emplace_back(gradient);
    Work first = reducer.reduce(kBuckets[0], buffers[0].view());
    Work second = reducer.reduce(kBuckets[1], buffers[1].view());
    const Error error = error_of([&] { first.wait(); });
    EXPECT_TRUE(
        says(error, rank == 1 ? ErrorCode::corrupt_payload : ErrorCode::remote, {rank == 1 ? "rank 2" : "rank 1"}));
    const Error next = error_of([&] { second.wait(); });
    const std::vector<Bucket> taken(kBuckets.begin(), kBuckets.begin() + 1);
    EXPECT_TRUE(same_states(reducer.residual().state(), accumulated(before, taken, gradients, kRule)));
    expect_dead(reducer, next);
  });
}

// A rank that ends its reducer in the middle of a step: nobody waits longer than the time-out.
TEST(ReducerFailure, ARankThatLeavesIsATimeout) {
  run_ranks(
      2,
      [](Communicator& communicator) {
        auto reducer = std::make_unique<Reducer>(failing_options(), model(), communicator);
        reducer->begin_step();
        if (communicator.rank() == 1) return;
        GradientBuffer buffer(gradient_of(kBuckets[0], 0, 0));
        Work work = reducer->reduce(kBuckets[0], buffer.view());
        reducer.reset();  // finishes the job first
        EXPECT_TRUE(work.done());
        EXPECT_TRUE(says(error_of([&] { work.wait(); }), ErrorCode::timeout, {"rank 1"}));
      },
      200ms);
}

}  // namespace
}  // namespace thinwire::test
