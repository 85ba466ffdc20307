// reducer.h, I7: dense steps, density 1 and a single worker are plain momentum SGD.
#include "reference/tiny_models.h"
#include "training.h"

namespace thinwire::test {
namespace {

using reference::Tensors;
using reference::TinyModel;

constexpr int kSteps = 100;
constexpr float kRate = 0.02f;

/// Trains through a reducer; the optimizer is plain SGD. Returns what rank 0 ends with, after comparing the ranks.
Tensors train(const TinyModel& model, int ranks, const ReducerOptions& options) {
  std::vector<Tensors> ends(static_cast<std::size_t>(ranks));
  run_ranks(ranks, [&](Communicator& communicator) {
    Reducer reducer(options, model.parameters, communicator);
    Tensors theta = model.start;
    for (int step = 0; step < kSteps; ++step) {
      const Tensors gradient = model.gradient(theta, communicator.rank());
      std::vector<Bucket> buckets(2);  // the last parameter first, as backward has it
      std::vector<std::vector<float>> flat(2);
      for (std::size_t p = theta.size(); p-- > 0;) {
        const std::size_t b = p + 1 == theta.size() ? 0 : 1;
        buckets[b].slices.push_back({model.parameters[p].name, theta[p].size()});
        flat[b].insert(flat[b].end(), gradient[p].begin(), gradient[p].end());
      }
      reducer.begin_step();
      const auto means = reduce_all(reducer, buckets, flat);
      std::size_t at[2] = {0, 0};
      for (std::size_t p = theta.size(); p-- > 0;) {
        const std::size_t b = p + 1 == theta.size() ? 0 : 1;
        for (float& value : theta[p]) value -= kRate * means[b][at[b]++];
      }
    }
    ends[std::size_t(communicator.rank())] = theta;
  });
  for (const Tensors& end : ends) EXPECT_EQ(end, ends[0]) << "the ranks' parameters differ";
  return ends[0];
}

struct Case {
  std::string name;
  TinyModel model;
  double tolerance;
};
std::vector<Case> cases() {
  return {{"linear", reference::linear_model(), 1e-6}, {"relu", reference::relu_model(), 1e-5}};
}

ReducerOptions with_momentum(ReducerOptions options, float momentum, bool nesterov = false) {
  options.momentum = momentum;
  options.nesterov = nesterov;
  options.dense_below = 0;
  return options;
}

void expect_plain(const ReducerOptions& options, float momentum, bool nesterov, const std::vector<int>& worlds) {
  for (const Case& c : cases())
    for (const int ranks : worlds) {
      const Tensors expected = reference::train_plainly(c.model, ranks, kSteps, kRate, momentum, nesterov);
      EXPECT_LE(reference::relative_distance(train(c.model, ranks, options), expected), c.tolerance)
          << c.name << ", " << ranks << " ranks\n"
          << to_string(options);
      EXPECT_GT(reference::relative_distance(expected, c.model.start), 0.05)
          << "nothing was learnt: the test shows nothing";
    }
}

TEST(Dense, IsMomentumSgd) {
  for (const float momentum : {0.0f, 0.9f})
    expect_plain(with_momentum(dense(), momentum), momentum, false, {1, 2, 3, 5, 8});
  expect_plain(with_momentum(dense(), 0.9f, true), 0.9f, true, {1, 2, 3});
}

TEST(Dense, AlwaysDenseParametersAreMomentumSgd) {
  ReducerOptions options = with_momentum(top_k(), 0.9f);
  options.dense_below = 1'000'000;
  expect_plain(options, 0.9f, false, {2, 3, 5});
}

TEST(Dense, OneWorkerIsMomentumSgdWhateverTheSelector) {
  for (const Selector& selector : selectors(0.01)) {
    ReducerOptions options = options_with(selector);
    expect_plain(with_momentum(options, 0.9f), 0.9f, false, {1});
    expect_plain(with_momentum(options, 0.9f, true), 0.9f, true, {1});
  }
}

TEST(Dense, DensityOneWithoutMaskingIsMomentumSgd) {
  for (const Selector& selector : {Selector(TopK{1.0}), Selector(TrimmedTopK{1.0})})
    for (const Unit unit : {Unit::parameter, Unit::bucket}) {
      ReducerOptions options = with_momentum(options_with(selector), 0.9f);
      options.unit = unit;
      options.momentum_masking = false;
      expect_plain(options, 0.9f, false, {2, 3});
    }
  ReducerOptions options = with_momentum(options_with(TopK{1.0}), 0.9f, true);
  options.momentum_masking = false;
  expect_plain(options, 0.9f, true, {3});
}

// Masking clears the velocity of everything that is sent, and at density 1 that is everything.
TEST(Dense, DensityOneWithMaskingIsSgdWithoutMomentum) {
  expect_plain(with_momentum(options_with(TopK{1.0}), 0.9f), 0.0f, false, {2, 3});
  expect_plain(with_momentum(options_with(TrimmedTopK{1.0}), 0.9f), 0.0f, false, {3});
}

// Dense warm-up, then sparse at density 1: there is no seam.
TEST(Dense, SwitchingNeedsNoHandOver) {
  ReducerOptions options = with_momentum(options_with(TopK{1.0}), 0.9f);
  options.momentum_masking = false;
  options.schedule.dense_steps = 37;
  expect_plain(options, 0.9f, false, {2, 5});
}

// Low density is another algorithm: it learns, but it is not dense SGD.
TEST(Dense, LowDensityLearnsTooButDiffers) {
  const TinyModel model = reference::linear_model();
  const Tensors plain = reference::train_plainly(model, 3, kSteps, kRate, 0.0f, false);
  for (const Selector& selector : selectors(0.2)) {
    const Tensors end = train(model, 3, with_momentum(options_with(selector), 0.0f));
    EXPECT_GT(reference::relative_distance(end, plain), 1e-3) << to_string(selector);
    EXPECT_LT(reference::relative_distance(end, plain), 0.5 * reference::relative_distance(model.start, plain))
        << to_string(selector);
  }
}

}  // namespace
}  // namespace thinwire::test
