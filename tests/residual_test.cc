// residual.h, the sweep: accumulate and peek against the scalar rule, block by block, non-finite entries included.
#include "thinwire/residual.h"

#include <limits>

#include "cases.h"
#include "helpers.h"
#include "reference/residual.h"

namespace thinwire::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
const float kNaN = std::numeric_limits<float>::quiet_NaN();
const std::vector<MomentumRule> kRules = {
    {0.0f, false, true}, {0.9f, false, true}, {0.9f, true, true}, {0.0f, false, false}};

std::string describe(const MomentumRule& rule) {
  return "momentum " + std::to_string(rule.momentum) + (rule.nesterov ? ", nesterov" : "") +
         (rule.error_feedback ? "" : ", no error feedback");
}

/// One parameter "p" at `offset` of its bucket, in the residual and in the reference.
struct Twin {
  Residual residual;
  reference::ResidualState expected;
  MomentumRule rule;
  Residual::Segment segment;

  Twin(std::size_t numel, const MomentumRule& r, std::uint32_t offset = 0) : expected(numel, r), rule(r) {
    residual.add({"p", numel}, rule);
    segment = residual.segment("p", numel, offset);
  }
  ::testing::AssertionResult agree() const {
    if (auto v = same_bits(residual.residual("p"), expected.v); !v) return v << " (residual)";
    if (auto u = same_bits(residual.velocity("p"), expected.u); !u) return u << " (velocity)";
    return ::testing::AssertionSuccess();
  }
};

// Three steps of one case; what each of them must leave is found once and compared on every target.
void check_steps(const Case& c, const MomentumRule& rule, DType dtype, std::vector<GradientBuffer>& gradients) {
  std::vector<reference::ResidualState> expected(1, reference::ResidualState(c.numel, rule));
  for (GradientBuffer& gradient : gradients) {
    expected.push_back(expected.back());
    reference::accumulate(expected.back(), rule, gradient.floats());
  }
  on_every_target([&] {
    Twin twin(c.numel, rule);
    for (std::size_t step = 0; step < gradients.size(); ++step) {
      const auto refused = Residual::accumulate({&twin.segment, 1}, gradients[step].view());
      EXPECT_EQ(refused, std::nullopt);
      twin.expected = expected[step + 1];
      ASSERT_TRUE(twin.agree()) << c << ", " << describe(rule) << ", " << to_string(dtype) << ", step " << step;
    }
  });
}

TEST(Accumulate, AgreesWithTheScalarRule) {
  for (const Case& c : small_cases())
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      std::vector<GradientBuffer> gradients;
      std::vector<std::vector<float>> before;
      for (std::uint32_t step = 0; step < 3; ++step) {
        gradients.emplace_back(make_values(c.distribution, c.numel, c.seed + step), dtype, step);
        before.push_back(gradients.back().floats());
      }
      for (const MomentumRule& rule : kRules) check_steps(c, rule, dtype, gradients);
      for (std::size_t step = 0; step < 3; ++step) {
        ASSERT_TRUE(same_bits(gradients[step].floats(), before[step])) << "the gradient was written to";
        ASSERT_TRUE(gradients[step].intact());
      }
    }
}

TEST(Accumulate, LargeSizes) {
  for (const Case& c : large_cases()) {
    const std::vector<float> values = c.values();
    for (const MomentumRule& rule : kRules) {
      Twin twin(c.numel, rule);
      for (const std::size_t shift : {0, 1}) {
        GradientBuffer gradient(values, DType::f32, shift);
        Residual::accumulate({&twin.segment, 1}, gradient.view());
        reference::accumulate(twin.expected, rule, values);
      }
      ASSERT_TRUE(twin.agree()) << c << ", " << describe(rule);
    }
  }
}

