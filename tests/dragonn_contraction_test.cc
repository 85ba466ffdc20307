// How much of a gradient hashing into slots sends, and what that leaves in the residual, against theory.
#include <array>

#include "cases.h"
#include "dragonn_theory.h"
#include "thinwire/reducer.h"

namespace thinwire::test {
namespace {

enum class Shape { normal, laplace, student_t3, nearly_equal };
constexpr std::array<Shape, 4> kShapes = {Shape::normal, Shape::laplace, Shape::student_t3, Shape::nearly_equal};
std::string shape_name(Shape shape) {
  constexpr std::array<const char*, 4> kNames = {"normal", "laplace", "student_t3", "nearly_equal"};
  return kNames[static_cast<std::size_t>(shape)];
}

std::vector<float> values_of(Shape shape, std::size_t numel, std::uint32_t seed) {
  if (shape == Shape::normal) return make_values(Distribution::normal, numel, seed);
  if (shape == Shape::laplace) return make_values(Distribution::laplace, numel, seed);
  if (shape == Shape::student_t3) return make_values(Distribution::student_t3, numel, seed);
  std::vector<float> values = scattered(numel, numel, seed);  // 1 … 2, all different
  for (float& value : values) value = std::copysign(1 + (std::fabs(value) - 1) / 1024, value);
  return values;
}

double squares(std::span<const float> values) {
  double sum = 0;
  for (const float value : values) sum += double(value) * value;
  return sum;
}

struct Contraction {
  double measured = 0, error = 0;  // E‖v-C(v)‖² / ‖v‖² over seeds
  double exact = 0;                // 1 - Σ_j (1-1/S)^j v_j² / ‖v‖², by rank
  double uniform_winner = 0;       // 1 - q·Σ v_j² / ‖v‖² over the candidates
  double bound = 0;                // 1 - delta
};

Contraction contraction_of(const std::vector<float>& values, double density, Layout layout, int trials) {
  const std::size_t numel = values.size();
  const double all = squares(values);
  const UnitSegment unit{values.data(), numel, 0};
  Average average;
  SparseGradient out;
  for (int trial = 0; trial < trials; ++trial) {
    select(exact(density, layout), {&unit, 1}, seed_of(trial), out);
    average.add(1 - squares(out.values) / all);  // free slots hold 0
  }
  const double k = std::round(density * double(numel));
  const double slots = slots_of(layout, k);
  const double candidates = candidates_of(layout, k);
  std::vector<float> ranked = values;
  std::sort(ranked.begin(), ranked.end(), [](float a, float b) { return std::fabs(a) > std::fabs(b); });
  Contraction result{average.mean(), average.error(), 1, 1, 1 - delta_of(layout, k, double(numel))};
  for (std::size_t j = 0; j < std::size_t(candidates); ++j) {
    const double share = double(ranked[j]) * ranked[j] / all;
    result.exact -= std::pow(1 - 1 / slots, double(j)) * share;
    result.uniform_winner -= expected_kept(slots, candidates) / candidates * share;
  }
  return result;
}

// E‖v-C(v)‖² <= (1-delta)‖v‖², with equality where all magnitudes are equal; and since the larger magnitude wins a slot,
// never more than with a winner by lot.
TEST(DragonnTheory, HashingIsAContraction) {
  const int trials = 64 / kShrink;
  for (const std::size_t numel : {std::size_t{2000}, std::size_t(kShrink > 1 ? 4000 : 20'000)})
    for (const double density : {0.01, 0.05})
      for (const Layout layout : {Layout::a, Layout::b})
        for (const Shape shape : kShapes) {
          SCOPED_TRACE(shape_name(shape) + ", density " + std::to_string(density) + ", layout " + name(layout) + ", " +
                       std::to_string(numel) + " elements");
          const Contraction c =
              contraction_of(values_of(shape, numel, 31 + std::uint32_t(shape)), density, layout, trials);
          if (density == 0.01) {
            const std::string what = shape_name(shape) + "." + name(layout) + ".";
            record(what + "sent", 1 - c.measured);
            record(what + "uniform_winner", 1 - c.uniform_winner);
            record(what + "delta", 1 - c.bound);
          }
          EXPECT_NEAR(c.measured, c.exact, kSigmas * c.error + 1e-9);
          EXPECT_LE(c.exact, c.uniform_winner + 1e-12);
          EXPECT_LE(c.uniform_winner, c.bound + 1e-12);
          EXPECT_LE(c.measured, c.bound + kSigmas * c.error);
          if (shape == Shape::nearly_equal)
            EXPECT_NEAR(c.measured, c.bound, kSigmas * c.error + 0.003 * (1 - c.bound));  // magnitudes differ by 0.1 %
          else
            EXPECT_LT(c.measured, c.bound - 2 * (1 - c.bound));  // these send three times delta and more
        }
}

/// ‖v‖² on rank 0 after each of `steps` steps, relative to the squares of one gradient. `fresh`: a new gradient in every
/// step, else only in the first one.
std::vector<Average> residuals_over(int steps, int runs, Layout layout, Shape shape, bool fresh) {
  constexpr std::size_t kNumel = 2000;
  std::vector<Average> over(std::size_t(steps), Average{});
  for (int run = 0; run < runs; ++run)
    run_ranks(2, [&](Communicator& communicator) {
      ReducerOptions options = dragonn();
      options.selector = exact(0.05, layout);
      options.dense_below = 0;
      options.seed = std::uint64_t(run) + 1;
      Reducer reducer(options, {{"weight", kNumel}}, communicator);
      double one = 0;  // the largest so far
      for (int step = 0; step < steps; ++step) {
        std::vector<float> gradient(kNumel, 0.0f);
        if (fresh || step == 0) gradient = values_of(shape, kNumel, std::uint32_t(100 * step + communicator.rank()));
        one = std::max(one, squares(gradient));
        reducer.begin_step();
        reducer.reduce({{{"weight", kNumel}}}, {gradient.data(), kNumel}).wait();
        if (communicator.rank() == 0) over[std::size_t(step)].add(squares(reducer.residual().residual("weight")) / one);
      }
    });
  return over;
}

// What one gradient leaves in the residual shrinks at least by (1-delta) a step: E‖v_t‖² <= (1-delta)^t ‖g‖².
TEST(DragonnTheory, AGradientLeavesTheResidualGeometrically) {
  constexpr int kSteps = 12;
  for (const Layout layout : {Layout::a, Layout::b}) {
    const double delta = delta_of(layout, 100, 2000);
    // Of ‖v‖² after one step where all magnitudes are equal; a few runs alone do not tell.
    const double deviation = kept_deviation(slots_of(layout, 100), candidates_of(layout, 100)) / 2000;
    for (const Shape shape : kShapes) {
      const int runs = 16 / kShrink;
      const std::vector<Average> over = residuals_over(kSteps, runs, layout, shape, false);
      for (int t = 1; t <= kSteps; ++t) {
        const Average& left = over[std::size_t(t) - 1];
        const double error = std::max(left.error(), deviation * std::sqrt(double(t) / runs));
        EXPECT_LE(left.mean(), std::pow(1 - delta, t) + kSigmas * error) << shape_name(shape) << ", t " << t;
        EXPECT_GT(left.mean(), 0.0);
      }
    }
  }
}

// With a new gradient in every step, which knows nothing of what waits, the residual stays bounded: E‖v_t‖² is at most
// ‖g‖²·Σ (1-delta)^i, i = 1 … t. Were nothing sent, it would be t·‖g‖².
TEST(DragonnTheory, TheResidualStaysBounded) {
  constexpr int kSteps = 40;
  for (const Layout layout : {Layout::a, Layout::b}) {
    const double delta = delta_of(layout, 100, 2000);
    for (const Shape shape : {Shape::normal, Shape::student_t3}) {
      const std::vector<Average> over = residuals_over(kSteps, 8 / kShrink + 1, layout, shape, true);
      double bound = 0;
      for (int t = 1; t <= kSteps; ++t) {
        bound += std::pow(1 - delta, t);
        const Average& left = over[std::size_t(t) - 1];
        EXPECT_LE(left.mean(), bound + kSigmas * left.error()) << shape_name(shape) << ", t " << t;
      }
    }
  }
}

}  // namespace
}  // namespace thinwire::test
