// residual.h, the bookkeeping: what settle takes, what undo brings back, what a checkpoint holds, what is refused.
#include <limits>

#include "cases.h"
#include "helpers.h"
#include "thinwire/residual.h"

namespace thinwire::test {
namespace {

const MomentumRule kMomentum{0.5f, false, true};

/// A bucket [a: 10 | b: 4100 | c: 7], of which a and c have momentum.
class Settle : public ::testing::Test {
 protected:
  void SetUp() override {
    residual.add({"a", 10}, kMomentum);
    residual.add({"b", 4100}, {});
    residual.add({"c", 7}, kMomentum);
    unit = {residual.segment("a", 10, 0), residual.segment("b", 4100, 10), residual.segment("c", 7, 4110)};
    accumulate(1);
  }
  void accumulate(std::uint32_t seed) {
    GradientBuffer gradient(make_values(Distribution::normal, 4117, seed));
    Residual::accumulate(unit, gradient.view());
  }
  float v(std::uint32_t index) const {
    if (index < 10) return residual.residual("a")[index];
    return index < 4110 ? residual.residual("b")[index - 10] : residual.residual("c")[index - 4110];
  }
  SparseGradient entries(std::vector<std::uint32_t> indices) const {
    SparseGradient out;
    for (const std::uint32_t index : indices) out.values.push_back(index == kEmptySlot ? 0.0f : v(index));
    out.indices = std::move(indices);
    return out;
  }
  ::testing::AssertionResult equals(const std::vector<ParameterState>& expected) const {
    const std::vector<ParameterState> actual = residual.state();
    if (actual.size() != expected.size()) return ::testing::AssertionFailure() << actual.size() << " parameters";
    for (std::size_t i = 0; i < actual.size(); ++i) {
      if (actual[i].name != expected[i].name) return ::testing::AssertionFailure() << "name " << actual[i].name;
      if (auto same = same_bits(actual[i].residual, expected[i].residual); !same)
        return same << " (residual of " << actual[i].name << ")";
      if (auto same = same_bits(actual[i].velocity, expected[i].velocity); !same)
        return same << " (velocity of " << actual[i].name << ")";
    }
    return ::testing::AssertionSuccess();
  }

