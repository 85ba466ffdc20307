// codec.h, values: what rounding makes of them, on the wire and back.
#include <cmath>
#include <limits>
#include <optional>
#include <random>

#include "cases.h"
#include "reference/residual.h"
#include "round_trip.h"

namespace thinwire::test {
namespace {

/// Rounded as the format says; what is lost is exact; twice is once.
void expect_rounds(ValueCoding coding, const std::vector<float>& values) {
  std::vector<float> rounded = values;
  round_values(coding, rounded);
  ASSERT_TRUE(same_bits(rounded, reference::received(coding, values)));
  for (std::size_t i = 0; i < values.size(); ++i) {
    ASSERT_TRUE(std::isfinite(rounded[i])) << values[i];
    const float rest = reference::add(values[i], -rounded[i]);
    ASSERT_EQ(bits_of(reference::add(rest, rounded[i])), bits_of(values[i])) << values[i] << " became " << rounded[i];
  }
  std::vector<float> again = rounded;
  round_values(coding, again);
  ASSERT_TRUE(same_bits(again, rounded));
  std::vector<std::uint32_t> indices(values.size());
  for (std::uint32_t i = 0; i < indices.size(); ++i) indices[i] = 2 * i;
  for (const IndexCoding index_coding : {IndexCoding::raw_u32, IndexCoding::elias_fano})
    expect_round_trip({index_coding, coding}, 0, 2 * std::uint32_t(values.size()) + 1, indices, rounded);
}

/// All of one binary exponent or of all, every bit random; finite and not zero.
std::vector<float> random_bits(std::size_t count, std::uint32_t seed, int exponent = -1) {
  std::mt19937 random(seed);
  std::vector<float> values;
  while (values.size() < count) {
    std::uint32_t bits = random();
    if (exponent >= 0) bits = (bits & 0x807fffffu) | std::uint32_t(exponent) << 23;
    const float value = std::bit_cast<float>(bits);
    if (std::isfinite(value) && value != 0) values.push_back(value);
  }
  return values;
}

TEST(Values, RoundToWhatTheFormatHolds) {
  constexpr float kMax = std::numeric_limits<float>::max();
  for (const ValueCoding coding : {ValueCoding::f32, ValueCoding::bf16, ValueCoding::f16}) {
    expect_rounds(coding, {});
    for (const float value :
         {1.0f,     0x1p-149f,   0x1.8p-148f,     0x1.ffffffp-127f, 0x1p-126f,       0x1.00001p-126f, kMax,
          -kMax,    0x1.fep127f, 0x1.fefffep127f, 0x1.ffp127f,      0x1.ffdffep127f, 0x1.ffep127f,    65504.0f,
          65519.0f, 65520.0f,    131008.0f,       1e-30f,           -3e38f,          0x1.ffep14f,     0x1.fffffep14f}) {
      expect_rounds(coding, {value});
      expect_rounds(coding, {value, 1.0f, -0x1p-149f});  // next to smaller ones
      expect_rounds(coding, {-kMax, value});
      expect_rounds(coding, {value, 0x1.8p-14f, 0x1.004p-14f, 0x1.ffep-15f, 0x1p-24f, 0x1.8p-24f, 0x1p-25f,
                             0x1.000002p-25f, 1024.0f});
    }
    for (int exponent = 0; exponent < 255; ++exponent)
      expect_rounds(coding, random_bits(40, 10 + std::uint32_t(exponent), exponent));
    for (std::uint32_t seed = 0; seed < 50; ++seed) expect_rounds(coding, random_bits(1 + seed * 7, seed));
    for (const Distribution distribution : kDistributions)
      if (distribution != Distribution::all_zero && distribution != Distribution::one_hot)
        expect_rounds(coding, make_values(distribution, 1000, 3));
  }
}

// Ties go to even, and beside a large value a tiny one vanishes and stays in the residual.
TEST(Values, RoundToNearest) {
  std::vector<float> values = {1.00390625f, 1.01171875f, -1.003907f};
  round_values(ValueCoding::bf16, values);
  EXPECT_TRUE(same_bits(values, std::vector<float>{1.0f, 1.015625f, -1.0078125f}));
  values = {0x1p100f, 0x1p61f, 0x1p62f};
  round_values(ValueCoding::f16, values);
  EXPECT_TRUE(same_bits(values, std::vector<float>{0x1p100f, 0.0f, 0x1p62f}));
  values = {std::numeric_limits<float>::max(), -0x1.ffp127f};
  round_values(ValueCoding::bf16, values);
  EXPECT_TRUE(same_bits(values, std::vector<float>{0x1.fep127f, -0x1.fep127f}));
}

TEST(Values, ShareOneMean) {
  for (const Distribution distribution : kDistributions)
    for (const std::size_t count : {0, 1, 2, 15, 16, 17, 1000, 4096, 4097, 10'000}) {
      const std::vector<float> values = make_values(distribution, count, 5);
      std::vector<float> shared = values;
      round_values(ValueCoding::shared_mean, shared);
      ASSERT_TRUE(same_bits(shared, reference::received(ValueCoding::shared_mean, values))) << count;
      double sum = 0;
      for (const float value : values) sum += value;
      if (count > 0) {
        EXPECT_NEAR(shared.back(), sum / double(count), 1e-6 * std::fabs(sum)) << count;
      }
      std::vector<float> again = shared;
      round_values(ValueCoding::shared_mean, again);
      ASSERT_TRUE(same_bits(again, shared)) << count;
      std::vector<std::uint32_t> indices(count);
      for (std::uint32_t i = 0; i < count; ++i) indices[i] = 3 * i;
      for (const IndexCoding index_coding : {IndexCoding::raw_u32, IndexCoding::elias_fano})
        expect_round_trip({index_coding, ValueCoding::shared_mean}, 0, 3 * std::uint32_t(count) + 1, indices, shared);
    }
  std::vector<float> largest(5000, std::numeric_limits<float>::max());
  round_values(ValueCoding::shared_mean, largest);
  EXPECT_EQ(largest.front(), std::numeric_limits<float>::max());
}

// A section costs its indices and four bytes.
TEST(Values, AMeanCostsFourBytes) {
  const SectionShape shape{.dense = false, .capacity = 1000, .extent = 5000};
  const auto bound = [&](ValueCoding values) { return payload_bound({IndexCoding::raw_u32, values}, 1, {&shape, 1}); };
  EXPECT_EQ(bound(ValueCoding::f32) - bound(ValueCoding::shared_mean), 4000u);  // rounded up to 8
}

TEST(Codec, SharedMeanRefusesFreeSlots) {
  Example example;
  example.owned = {hashed_section(0, 40, 7, 8, {1, 9})};
  example.codec = {IndexCoding::raw_u32, ValueCoding::shared_mean};
  EXPECT_THROW(encoded(example, 4096), Error);
}

TEST(Values, AreTheSameOnEveryTarget) {
  for (const Codec& codec : kCodecs) {
    std::optional<reference::Bytes> first;
    on_every_target([&] {
      Example example;
      std::vector<std::uint32_t> indices(1003);
      for (std::uint32_t i = 0; i < indices.size(); ++i) indices[i] = i * i;
      std::vector<float> values = random_bits(indices.size(), 9);
      round_values(codec.values, values);
      example.owned = {sparse_section(0, 1003 * 1003, indices, values)};
      example.codec = codec;
      const reference::Bytes bytes = encoded(example, 1 << 14);
      if (!first) first = bytes;
      ASSERT_EQ(bytes, *first);
    });
  }
}

}  // namespace
}  // namespace thinwire::test
