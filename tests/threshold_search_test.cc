// select.h, ThresholdSearch: it stops on the count whatever the tails, and what a remembered threshold does.
#include <algorithm>
#include <cmath>
#include <functional>
#include <random>

#include "cases.h"
#include "helpers.h"
#include "reference/selection.h"
#include "thinwire/select.h"

namespace thinwire::test {
namespace {

#ifdef THINWIRE_SMALL_TESTS
constexpr std::size_t kNumel = 1u << 16;
#else
constexpr std::size_t kNumel = 1u << 19;
#endif

SparseGradient selected(Selection& selection, const ThresholdSearch& how, std::span<const float> values,
                        Side side = Side::both, SelectionMemory* memory = nullptr) {
  const UnitSegment unit{values.data(), values.size(), 0};
  SparseGradient out;
  select(how, {&unit, 1}, 0, selection, out, side, memory);
  return out;
}

std::vector<float> drawn(const std::function<double(std::mt19937&)>& draw) {
  std::mt19937 random(7);
  std::vector<float> values(kNumel);
  for (float& value : values) value = float(draw(random)) * (random() % 2 == 0 ? 1.0f : -1.0f);
  return values;
}

/// The count that the authors' rule ends with: it stops when r is known to `width`, too.
std::size_t count_of_width_rule(UnitView unit, std::size_t k, double width) {
  const std::vector<reference::Entry> entries = reference::entries_of(unit, Side::both);
  const reference::Statistics statistics = reference::statistics(unit, Side::both);
  double low = 0, high = 1;
  std::size_t count = 0;
  while (high - low > width) {
    const double ratio = (low + high) / 2;
    count = reference::count_above(entries, statistics.threshold(ratio));
    if (count > k && count < 2 * k) break;
    (2 * count < k ? high : low) = ratio;
  }
  return count;
}

TEST(ThresholdSearch, StopsOnTheCountWhateverTheTails) {
  std::normal_distribution<double> normal;
  std::exponential_distribution<double> exponential;
  std::student_t_distribution<double> student(3.0);
  std::lognormal_distribution<double> lognormal(0.0, 2.0);
  std::uniform_real_distribution<double> uniform;
  const std::vector<std::pair<const char*, std::vector<float>>> cases = {
      {"normal", drawn([&](auto& random) { return normal(random); })},
      {"laplace", drawn([&](auto& random) { return exponential(random); })},
      {"student_t3", drawn([&](auto& random) { return student(random); })},
      {"lognormal", drawn([&](auto& random) { return lognormal(random); })},
      {"uniform", drawn([&](auto& random) { return uniform(random); })}};
  const ThresholdSearch how{0.001};
  const std::size_t k = target_count(how, kNumel);
  Selection selection;
  for (auto [name, values] : cases)
    for (const bool outlier : {false, true}) {
      SCOPED_TRACE(::testing::Message() << name << (outlier ? " with an outlier" : ""));
      if (outlier) values[kNumel / 3] = 1000.0f * std::ranges::max(values);
      const UnitSegment unit{values.data(), kNumel, 0};
      for (const Side side : kSides) {
        const SparseGradient out = selected(selection, how, values, side);
        EXPECT_GE(out.nnz(), k);
        EXPECT_LE(out.nnz(), capacity(how, kNumel));
        EXPECT_EQ(selection.fallbacks(), 0u);
        EXPECT_EQ(out.indices, reference::top_k({&unit, 1}, double(out.nnz()) / kNumel, side).indices);
      }
      if (outlier) {
        EXPECT_LT(5 * count_of_width_rule({&unit, 1}, k, 0.2), k) << "what the rule on the width would send";
      }
    }
}

// A residual that grows as a whole, with some noise: t(r) moves with it, and the count stays near.
TEST(ThresholdSearch, ASearchServesTheStepsThatFollow) {
  const ThresholdSearch how{0.01, 5};
  const std::size_t k = target_count(how, kNumel);
  std::vector<float> values = make_values(Distribution::laplace, kNumel, 3);
  Selection selection;
  SelectionMemory memory, expected_memory;
  double ratio = 0;
  for (std::uint32_t step = 0; step < 12; ++step) {
    SCOPED_TRACE(step);
    const UnitSegment unit{values.data(), kNumel, 0};
    const SparseGradient expected = reference::threshold_search(how, {&unit, 1}, Side::both, &expected_memory);
    const SparseGradient out = selected(selection, how, values, Side::both, &memory);
    EXPECT_EQ(out.indices, expected.indices);
    EXPECT_EQ(memory.uses, step % 5 + 1) << "a search every five steps";
    EXPECT_EQ(memory.ratio, expected_memory.ratio);
    if (memory.uses > 1) {
      EXPECT_EQ(memory.ratio, ratio);
    }
    ratio = memory.ratio;
    EXPECT_GE(2 * out.nnz(), k);
    EXPECT_LE(out.nnz(), capacity(how, kNumel));
    EXPECT_EQ(selection.fallbacks(), 0u);
    const std::vector<float> noise = make_values(Distribution::normal, kNumel, 100 + step);
    for (std::size_t i = 0; i < kNumel; ++i) values[i] = 1.02f * values[i] + 0.01f * noise[i];
  }
}

TEST(ThresholdSearch, SearchesAgainWhenTooFewAreFound) {
  const ThresholdSearch how{0.01, 5};
  std::vector<float> values = make_values(Distribution::normal, kNumel, 3);
  Selection selection;
  SelectionMemory memory;
  selected(selection, how, values, Side::both, &memory);
  const double ratio = memory.ratio;
  values[77] = -1000.0f;  // the maximum: whatever else was above the threshold is not any more
  const SparseGradient out = selected(selection, how, values, Side::both, &memory);
  EXPECT_EQ(selection.fallbacks(), 1u);
  EXPECT_EQ(memory.uses, 1u);
  EXPECT_LT(memory.ratio, ratio);
  EXPECT_GE(out.nnz(), target_count(how, kNumel));
  EXPECT_LE(out.nnz(), capacity(how, kNumel));
}

TEST(ThresholdSearch, KeepsTheLargestWhenTooManyAreFound) {
  const ThresholdSearch how{0.01, 5};
  Selection selection;
  SelectionMemory memory;
  selected(selection, how, make_values(Distribution::normal, kNumel, 3), Side::both, &memory);
  const double ratio = memory.ratio;
  std::vector<float> values(kNumel);
  for (std::size_t i = 0; i < kNumel; ++i) values[i] = float(i + 1) * (i % 2 == 0 ? 1.0f : -1.0f);  // the last ones win
  const SparseGradient out = selected(selection, how, values, Side::both, &memory);
  EXPECT_EQ(selection.fallbacks(), 0u);
  EXPECT_EQ(memory.uses, 2u);
  EXPECT_EQ(memory.ratio, ratio);
  ASSERT_EQ(out.nnz(), capacity(how, kNumel));
  for (std::size_t j = 0; j < out.nnz(); ++j) ASSERT_EQ(out.indices[j], kNumel - out.nnz() + j);
}

TEST(ThresholdSearch, EachSelectionSearchesWithoutAMemoryOrWithAnIntervalOfOne) {
  const std::vector<float> before = make_values(Distribution::normal, 50'000, 3);
  const std::vector<float> after = make_values(Distribution::student_t3, 50'000, 4);
  Selection selection;
  const SparseGradient expected = selected(selection, {0.01, 1}, after);
  selected(selection, {0.01, 5}, before);
  EXPECT_EQ(selected(selection, {0.01, 5}, after).indices, expected.indices);
  SelectionMemory memory;
  for (const std::vector<float>* values : {&before, &before, &after}) {
    const SparseGradient out = selected(selection, {0.01, 1}, *values, Side::both, &memory);
    EXPECT_EQ(memory.uses, 0u) << "what is never reused is not remembered";
    if (values == &after) {
      EXPECT_EQ(out.indices, expected.indices);
    }
  }
}

// No threshold parts equal magnitudes, or leaves k where fewer are above the mean: the k largest, and nothing to reuse.
TEST(ThresholdSearch, TakesTheLargestWhereNoThresholdFits) {
  const ThresholdSearch how{0.1, 5};
  std::vector<float> one(1000, 0.0f);
  one[400] = -3.0f;
  for (const std::vector<float>& values : {std::vector<float>(1000, 0.375f), one, std::vector<float>(1000, 0.0f)}) {
    const UnitSegment unit{values.data(), values.size(), 0};
    Selection selection;
    SelectionMemory memory{.ratio = 0.5, .uses = 5};
    const SparseGradient out = selected(selection, how, values, Side::both, &memory);
    EXPECT_EQ(out.indices, reference::top_k({&unit, 1}, 0.1).indices);
    EXPECT_EQ(selection.fallbacks(), 1u);
    EXPECT_EQ(memory.uses, 0u);
  }
}

}  // namespace
}  // namespace thinwire::test
