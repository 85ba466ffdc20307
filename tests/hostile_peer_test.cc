// reducer.h: what another rank may send when ranks tell each other why they stop.
#include <algorithm>
#include <cstring>
#include <limits>

#include "failures.h"
#include "reference/wire.h"

namespace thinwire::test {
namespace {

/// Rank 0 of two. Rank 1 says that it has failed, and then announces `size` bytes of reason and sends `reason`.
class FailingPeer : public Communicator {
 public:
  FailingPeer(std::uint64_t size, std::string reason) : size_(size), reason_(std::move(reason)) {}
  int rank() const override { return 0; }
  int size() const override { return 2; }
  void abort(const std::string&) noexcept override {}

 protected:
  void do_all_gather(std::span<const std::byte> block, std::span<std::byte> blocks) override {
    reference::Bytes answer(block.begin(), block.end());
    if (calls_ == 0) {
      reference::overwrite(answer, reference::kFlagsAt, PayloadHeader::failed, 2);
      reference::seal(answer);
    } else if (calls_ == 1) {
      reference::overwrite(answer, 0, size_, 8);
    } else {
      answer.resize(std::max(answer.size(), reason_.size()));
      std::memcpy(answer.data(), reason_.data(), reason_.size());
      answer.resize(block.size());
    }
    ++calls_;
    std::ranges::copy(block, blocks.begin());
    std::ranges::copy(answer, blocks.begin() + std::ptrdiff_t(block.size()));
  }
  void do_all_to_all(std::span<const std::byte>, std::span<std::byte>) override {}
  void do_all_reduce(std::span<const float>, std::span<float>) override {}
  void do_barrier() override {}

 private:
  std::uint64_t size_;
  std::string reason_;
  int calls_ = 0;
};

Error error_with(std::uint64_t size, const std::string& reason) {
  FailingPeer peer(size, reason);
  Reducer reducer(options_with(TopK{0.01}), kOne, peer);
  reducer.begin_step();
  std::vector<float> gradient = normal(kOne[0].numel, 0, 0);
  return error_of([&] { reducer.reduce(kOneBucket, {gradient.data(), gradient.size()}).wait(); });
}

TEST(HostilePeer, ReasonsArrive) {
  const std::string reason = "the optimizer of größe π has gone";
  EXPECT_TRUE(says(error_with(reason.size(), reason), ErrorCode::remote, {"rank 1 failed in step 0", reason}));
}

TEST(HostilePeer, NoMemoryIsTakenForWhatItAnnounces) {
  for (const std::uint64_t size : {std::uint64_t{1} << 25, std::uint64_t{1} << 45, ~std::uint64_t{0}})
    EXPECT_TRUE(says(error_with(size, ""), ErrorCode::remote, {"rank 1", "announces " + std::to_string(size)}));
}

TEST(HostilePeer, WhatItSaysStaysOneLine) {
  const std::string reason = "first\nsecond\r\x1b[2J\t" + std::string(1, '\0') + std::string(100'000, 'x');
  const Error error = error_with(reason.size(), reason);
  const std::string sentence = error.what();
  EXPECT_TRUE(says(error, ErrorCode::remote, {"rank 1 failed in step 0, bucket 0: first second  [2J"}));
  EXPECT_LT(sentence.size(), 2000u);
  EXPECT_TRUE(std::ranges::none_of(sentence, [](unsigned char c) { return c < ' '; }));
}

// What a load replaces does not come back with the undo of an earlier step.
TEST(LoadedState, IsNotUndoneWithASkippedStep) {
  ReducerOptions options = options_with(ThresholdSearch{0.01});
  options.momentum = 0.9f;
  run_ranks(2, [&](Communicator& communicator) {
    Reducer reducer(options, kOne, communicator);
    const auto step = [&](std::vector<float> gradient) {
      reducer.begin_step();
      reduce_one(reducer, kOneBucket, gradient);
    };
    step(normal(2000, 0, communicator.rank()));
    ReducerState saved = reducer.state();
    saved.selections.at("w") = {.ratio = 0.25, .uses = 3};
    std::vector<float> bad = normal(2000, 1, communicator.rank());
    bad[7] = std::numeric_limits<float>::infinity();
    step(bad);
    reducer.load(saved);
    for (int twice = 0; twice < 2; ++twice) {
      const ReducerState loaded = reducer.state();
      EXPECT_TRUE(same_states(loaded.parameters, saved.parameters));
      EXPECT_EQ(loaded.selections.at("w").ratio, 0.25);
      EXPECT_EQ(loaded.selections.at("w").uses, 3u);
      reducer.undo_step();
    }
  });
}

}  // namespace
}  // namespace thinwire::test
