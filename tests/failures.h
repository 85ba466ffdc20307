// Transports that go wrong, and what a failed step must leave.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "reference/residual.h"
#include "training.h"

namespace thinwire::test {

/// Passes everything on to another communicator; `before` and `after` may interfere, told the number of the call.
class MeddlingCommunicator : public Communicator {
 public:
  using Before = std::function<void(std::uint64_t call)>;
  using After = std::function<void(std::uint64_t call, std::span<std::byte> received)>;
  MeddlingCommunicator(Communicator& inner, Before before, After after = {})
      : inner_(inner), before_(std::move(before)), after_(std::move(after)) {}

  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  void abort(const std::string& reason) noexcept override { inner_.abort(reason); }

 protected:
  void do_all_gather(std::span<const std::byte> block, std::span<std::byte> blocks) override {
    around([&] { inner_.all_gather(block, blocks); }, blocks);
  }
  void do_all_to_all(std::span<const std::byte> sent, std::span<std::byte> received) override {
    around([&] { inner_.all_to_all(sent, received); }, received);
  }
  void do_all_reduce(std::span<const float> mine, std::span<float> sum) override {
    around([&] { inner_.all_reduce(mine, sum); }, std::as_writable_bytes(sum));
  }
  void do_barrier() override { inner_.barrier(); }

 private:
  void around(const std::function<void()>& call, std::span<std::byte> received) {
    const std::uint64_t number = calls_++;
    if (before_) before_(number);
    call();
    if (after_) after_(number, received);
  }
  Communicator& inner_;
  Before before_;
  After after_;
  std::uint64_t calls_ = 0;
};

/// u and v as the gradients of these buckets alone leave them.
inline std::vector<ParameterState> accumulated(std::vector<ParameterState> states, const std::vector<Bucket>& buckets,
                                               const std::vector<std::vector<float>>& gradients,
                                               const MomentumRule& rule) {
  for (std::size_t b = 0; b < buckets.size(); ++b) {
    std::size_t offset = 0;
    for (const BucketSlice& slice : buckets[b].slices) {
      for (ParameterState& state : states) {
        if (state.name != slice.name) continue;
        reference::ResidualState both;
        both.v = state.residual;
        both.u = state.velocity;
        reference::accumulate(both, rule, std::span(gradients[b]).subspan(offset, slice.numel));
        state.residual = both.v;
        state.velocity = both.u;
      }
      offset += slice.numel;
    }
  }
  return states;
}

/// Checks, on one rank, that every further call tells the same sentence.
inline void expect_dead(Reducer& reducer, const Error& first) {
  EXPECT_STREQ(error_of([&] { reducer.begin_step(); }).what(), first.what());
  GradientBuffer buffer(gradient_of(bucket_of({"fc.weight"}), 0, 0));
  Work late = reducer.reduce(bucket_of({"fc.weight"}), buffer.view());
  EXPECT_STREQ(error_of([&] { late.wait(); }).what(), first.what());
  EXPECT_TRUE(late.done());
}

}  // namespace thinwire::test