  Residual residual;
  std::vector<Residual::Segment> unit;
};

TEST_F(Settle, SubtractsWhatWasSentAndNothingElse) {
  std::vector<ParameterState> expected = residual.state();
  SparseGradient sent = entries({0, 9, 10, 4109, 4110, 4116});
  sent.values[2] += 0.125f;  // as after a lossy coding: the difference stays
  expected[0].residual[0] = expected[0].residual[9] = 0;
  expected[1].residual[0] = expected[1].residual[0] - sent.values[2];
  expected[1].residual[4099] = 0;
  expected[2].residual[0] = expected[2].residual[6] = 0;
  residual.settle(unit, sent, false);
  EXPECT_TRUE(equals(expected));
  EXPECT_NE(v(10), 0.0f);
}

TEST_F(Settle, MaskingClearsTheVelocityOfSentEntriesOnly) {
  std::vector<ParameterState> expected = residual.state();
  residual.settle(unit, entries({3, 4112, 50}), true);
  expected[0].residual[3] = expected[0].velocity[3] = 0;
  expected[1].residual[40] = 0;
  expected[2].residual[2] = expected[2].velocity[2] = 0;
  EXPECT_TRUE(equals(expected));
}

TEST_F(Settle, SkipsFreeSlotsOfHashTables) {
  std::vector<ParameterState> expected = residual.state();
  SparseGradient sent = entries({4111, kEmptySlot, 2, kEmptySlot, 11});
  sent.hashed_order = true;
  residual.settle(unit, sent, false);
  expected[2].residual[1] = expected[0].residual[2] = expected[1].residual[1] = 0;
  EXPECT_TRUE(equals(expected));
}

TEST_F(Settle, DenseMovesTheWholeSegmentAndLeavesTheVelocity) {
  std::vector<ParameterState> expected = residual.state();
  GuardedBytes memory(10 * sizeof(float));
  const std::span<float> sent(reinterpret_cast<float*>(memory.bytes().data()), 10);
  residual.settle_dense(unit[0], sent);
  EXPECT_TRUE(same_bits(sent, expected[0].residual));
  EXPECT_TRUE(memory.intact());
  expected[0].residual.assign(10, 0.0f);
  EXPECT_TRUE(equals(expected));
}

TEST_F(Settle, UndoBringsBackEverySendOfTheStep) {
  const std::vector<ParameterState> before = residual.state();
  std::vector<float> dense_a(10), dense_c(7);
  residual.settle(unit, entries({1, 2, 3, 500, 4113}), true);
  residual.settle(unit, entries({2, 3, 4, 500, 600}), true);  // some of them once more
  residual.settle_dense(unit[0], dense_a);                    // and again
  residual.settle(std::span(unit).subspan(1, 1), entries({77, 4109}), false);
  residual.settle_dense(unit[2], dense_c);
  EXPECT_FALSE(equals(before));
  residual.undo();
  EXPECT_TRUE(equals(before));
  residual.undo();
  EXPECT_TRUE(equals(before)) << "a second undo has nothing to undo";
}

TEST_F(Settle, UndoKeepsTheSignOfZeroAndWhatCameInSince) {
  Residual other;
  other.add({"z", 3}, {0.0f, false, false});
  const Residual::Segment z = other.segment("z", 3, 0);
  GradientBuffer gradient(std::vector<float>{-0.0f, 0.0f, 1.0f});
  Residual::accumulate({&z, 1}, gradient.view());
  std::vector<float> sent(3);
  other.settle_dense(z, sent);
  EXPECT_TRUE(same_bits(other.residual("z"), std::vector<float>{0.0f, 0.0f, 0.0f}));
  other.undo();
  EXPECT_TRUE(same_bits(other.residual("z"), std::vector<float>{-0.0f, 0.0f, 1.0f}));
}

TEST_F(Settle, CommitMakesSendsFinal) {
  residual.settle(unit, entries({1, 2, 4113}), true);
  residual.commit();
  const std::vector<ParameterState> after = residual.state();
  residual.undo();
  EXPECT_TRUE(equals(after));
  residual.settle(unit, entries({5}), true);
  residual.undo();
  EXPECT_TRUE(equals(after)) << "only the sends after the commit are undone";
}

TEST_F(Settle, RefusesIndicesOutsideTheUnitBeforeAnythingChanges) {
  const std::vector<ParameterState> before = residual.state();
  const std::vector<Residual::Segment> ends = {unit[0], unit[2]};
  for (const auto& [where, index] : std::vector<std::pair<std::vector<Residual::Segment>, std::uint32_t>>{
           {unit, 4117}, {ends, 10}, {ends, 4109}, {{unit[1]}, 9}, {{unit[1]}, 4110}, {unit, 0xFFFFFFFEu}}) {
    SparseGradient sent{{3, index}, {0.5f, 0.25f}};
    if (where.size() == 1) sent.indices[0] = 20;
    EXPECT_TRUE(says(error_of([&] { residual.settle(where, sent, true); }), ErrorCode::invalid_argument,
                     {std::to_string(index)}));
    EXPECT_TRUE(equals(before));
  }
  residual.undo();
  EXPECT_TRUE(equals(before));
}

TEST_F(Settle, RestorePutsASegmentBackAndStrikesItsSends) {
  const std::vector<ParameterState> before = residual.state();
  residual.remember(unit[0]);
  residual.remember(unit[1]);
  accumulate(2);
  const std::vector<ParameterState> accumulated = residual.state();
  residual.settle(unit, entries({2, 100, 4111}), true);
  residual.restore(unit[0]);

  std::vector<ParameterState> expected = accumulated;
  expected[0] = before[0];
  expected[1].residual[90] = 0;
  expected[2].residual[1] = expected[2].velocity[1] = 0;
  EXPECT_TRUE(equals(expected));

  residual.undo();  // the sends of b and c; a has none any more
  expected = accumulated;
  expected[0] = before[0];
  EXPECT_TRUE(equals(expected));
}

TEST_F(Settle, RestoreAfterADenseSend) {
  const std::vector<ParameterState> before = residual.state();
  residual.remember(unit[2]);
  accumulate(2);
  std::vector<ParameterState> expected = residual.state();
  std::vector<float> sent(7);
  residual.settle_dense(unit[2], sent);
  residual.restore(unit[2]);
  expected[2] = before[2];
  EXPECT_TRUE(equals(expected));
  residual.undo();
  EXPECT_TRUE(equals(expected));
}

TEST_F(Settle, StateComesBackByName) {
  const std::vector<ParameterState> saved = residual.state();
  ASSERT_EQ(saved.size(), 3u);
  EXPECT_EQ(saved[1].name, "b");
  EXPECT_TRUE(saved[1].velocity.empty());
  EXPECT_EQ(saved[2].velocity.size(), 7u);
  accumulate(3);
  EXPECT_FALSE(equals(saved));
  residual.load(std::vector<ParameterState>{saved[2], saved[0], saved[1]});
  EXPECT_TRUE(equals(saved));
  EXPECT_EQ(Residual::view(unit[1]).values, residual.residual("b").data()) << "segments stay good";
}

TEST_F(Settle, LoadRefusesABadStateAndChangesNothing) {
  const std::vector<ParameterState> good = residual.state();
  accumulate(4);
  const std::vector<ParameterState> before = residual.state();
  const auto refuses = [&](const std::function<void(std::vector<ParameterState>&)>& spoil, const std::string& word) {
    std::vector<ParameterState> states = good;
    spoil(states);
    EXPECT_TRUE(says(error_of([&] { residual.load(states); }), ErrorCode::invalid_argument, {word}));
    EXPECT_TRUE(equals(before)) << "after refusing for " << word;
  };
  refuses([](auto& s) { s[2].name = "stranger"; }, "stranger");
  refuses([](auto& s) { s.push_back({"stranger", {1.0f}, {}}); }, "stranger");
  refuses([](auto& s) { s.pop_back(); }, "'c'");
  refuses([](auto& s) { s.push_back(s[1]); }, "'b'");
  refuses([](auto& s) { s[2] = s[0]; }, "'a'");
  refuses([](auto& s) { s[1].residual.pop_back(); }, "'b'");
  refuses([](auto& s) { s[2].velocity.push_back(0.0f); }, "'c'");
  refuses([](auto& s) { s[2].velocity.clear(); }, "'c'");
  refuses([](auto& s) { s[1].velocity.resize(4100); }, "'b'");
  refuses([](auto& s) { s[1].residual[4099] = std::numeric_limits<float>::quiet_NaN(); }, "'b'");
  refuses([](auto& s) { s[2].velocity[6] = -std::numeric_limits<float>::infinity(); }, "'c'");
}

TEST_F(Settle, MovesWithItsSegments) {
  const std::vector<ParameterState> before = residual.state();
  residual.settle(unit, entries({1}), true);
  Residual other = std::move(residual);
  other.undo();
  residual = std::move(other);
  EXPECT_TRUE(equals(before));
  EXPECT_EQ(Residual::view(unit[0]).values, residual.residual("a").data());
}

TEST(Add, StartsAtZeroAndMayBeRepeated) {
  Residual residual;
  EXPECT_FALSE(residual.contains("w"));
  residual.add({"w", 5}, kMomentum);
  residual.add({"w", 5}, kMomentum);
  residual.add({"", 0}, {});
  EXPECT_TRUE(residual.contains("w"));
  EXPECT_TRUE(residual.contains(""));
  EXPECT_FALSE(residual.contains("W"));
  EXPECT_TRUE(same_bits(residual.residual("w"), std::vector<float>(5, 0.0f)));
  EXPECT_TRUE(same_bits(residual.velocity("w"), std::vector<float>(5, 0.0f)));
  EXPECT_EQ(residual.state().size(), 2u);
}

TEST(Add, RefusesContradictionsAndBadRules) {
  Residual residual;
  residual.add({"w", 5}, kMomentum);
  const auto refuses = [&](const Parameter& parameter, const MomentumRule& rule, const std::string& word) {
    EXPECT_TRUE(says(error_of([&] { residual.add(parameter, rule); }), ErrorCode::invalid_argument, {word}));
    EXPECT_EQ(residual.state().size(), 1u);
  };
  refuses({"w", 6}, kMomentum, "'w'");
  refuses({"w", 5}, {0.25f, false, true}, "'w'");
  refuses({"w", 5}, {0.5f, true, true}, "'w'");
  refuses({"x", 5}, {1.0f, false, true}, "momentum");
  refuses({"x", 5}, {-0.1f, false, true}, "momentum");
  refuses({"x", 5}, {std::numeric_limits<float>::quiet_NaN(), false, true}, "momentum");
  refuses({"x", 5}, {0.0f, true, true}, "esterov");
  refuses({"x", 5}, {0.5f, false, false}, "feedback");
}

TEST(Segment, RefusesUnknownNamesAndSizes) {
  Residual residual;
  residual.add({"w", 5}, {});
  EXPECT_TRUE(says(error_of([&] { residual.segment("v", 5, 0); }), ErrorCode::invalid_argument, {"'v'"}));
  EXPECT_TRUE(says(error_of([&] { residual.segment("w", 4, 0); }), ErrorCode::invalid_argument, {"'w'", "4", "5"}));
  EXPECT_TRUE(says(error_of([&] { residual.residual("v"); }), ErrorCode::invalid_argument, {"'v'"}));
  EXPECT_TRUE(says(error_of([&] { residual.velocity("v"); }), ErrorCode::invalid_argument, {"'v'"}));
}

}  // namespace
}  // namespace thinwire::test
