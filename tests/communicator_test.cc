// communicator.h: the conformance suite on ranks as threads, and what threads can promise beyond it.
#include "thinwire/communicator.h"

#include "cases.h"
#include "communicator_conformance.h"
#include "helpers.h"

namespace thinwire::test {
namespace {

using namespace std::chrono_literals;

TEST(ThreadCommunicator, Conforms) {
  for (const ConformanceCheck& check : conformance_checks())
    for (const int ranks : kRanks) {
      SCOPED_TRACE(check.name + " with " + std::to_string(ranks) + " ranks");
      run_ranks(ranks, check.run);
    }
}

TEST(ThreadCommunicator, KnowsItsRank) {
  for (const int ranks : kRanks) {
    const auto communicators = make_thread_communicators(ranks);
    ASSERT_EQ(communicators.size(), std::size_t(ranks));
    for (int rank = 0; rank < ranks; ++rank) {
      EXPECT_EQ(communicators[std::size_t(rank)]->rank(), rank);
      EXPECT_EQ(communicators[std::size_t(rank)]->size(), ranks);
    }
  }
}

TEST(ThreadCommunicator, AbortWakesTheOthers) {
  for (const int ranks : kRanks) run_ranks(ranks, conformance::abort_wakes_the_others);
}

TEST(ThreadCommunicator, AMissingRankIsATimeout) {
  for (const int ranks : kRanks)
    run_ranks(
        ranks, [](Communicator& c) { conformance::missing_rank(c, 150ms); }, 150ms);
}

TEST(ThreadCommunicator, ATimeoutNamesWhoIsMissing) {
  run_ranks(
      5,
      [](Communicator& c) {
        if (c.rank() == 1 || c.rank() == 3) return;
        float value = 0;
        const Error error = error_of([&] { c.all_reduce({&value, 1}, {&value, 1}); });
        EXPECT_TRUE(says(error, ErrorCode::timeout, {"all_reduce", "rank 1", "3"}));
      },
      150ms);
}

// A rank that comes after the others gave up is told so at once, and does not wait for them.
TEST(ThreadCommunicator, ALateRankIsTold) {
  run_ranks(
      3,
      [](Communicator& c) {
        if (c.rank() == 2) std::this_thread::sleep_for(700ms);
        const auto start = std::chrono::steady_clock::now();
        EXPECT_EQ(error_of([&] { c.barrier(); }).code(), ErrorCode::timeout);
        EXPECT_TRUE(c.rank() != 2 || std::chrono::steady_clock::now() - start < 400ms);
      },
      500ms);
}

TEST(ThreadCommunicator, DifferentSizesAreAnErrorOnAllRanks) {
  for (const int ranks : {2, 3, 5, 8})
    run_ranks(ranks, [](Communicator& c) {
      const std::size_t size = c.rank() == c.size() - 1 ? 24 : 16;
      std::vector<std::byte> block(size), blocks(size * std::size_t(c.size()), std::byte{0x11});
      const Error error = error_of([&] { c.all_gather(block, blocks); });
      EXPECT_TRUE(says(error, ErrorCode::remote, {"rank " + std::to_string(c.size() - 1), "24", "16"}));
      EXPECT_EQ(blocks, std::vector<std::byte>(blocks.size(), std::byte{0x11})) << "nothing was received";
      EXPECT_NO_THROW(conformance::expect_dead(c, error));
    });
}

TEST(ThreadCommunicator, DifferentOperationsAreAnErrorOnAllRanks) {
  run_ranks(3, [](Communicator& c) {
    std::vector<std::byte> bytes(24);
    const Error error = error_of([&] {
      if (c.rank() == 1)
        c.all_to_all(bytes, bytes);
      else
        c.all_gather(std::span(bytes).first(8), bytes);
    });
    EXPECT_TRUE(says(error, ErrorCode::remote, {"rank 1", "all_to_all", "all_gather"}));
    EXPECT_NO_THROW(conformance::expect_dead(c, error));
  });
}

// The sum runs over the ranks in order, so that it has the bits of decode_mean.
TEST(ThreadCommunicator, SumsInRankOrder) {
  run_ranks(3, [](Communicator& c) {
    const std::vector<float> mine = {c.rank() == 0 ? 1.0f : c.rank() == 1 ? 1e8f : -1e8f};
    std::vector<float> sum(1);
    c.all_reduce(mine, sum);
    EXPECT_EQ(sum[0], 0.0f);  // 1 is lost in 1e8; in another order it would not be
  });
}

TEST(ThreadCommunicator, RefusesImpossibleWorlds) {
  EXPECT_TRUE(says(error_of([] { make_thread_communicators(0); }), ErrorCode::invalid_argument, {"0"}));
  EXPECT_TRUE(says(error_of([] { make_thread_communicators(-3); }), ErrorCode::invalid_argument, {"-3"}));
  EXPECT_TRUE(says(error_of([] { make_thread_communicators(2, 0ms); }), ErrorCode::invalid_argument, {"0"}));
  EXPECT_TRUE(says(error_of([] { make_thread_communicators(2, -5ms); }), ErrorCode::invalid_argument, {"-5"}));
}

// Communicators may go in any order, some before the others' last call has returned.
TEST(ThreadCommunicator, MayBeDestroyedInAnyOrder) {
  for (int round = 0; round < 50; ++round) {
    auto communicators = make_thread_communicators(3);
    std::vector<std::thread> threads;
    for (auto& communicator : communicators)
      threads.emplace_back([c = std::move(communicator)]() mutable {
        c->barrier();
        c.reset();
      });
    for (std::thread& thread : threads) thread.join();
  }
}

}  // namespace
}  // namespace thinwire::test
