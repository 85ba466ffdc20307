// select.h, HashedSlots: how many candidates survive the slots, and that no pair collides for ever.
#include <set>

#include "cases.h"
#include "helpers.h"
#include "reference/selection.h"
#include "thinwire/select.h"

namespace thinwire::test {
namespace {

std::size_t kept(const SparseGradient& out) {
  return out.nnz() - std::size_t(std::count(out.indices.begin(), out.indices.end(), kEmptySlot));
}

#ifndef THINWIRE_SMALL_TESTS
// l candidates in S slots leave S(1-(1-1/S)^l) of them, on the average over seeds within 2 %.
TEST(HashedSlots, KeepsTheExpectedShareOfItsCandidates) {
  const std::vector<float> values = make_values(Distribution::normal, 100'003, 77);
  const UnitSegment unit{values.data(), values.size(), 0};
  for (const auto layout : {HashedSlots::Layout::a, HashedSlots::Layout::b})
    for (const double density : {0.002, 0.01}) {
      const HashedSlots how{density, layout, 0.01};
      const auto slots =
          double(reference::target_count(density, values.size())) * (layout == HashedSlots::Layout::a ? 1 : 4);
      double expected = 0, actual = 0;
      for (std::uint32_t seed = 0; seed < 20; ++seed) {
        SparseGradient out;
        select(how, {&unit, 1}, seed, out);
        const auto candidates = double(reference::hashed_candidates(how, {&unit, 1}, seed).size());
        expected += slots * (1 - std::pow(1 - 1 / slots, candidates));
        actual += double(kept(out));
      }
      EXPECT_NEAR(actual / expected, 1.0, 0.02) << to_string(Selector(how));
    }
}

// The budget of papers.md at rank k in 4k slots and at rank 2k in k slots: 0.885k and 0.865k useful entries.
TEST(HashedSlots, UsesMostOfItsBudget) {
  const std::vector<float> values = make_values(Distribution::laplace, 100'003, 78);
  const UnitSegment unit{values.data(), values.size(), 0};
  for (const auto& [layout, share] :
       {std::pair{HashedSlots::Layout::a, 0.865}, std::pair{HashedSlots::Layout::b, 0.885}}) {
    double sum = 0;
    for (std::uint32_t seed = 0; seed < 20; ++seed) {
      SparseGradient out;
      select(HashedSlots{0.01, layout, 1.0}, {&unit, 1}, seed, out);
      sum += double(kept(out)) / 1000.0 / 20;
    }
    EXPECT_NEAR(sum, share, 0.01);
  }
}
#endif

// Large values wherever the sample does not look: far more candidates than slots, and the largest of the winners are kept.
TEST(HashedSlots, IsCutToItsCapacityWhenTheSampleLies) {
  constexpr std::size_t kNumel = 30'011;
  constexpr std::uint32_t kSeed = 6;
  std::vector<float> values = make_values(Distribution::normal, kNumel, 79);
  for (std::size_t i = 0; i < kNumel; ++i) values[i] = std::copysign(10.0f + std::fabs(values[i]), values[i]);
  for (std::uint32_t i = 0; i < 3202; ++i)  // ceil(64 · 30011 / 600) samples for k = 600
    values[reference::draw(reference::hash_counter(i, kSeed ^ 0x9E3779B9u), kNumel)] = 0.25f + float(i) / 8192;
  const UnitSegment unit{values.data(), values.size(), 0};
  const HashedSlots how{0.02, HashedSlots::Layout::b, 0.01};
  ASSERT_GT(reference::hashed_candidates(how, {&unit, 1}, kSeed).size(), 20'000u);
  SparseGradient out;
  select(how, {&unit, 1}, kSeed, out);
  EXPECT_EQ(out.nnz(), 750u);  // 1.25 k
  EXPECT_EQ(out.indices, reference::hashed_slots(how, {&unit, 1}, kSeed).indices);
}

// In one slot with all others, only the largest is sent; with another seed other rivals meet.
TEST(HashedSlots, LosersMeetOtherRivalsWithTheNextSeed) {
  std::vector<float> values(400);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = float(i + 1) * (i % 3 == 0 ? -1.0f : 1.0f);
  const UnitSegment unit{values.data(), values.size(), 100};
  std::set<std::uint32_t> ever_sent;
  for (std::uint32_t seed = 0; seed < 40; ++seed) {
    SparseGradient out;
    select(HashedSlots{1.0, HashedSlots::Layout::a, 0.01}, {&unit, 1}, seed, out);
    ever_sent.insert(out.indices.begin(), out.indices.end());
    EXPECT_LT(kept(out), 300u);
    EXPECT_GT(kept(out), 200u);
  }
  ever_sent.erase(kEmptySlot);
  EXPECT_EQ(ever_sent.size(), 400u);
  EXPECT_EQ(*ever_sent.begin(), 100u);
  EXPECT_EQ(*ever_sent.rbegin(), 499u);
}

// Layout A says where each entry lies; the hash counts from the unit's first offset.
TEST(HashedSlots, EntriesLieInTheirSlots) {
  const std::vector<float> values = make_values(Distribution::normal, 4097, 80);
  for (const std::uint32_t offset : {0u, 17u}) {
    const UnitSegment unit{values.data(), values.size(), offset};
    SparseGradient out;
    select(HashedSlots{0.1, HashedSlots::Layout::a, 0.01}, {&unit, 1}, 0xABCDEF01u, out);
    ASSERT_EQ(out.nnz(), 410u);
    EXPECT_TRUE(out.hashed_order);
    EXPECT_EQ(out.hash_seed, 0xABCDEF01u);
    for (std::uint32_t slot = 0; slot < 410; ++slot) {
      if (out.indices[slot] == kEmptySlot) {
        EXPECT_EQ(bits_of(out.values[slot]), 0u);
        continue;
      }
      EXPECT_EQ(reference::draw(reference::hash_counter(out.indices[slot] - offset, 0xABCDEF01u), 410), slot);
      EXPECT_EQ(out.values[slot], values[out.indices[slot] - offset]);
    }
  }
}

}  // namespace
}  // namespace thinwire::test