// Three slices in one bucket; the unit is the first and the last of them, so a gap of one slice is skipped.
TEST(Accumulate, TakesEachSegmentFromItsPlaceAndShowsEveryBlockOnce) {
  const std::vector<std::size_t> sizes = {4097, 33, 5000};
  const std::vector<float> values = dyadic_values(3 + 4097 + 33 + 5000, 7);
  on_every_target([&] {
    Residual residual;
    for (std::size_t i = 0; i < 3; ++i) residual.add({"p" + std::to_string(i), sizes[i]}, {});
    GradientBuffer gradient(values);
    const std::vector<Residual::Segment> unit = {residual.segment("p0", 4097, 3),
                                                 residual.segment("p2", 5000, 3 + 4097 + 33)};

    std::vector<float> seen(values.size(), -77.0f);
    std::uint32_t next = 3;
    Residual::accumulate(unit, gradient.view(), [&](const UnitBlock& block) {
      if (block.offset != next) {
        EXPECT_EQ(next, 3u + 4097u);
        EXPECT_EQ(block.offset, 3u + 4097u + 33u);
      }
      EXPECT_GT(block.count, 0u);
      EXPECT_LE(block.count, 4096u);
      std::copy_n(block.values, block.count, seen.begin() + block.offset);
      next = block.offset + static_cast<std::uint32_t>(block.count);
      return kNoBound;
    });
    EXPECT_EQ(next, values.size());

    std::vector<float> expected = values;
    std::fill_n(expected.begin(), 3, -77.0f);
    std::fill_n(expected.begin() + 3 + 4097, 33, -77.0f);
    EXPECT_TRUE(same_bits(seen, expected));
    EXPECT_TRUE(same_bits(residual.residual("p0"), std::span(values).subspan(3, 4097)));
    EXPECT_TRUE(same_bits(residual.residual("p1"), std::vector<float>(33, 0.0f)));
    EXPECT_TRUE(same_bits(residual.residual("p2"), std::span(values).subspan(3 + 4097 + 33)));
    const UnitSegment view = Residual::view(unit[1]);
    EXPECT_EQ(view.values, residual.residual("p2").data());
    EXPECT_EQ(view.numel, 5000u);
    EXPECT_EQ(view.offset, 3u + 4097u + 33u);
  });
}

TEST(Accumulate, LeavesEntriesOfNonFiniteGradientsAlone) {
  on_every_target([] {
    for (const std::size_t numel : {std::size_t{1}, std::size_t{33}, std::size_t{4097}})
      for (const MomentumRule& rule : kRules)
        for (const float bad : {kNaN, -kNaN, kInfinity, -kInfinity})
          for (const DType dtype : {DType::f32, DType::f16, DType::bf16})
            for (const std::size_t place : {std::size_t{0}, numel / 2, numel - 1}) {
              constexpr std::uint32_t kOffset = 5;
              Twin twin(numel, rule, kOffset);
              std::vector<float> values = dyadic_values(kOffset + numel, 3, 1.0f / 64);
              GradientBuffer first(values, dtype);
              std::vector<float> taken = first.floats();
              Residual::accumulate({&twin.segment, 1}, first.view());
              reference::accumulate(twin.expected, rule, std::span(std::as_const(taken)).subspan(kOffset));

              values = dyadic_values(kOffset + numel, 4, 1.0f / 64);
              values[0] = kNaN;  // outside the segment: does not count
              values[kOffset + place] = bad;
              values[kOffset + numel - 1] = bad;
              GradientBuffer second(values, dtype);
              taken = second.floats();
              const auto refused = Residual::accumulate({&twin.segment, 1}, second.view());
              reference::accumulate(twin.expected, rule, std::span(std::as_const(taken)).subspan(kOffset));
              ASSERT_EQ(refused, std::optional<std::uint32_t>(kOffset + place)) << numel << ", " << describe(rule);
              ASSERT_TRUE(twin.agree()) << numel << ", " << describe(rule) << ", " << bad << " at " << place;
            }
  });
}

TEST(Accumulate, LeavesEntriesWhoseSumOverflowsAlone) {
  on_every_target([] {
    for (const MomentumRule& rule : {MomentumRule{}, MomentumRule{0.9f, false, true}, MomentumRule{0.9f, true, true}}) {
      Twin twin(40, rule);
      std::vector<float> values = dyadic_values(40, 5);
      values[11] = values[39] = 1.5e38f;
      for (int step = 0; step < 3; ++step) {
        GradientBuffer gradient(values);
        const auto refused = Residual::accumulate({&twin.segment, 1}, gradient.view());
        const auto expected = reference::accumulate(twin.expected, rule, values);
        EXPECT_EQ(refused.has_value(), expected.has_value());
        EXPECT_EQ(refused.value_or(11), 11u);
        ASSERT_TRUE(twin.agree()) << describe(rule) << ", step " << step;
      }
      EXPECT_NE(twin.expected.v[11], 0.0f);
    }
  });
}

