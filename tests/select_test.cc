// select.h: every selector, on every case and SIMD target, against the slow ones of reference/selection.h.
#include "thinwire/select.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <set>

#include "cases.h"
#include "helpers.h"
#include "reference/selection.h"

namespace thinwire::test {
namespace {

::testing::AssertionResult same_entries(const SparseGradient& actual, const SparseGradient& expected) {
  if (actual.values.size() != actual.indices.size())
    return ::testing::AssertionFailure() << "as many values as indices";
  for (std::size_t j = 0; j < std::min(actual.nnz(), expected.nnz()); ++j)
    if (actual.indices[j] != expected.indices[j])
      return ::testing::AssertionFailure()
             << "entry " << j << " has index " << actual.indices[j] << " instead of " << expected.indices[j];
  if (actual.nnz() != expected.nnz())
    return ::testing::AssertionFailure() << actual.nnz() << " entries instead of " << expected.nnz();
  if (actual.hashed_order != expected.hashed_order)
    return ::testing::AssertionFailure() << "hashed_order is " << actual.hashed_order;
  if (actual.hash_seed != expected.hash_seed)
    return ::testing::AssertionFailure() << "hash_seed is " << actual.hash_seed;
  return same_bits(actual.values, expected.values);
}

bool is_of(Side side, float value) { return side == Side::both || (side == Side::largest ? value > 0 : value < 0); }

/// The unit in pieces of odd sizes, with gaps between them; `offset` is that of the first.
std::vector<UnitSegment> in_pieces(std::span<const float> values, std::uint32_t offset) {
  std::vector<UnitSegment> unit;
  for (std::size_t begin = 0, length = 1; begin < values.size(); begin += length, length = 2 * length + 5) {
    length = std::min(length, values.size() - begin);
    unit.push_back({values.data() + begin, length, offset});
    offset += static_cast<std::uint32_t>(length + 3);
  }
  return unit;
}

/// begin, collect in uneven pieces, finish, with nothing taken out; `peeked` tells which offsets were sampled.
SparseGradient by_blocks(Selection& selection, const Selector& selector, UnitView unit, std::uint32_t seed,
                         Side side = Side::both, std::set<std::uint32_t>* peeked = nullptr) {
  const auto peek = [&](std::span<const UnitRun> runs, float* out) {
    for (const UnitRun& run : runs)
      for (std::uint32_t i = 0; i < run.count; ++i) {
        const std::uint32_t offset = run.offset + i;
        const auto holds = [offset](const UnitSegment& s) { return offset - s.offset < s.numel; };
        const auto segment = std::find_if(unit.begin(), unit.end(), holds);
        *out++ = segment->values[offset - segment->offset];
        if (peeked != nullptr) peeked->insert(offset);
      }
  };
  selection.begin(selector, unit, seed, {.side = side, .memory = nullptr, .pass = {.peek = peek, .put_back = {}}});
  for (const UnitSegment& segment : unit)
    for (std::size_t begin = 0, length = 0; begin < segment.numel; begin += length) {
      length = std::min(segment.numel - begin, begin % 2 == 0 ? 37 + begin % 4059 : std::size_t{4096});
      std::vector<float> values(segment.values + begin, segment.values + begin + length);
      std::vector<std::uint32_t> hits;
      for (std::uint32_t i = 0; i < length; ++i)
        if ((std::bit_cast<std::uint32_t>(values[i]) & 0x7fffffffu) >= selection.bound() && is_of(side, values[i]))
          hits.push_back(i);
      selection.collect({.values = values.data(),
                         .count = length,
                         .offset = segment.offset + static_cast<std::uint32_t>(begin),
                         .hits = hits});
    }
  SparseGradient out;
  TakenEntries taken;
  selection.finish(out, taken);
  EXPECT_EQ(taken.count, 0u);
  return out;
}

void check(const Selector& selector, Side side, const Case& c, std::span<const float> values, Selection& reused) {
  SCOPED_TRACE(::testing::Message() << to_string(selector) << ", side " << to_string(side) << ", on " << c);
  const std::vector<UnitSegment> whole = {{values.data(), values.size(), 0}};
  const SparseGradient expected = reference::select(selector, whole, c.seed, side);
  SparseGradient out{{1, 2}, {3.0f, 4.0f}, true, 5};  // leftovers must not matter
  select(selector, whole, c.seed, out, side);
  ASSERT_TRUE(same_entries(out, expected));
  ASSERT_LE(out.nnz(), capacity(selector, c.numel));
  for (std::size_t j = 0; j < out.nnz(); ++j) ASSERT_TRUE(is_of(side, out.values[j]) || out.indices[j] == kEmptySlot);

  const std::vector<UnitSegment> pieces = in_pieces(values, 11);
  const SparseGradient expected_pieces = reference::select(selector, pieces, c.seed, side);
  select(selector, pieces, c.seed, out, side);
  ASSERT_TRUE(same_entries(out, expected_pieces)) << "in pieces";
  ASSERT_TRUE(same_entries(by_blocks(reused, selector, pieces, c.seed, side), expected_pieces)) << "block by block";
}

TEST(Select, AgreesWithTheOracleOnEveryTarget) {
  on_every_target([] {
    Selection reused;
    for (const Case& c : small_cases()) {
      const std::vector<float> values = c.values();
      for (const double density : kDensities)
        for (const Selector& selector : selectors(density))
          for (const Side side : kSides) check(selector, side, c, values, reused);
    }
  });
}

TEST(Select, AgreesWithTheOracleOnLargeUnits) {
  Selection reused;
  for (const Case& c : large_cases()) {
    const std::vector<float> values = c.values();
    for (const Selector& selector : selectors(c.numel > 1'000'000 ? 0.001 : 0.01))
      for (const Side side : kSides) check(selector, side, c, values, reused);
  }
}

// The contract without the oracle: so many, ascending, no zeros, the larger magnitudes, ties to smaller indices.
TEST(Select, ExactSelectorsReturnTheLargestMagnitudes) {
  for (const Case& c : small_cases())
    for (const double density : kDensities)
      for (const Selector& selector : selectors(density)) {
        if (!is_exact(selector)) continue;
        const std::vector<float> values = c.values();
        const UnitSegment unit{values.data(), values.size(), 0};
        SparseGradient out;
        select(selector, {&unit, 1}, 0, out);
        std::vector<bool> taken(c.numel, false);
        for (std::size_t j = 0; j < out.nnz(); ++j) {
          ASSERT_TRUE(j == 0 || out.indices[j - 1] < out.indices[j]);
          ASSERT_EQ(bits_of(out.values[j]), bits_of(values[out.indices[j]]));
          taken[out.indices[j]] = true;
        }
        const auto nonzeros = std::size_t(std::count_if(values.begin(), values.end(), [](float v) { return v != 0; }));
        ASSERT_EQ(out.nnz(), std::min(target_count(selector, c.numel), nonzeros)) << c;
        std::size_t last_taken = 0, first_left = c.numel;
        float least_taken = HUGE_VALF, most_left = 0;
        for (std::size_t i = 0; i < c.numel; ++i) {
          const float magnitude = std::fabs(values[i]);
          if (taken[i] && magnitude <= least_taken) least_taken = magnitude, last_taken = i;
          if (!taken[i] && magnitude > most_left) most_left = magnitude, first_left = i;
        }
        ASSERT_TRUE(least_taken > most_left || (least_taken == most_left && last_taken < first_left) || out.nnz() == 0)
            << c;
        ASSERT_TRUE(out.nnz() == 0 || least_taken > 0);
      }
}

TEST(Select, AllEqualTakesTheFirst) {
  const std::vector<float> values(1000, -0.375f);
  const UnitSegment unit{values.data(), values.size(), 40};
  for (const Selector& selector : {Selector(TopK{0.01}), Selector(TrimmedTopK{0.01, 0.2})}) {
    SparseGradient out;
    select(selector, {&unit, 1}, 0, out);
    EXPECT_EQ(out.indices, (std::vector<std::uint32_t>{40, 41, 42, 43, 44, 45, 46, 47, 48, 49})) << to_string(selector);
  }
}

TEST(Select, FirstAndLastElementCanBeSent) {
  for (const std::size_t numel :
       {std::size_t{1}, std::size_t{2}, std::size_t{130}, std::size_t{4097}, std::size_t{20'000}})
    for (const double density : {0.001, 0.01, 1.0})
      for (const Selector& selector : selectors(density))
        for (const std::size_t place : {std::size_t{0}, numel - 1}) {
          std::vector<float> values = dyadic_values(numel, 9, 1.0f / 4096);
          values[place] = -1.0f;  // by far the largest: wins its slot whatever the seed
          const UnitSegment unit{values.data(), numel, 0};
          SparseGradient out;
          select(selector, {&unit, 1}, 3, out);
          const auto at = std::find(out.indices.begin(), out.indices.end(), place);
          ASSERT_NE(at, out.indices.end()) << to_string(selector) << ", element " << place << " of " << numel;
          EXPECT_EQ(out.values[std::size_t(at - out.indices.begin())], -1.0f);
        }
}

// Magnitudes that differ in their last bit alone, in ascending, descending and scattered order.
TEST(Select, TellsNeighbouringMagnitudesApart) {
  constexpr std::uint32_t kNumel = 16'384;
  for (const std::uint32_t factor : {1u, kNumel - 1, 4097u}) {
    std::vector<float> values(kNumel);
    for (std::uint32_t i = 0; i < kNumel; ++i)
      values[i] = std::bit_cast<float>((i % 2 == 0 ? 0x3F800000u : 0xBF800000u) + i * factor % kNumel);
    const UnitSegment unit{values.data(), kNumel, 0};
    for (const double density : {0.0001, 0.01, 0.3})
      for (const Selector& selector : selectors(density)) {
        SparseGradient out;
        select(selector, {&unit, 1}, 4, out);
        EXPECT_TRUE(same_entries(out, reference::select(selector, {&unit, 1}, 4)))
            << to_string(selector) << ", " << factor;
      }
  }
}

// The k-th so far is beaten by an entry that comes last and is larger by one bit, and not by one that is equal.
TEST(Select, ALateEntryWinsByOneBit) {
  constexpr std::size_t kNumel = 20'000;
  for (const std::size_t k : {std::size_t{2}, std::size_t{20}})
    for (const Selector& selector : selectors(double(k) / kNumel)) {
      if (!is_exact(selector)) continue;
      std::vector<float> values = dyadic_values(kNumel, 6);  // at most 1 in magnitude
      for (std::size_t i = 0; i < k; ++i) values[7 * i + 5] = 100.0f + float(i);
      const UnitSegment unit{values.data(), kNumel, 0};
      SparseGradient out;
      values.back() = -100.0f;
      select(selector, {&unit, 1}, 0, out);
      EXPECT_EQ(out.indices.front(), 5u) << to_string(selector);
      EXPECT_NE(out.indices.back(), kNumel - 1) << to_string(selector);
      values.back() = std::nextafterf(-100.0f, -HUGE_VALF);
      select(selector, {&unit, 1}, 0, out);
      EXPECT_NE(out.indices.front(), 5u) << to_string(selector);
      EXPECT_EQ(out.indices.back(), kNumel - 1) << to_string(selector);
      EXPECT_EQ(out.nnz(), k);
    }
}

// Zeros of both signs among few others, and units of nothing but them.
TEST(Select, NeverSendsZeros) {
  std::vector<float> values(5000, 0.0f);
  for (std::size_t i = 0; i < values.size(); i += 2) values[i] = -0.0f;
  for (const std::size_t nonzeros : {0, 1, 3})
    for (const Selector& selector : selectors(0.1)) {
      for (std::size_t i = 0; i < nonzeros; ++i) values[1700 * i] = float(i + 1) * 1e-40f;
      const UnitSegment unit{values.data(), values.size(), 0};
      SparseGradient out;
      select(selector, {&unit, 1}, 1, out);
      const auto sent =
          std::size_t(std::count_if(out.values.begin(), out.values.end(), [](float v) { return v != 0; }));
      const auto real =
          std::size_t(std::count_if(out.indices.begin(), out.indices.end(), [](auto i) { return i != kEmptySlot; }));
      EXPECT_EQ(sent, real);
      EXPECT_LE(sent, nonzeros);
      EXPECT_TRUE(sent == nonzeros || !is_exact(selector));
    }
}

#ifndef THINWIRE_SMALL_TESTS
// A bound estimated from a sample is too high if the large values stand where the sample looks: then it must be lowered.
TEST(Select, IsExactWhenTheSampleLies) {
  constexpr std::size_t kNumel = 150'000;
  std::vector<float> values = make_values(Distribution::normal, kNumel, 5);
  const UnitSegment unit{values.data(), kNumel, 0};
  Selection selection;
  std::set<std::uint32_t> peeked;
  by_blocks(selection, TopK{0.01}, {&unit, 1}, 8, Side::both, &peeked);
  EXPECT_EQ(selection.fallbacks(), 0u);
  ASSERT_GT(peeked.size(), 1500u);
  ASSERT_LT(peeked.size(), kNumel / 2);
  for (const bool all_of_them : {false, true}) {
    float value = 100.0f;  // either just enough to lead the first bound astray, or each that is looked at
    std::size_t taken = 0;
    for (const std::uint32_t i : peeked)
      if (all_of_them || taken++ < 800) values[i] = value += 0.25f;
    const SparseGradient out = by_blocks(selection, TopK{0.01}, {&unit, 1}, 8);
    EXPECT_TRUE(same_entries(out, reference::top_k({&unit, 1}, 0.01)));
    EXPECT_GT(selection.fallbacks(), 0u);
  }
}
#endif

TEST(Select, SizesFollowDensity) {
  EXPECT_EQ(target_count(TopK{0.001}, 0), 0u);
  EXPECT_EQ(target_count(TopK{0.001}, 1), 1u);
  EXPECT_EQ(target_count(TopK{0.001}, 1499), 1u);
  EXPECT_EQ(target_count(TopK{0.001}, 1500), 2u);
  EXPECT_EQ(target_count(TrimmedTopK{0.1, 0.2}, 4097), 410u);
  EXPECT_EQ(target_count(HashedSlots{1.0}, 4097), 4097u);
  for (const std::size_t numel : kSizes)
    for (const double density : kDensities) {
      const std::size_t k = reference::target_count(density, numel);
      EXPECT_EQ(capacity(TopK{density}, numel), k);
      EXPECT_EQ(capacity(TrimmedTopK{density, 0.2}, numel), k);
      EXPECT_EQ(capacity(HashedSlots{density, HashedSlots::Layout::a}, numel), k);
      const std::size_t b = capacity(HashedSlots{density, HashedSlots::Layout::b}, numel);
      EXPECT_LE(b, static_cast<std::size_t>(std::ceil(1.25 * double(k))));
      EXPECT_GE(b, std::min(k + k / 4, numel));
    }
}

TEST(Select, PrintsAndCompares) {
  EXPECT_EQ(to_string(Selector(TopK{0.001})), "top_k(density=0.001)");
  EXPECT_EQ(to_string(Selector(TrimmedTopK{0.01, 0.25})), "trimmed_top_k(density=0.01, epsilon=0.25)");
  EXPECT_EQ(to_string(Selector(HashedSlots{0.001, HashedSlots::Layout::b, 0.01})),
            "hashed_slots(density=0.001, layout=b, sample_fraction=0.01)");
  EXPECT_EQ(to_string(Selector(HashedSlots{0.5, HashedSlots::Layout::a, 1.0})),
            "hashed_slots(density=0.5, layout=a, sample_fraction=1)");
  EXPECT_EQ(Selector(TopK{0.1}), Selector(TopK{0.1}));
  EXPECT_NE(Selector(TopK{0.1}), Selector(TopK{0.2}));
  EXPECT_NE(Selector(TopK{0.1}), Selector(TrimmedTopK{0.1}));
  EXPECT_EQ(density(Selector(HashedSlots{0.25})), 0.25);
}

TEST(Select, RefusesValuesOutOfRangeByName) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  std::vector<std::pair<Selector, std::string>> bad;
  for (const double density : {0.0, -0.1, 1.0001, nan, HUGE_VAL})
    for (const Selector& selector : selectors(density)) bad.emplace_back(selector, "density");
  for (const double epsilon : {0.0, 1.0, -0.2, nan}) bad.emplace_back(TrimmedTopK{0.01, epsilon}, "epsilon");
  for (const double fraction : {0.0, 1.5, -0.2, nan})
    bad.emplace_back(HashedSlots{0.01, HashedSlots::Layout::b, fraction}, "sample_fraction");
  const float value = 1.0f;
  const UnitSegment unit{&value, 1, 0};
  for (const auto& [selector, word] : bad) {
    SparseGradient out;
    EXPECT_TRUE(says(error_of([&, s = selector] { validate(s); }), ErrorCode::invalid_argument, {word}));
    EXPECT_TRUE(says(error_of([&, s = selector] {
                       select(s, {&unit, 1}, 0, out);
                     }),
                     ErrorCode::invalid_argument, {word}));
  }
  for (const Selector& selector : selectors(1.0)) EXPECT_NO_THROW(validate(selector));
}

}  // namespace
}  // namespace thinwire::test