TEST(Accumulate, PointsOutTheHitsOfEveryBlock) {
  on_every_target([] {
    for (const MomentumRule& rule : kRules)
      for (const std::size_t numel : {1, 31, 32, 33, 4096, 4097, 9000}) {
        Twin twin(numel, rule);
        for (std::uint32_t step = 0; step < 3; ++step) {
          std::vector<float> values = make_values(Distribution::laplace, numel, step);
          if (step == 2) values[numel / 2] = kNaN;  // keeps its old v, which may be a hit
          GradientBuffer gradient(values);
          std::vector<std::uint32_t> hits;
          std::vector<std::uint32_t> bounds = {1, std::bit_cast<std::uint32_t>(1.5f)};
          std::vector<std::uint32_t> expected;
          std::size_t block_number = 0;
          const auto visit = [&](const UnitBlock& block) {
            for (const std::uint32_t hit : block.hits) hits.push_back(block.offset + hit);
            for (std::uint32_t i = 0; i < block.count; ++i)
              if ((std::bit_cast<std::uint32_t>(block.values[i]) & 0x7fffffffu) >= bounds[block_number % 2])
                expected.push_back(block.offset + i);
            return bounds[++block_number % 2];
          };
          Residual::accumulate({&twin.segment, 1}, gradient.view(), visit, bounds[0]);
          reference::accumulate(twin.expected, rule, values);
          ASSERT_TRUE(twin.agree()) << describe(rule) << ", step " << step;
          ASSERT_EQ(hits, expected) << describe(rule) << ", " << numel << " elements, step " << step;
        }
      }
  });
}

TEST(Peek, ShowsWhatAccumulateWillLeave) {
  on_every_target([] {
    for (const MomentumRule& rule : kRules)
      for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
        constexpr std::uint32_t kOffset = 2;
        Twin twin(4097, rule, kOffset);
        GradientBuffer first(make_values(Distribution::normal, kOffset + 4097, 1), dtype);
        Residual::accumulate({&twin.segment, 1}, first.view());
        std::vector<float> values = make_values(Distribution::laplace, kOffset + 4097, 2);
        values[kOffset + 100] = kNaN;
        GradientBuffer second(values, dtype);
        const ParameterState before = twin.residual.state()[0];

        std::vector<float> whole(4097), odd(10 + 2, -1.0f);
        const std::vector<UnitRun> all = {{kOffset, 4097}};
        const std::vector<UnitRun> two = {{kOffset + 95, 7}, {kOffset + 102, 3}};
        Residual::peek({&twin.segment, 1}, second.view(), all, whole.data());
        Residual::peek({&twin.segment, 1}, second.view(), two, odd.data() + 1);
        EXPECT_EQ(odd.front(), -1.0f);
        EXPECT_EQ(odd.back(), -1.0f);
        EXPECT_TRUE(same_bits(twin.residual.residual("p"), before.residual));
        EXPECT_TRUE(same_bits(twin.residual.velocity("p"), before.velocity));

        Residual::accumulate({&twin.segment, 1}, second.view());
        EXPECT_TRUE(same_bits(whole, twin.residual.residual("p"))) << describe(rule);
        EXPECT_TRUE(same_bits(std::span(odd).subspan(1, 10), twin.residual.residual("p").subspan(95, 10)));
      }
  });
}

TEST(Norm, IsTheRootOfTheSumOfSquares) {
  std::vector<double> norms;
  on_every_target([&] {
    Residual residual;
    double sum = 0;
    for (const Case& c : {Case{4097, Distribution::normal, 1}, Case{33, Distribution::student_t3, 2},
                          Case{0, Distribution::normal, 3}}) {
      const std::string name = "p" + std::to_string(c.seed);
      residual.add({name, c.numel}, {});
      GradientBuffer gradient(c.values());
      const Residual::Segment segment = residual.segment(name, c.numel, 0);
      Residual::accumulate({&segment, 1}, gradient.view());
      for (const float value : c.values()) sum += double(value) * value;
    }
    norms.push_back(residual.norm());
    EXPECT_NEAR(norms.back(), std::sqrt(sum), 1e-12 * std::sqrt(sum));
    EXPECT_EQ(norms.back(), norms.front()) << "another order of summation";
  });
  EXPECT_EQ(Residual().norm(), 0.0);
}

}  // namespace
}  // namespace thinwire::test
