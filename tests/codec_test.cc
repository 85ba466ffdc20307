// codec.h: payloads are the bytes that the format document describes, and come back as what went in.
#include "thinwire/codec.h"

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <optional>
#include <random>

#include "cases.h"
#include "codec/elias_fano.h"
#include "helpers.h"
#include "payloads.h"
#include "reference/residual.h"

namespace thinwire::test {
namespace {

std::filesystem::path golden_path(const std::string& name) {
  return std::filesystem::path(THINWIRE_TEST_DIR) / "golden" / (name + ".bin");
}

reference::Bytes read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file.good()) << path;
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const auto* data = reinterpret_cast<const std::byte*>(text.data());
  return {data, data + text.size()};
}

reference::Bytes encoded(const Example& example, std::size_t block) {
  reference::Bytes out(block, std::byte{0xEE});
  const std::size_t used = encode(example.codec, example.header, example.has_gradient, example.sections(), out);
  EXPECT_LE(used, block);
  for (std::size_t i = used; i < block; ++i) EXPECT_EQ(out[i], std::byte{0}) << "the rest of the block at " << i;
  out.resize(used);
  return out;
}

void expect_same_header(const PayloadHeader& a, const PayloadHeader& b) {
  EXPECT_EQ(a.flags, b.flags);
  EXPECT_EQ(a.step, b.step);
  EXPECT_EQ(a.job, b.job);
  EXPECT_EQ(a.slices, b.slices);
  EXPECT_EQ(a.options_hash, b.options_hash);
  EXPECT_EQ(a.layout_hash, b.layout_hash);
  EXPECT_EQ(a.block_bytes, b.block_bytes);
  EXPECT_EQ(a.non_finite, b.non_finite);
}

void expect_same_sections(const std::vector<Section>& actual, const std::vector<Section>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    ASSERT_EQ(actual[i].index(), expected[i].index()) << "section " << i;
    if (const auto* dense = std::get_if<DenseSection>(&expected[i])) {
      EXPECT_EQ(std::get<DenseSection>(actual[i]).begin, dense->begin);
      EXPECT_TRUE(same_bits(std::get<DenseSection>(actual[i]).values, dense->values));
      continue;
    }
    const auto& a = std::get<SparseSection>(actual[i]);
    const auto& e = std::get<SparseSection>(expected[i]);
    EXPECT_EQ(a.begin, e.begin);
    EXPECT_EQ(a.extent, e.extent);
    EXPECT_EQ(a.hashed_order, e.hashed_order);
    EXPECT_EQ(a.hash_seed, e.hash_seed);
    EXPECT_TRUE(std::equal(a.indices.begin(), a.indices.end(), e.indices.begin(), e.indices.end()));
    EXPECT_TRUE(same_bits(a.values, e.values));
  }
}

/// The oracle reads the same from the bytes.
void expect_reads_as(const reference::Bytes& bytes, const std::vector<Section>& expected) {
  const std::vector<reference::ReadSection> actual = reference::read_sections(bytes);
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const bool dense = std::holds_alternative<DenseSection>(expected[i]);
    ASSERT_EQ(actual[i].kind, dense ? 0u : 1u) << "section " << i;
    if (dense) {
      EXPECT_EQ(actual[i].begin, std::get<DenseSection>(expected[i]).begin);
      EXPECT_TRUE(same_bits(actual[i].values, std::get<DenseSection>(expected[i]).values));
      continue;
    }
    const auto& e = std::get<SparseSection>(expected[i]);
    EXPECT_EQ(actual[i].begin, e.begin);
    EXPECT_EQ(actual[i].extent, e.extent);
    EXPECT_EQ(actual[i].hashed_order, e.hashed_order ? 1u : 0u);
    EXPECT_EQ(actual[i].hash_seed, e.hash_seed);
    EXPECT_TRUE(std::equal(actual[i].indices.begin(), actual[i].indices.end(), e.indices.begin(), e.indices.end()));
    EXPECT_TRUE(same_bits(actual[i].values, e.values));
  }
}

// THINWIRE_WRITE_GOLDEN=1 writes the files anew, from the format document's bytes and not from the encoder's.
TEST(Golden, FilesAreWhatTheFormatSays) {
  for (const Example& example : examples()) {
    SCOPED_TRACE(example.name);
    const reference::Bytes expected = example.bytes();
    if (std::getenv("THINWIRE_WRITE_GOLDEN") != nullptr) {
      std::ofstream file(golden_path(example.name), std::ios::binary);
      file.write(reinterpret_cast<const char*>(expected.data()), std::streamsize(expected.size()));
    }
    const reference::Bytes golden = read_file(golden_path(example.name));
    EXPECT_EQ(golden, expected);
    EXPECT_EQ(encoded(example, golden.size() + 24), golden);
    const Payload payload = validate(golden, example.numel);
    expect_same_header(payload.header, example.header);
    if (example.header.flags == 0) {
      EXPECT_EQ(payload.has_gradient, example.has_gradient);
      expect_same_sections(payload.sections, example.sections());
      expect_reads_as(golden, example.sections());
    } else {
      EXPECT_TRUE(payload.has_gradient.empty());
      EXPECT_TRUE(payload.sections.empty());
    }
    expect_same_header(read_header(golden), example.header);
  }
}

std::size_t bound_of(const Example& example) {
  std::vector<SectionShape> shapes;
  for (const OwnedSection& s : example.owned) shapes.push_back({s.dense, s.values.size(), s.extent});
  return payload_bound(example.codec, example.header.slices, shapes);
}

TEST(Codec, RoundTripsRandomPayloads) {
  for (const Codec& codec : kCodecs)
    for (std::uint32_t seed = 0; seed < 200; ++seed) {
      SCOPED_TRACE(to_string(codec) + ", seed " + std::to_string(seed));
      const Example example = random_example(seed, codec);
      const reference::Bytes bytes = encoded(example, bound_of(example));
      EXPECT_EQ(bytes, example.bytes());
      const Payload payload = validate(bytes, example.numel);
      expect_same_header(payload.header, example.header);
      EXPECT_EQ(payload.has_gradient, example.has_gradient);
      expect_same_sections(payload.sections, example.sections());
      expect_reads_as(bytes, example.sections());
    }
}

/// A payload of one section comes back from encoder, decoder and oracle, and fits its bound.
void expect_round_trip(const Codec& codec, std::uint32_t begin, std::uint32_t extent,
                       const std::vector<std::uint32_t>& indices, const std::vector<float>& values) {
  SCOPED_TRACE(to_string(codec) + ", " + std::to_string(indices.size()) + " of " + std::to_string(extent) + " from " +
               std::to_string(begin));
  Example example;
  example.numel = std::size_t{begin} + extent;
  example.header.slices = 1;
  example.has_gradient = {true};
  example.codec = codec;
  example.owned = {sparse_section(begin, extent, indices, reference::received(codec.values, values))};
  const reference::Bytes bytes = encoded(example, bound_of(example));
  ASSERT_TRUE(bytes == example.bytes()) << "not the bytes of the format";
  expect_same_sections(validate(bytes, example.numel).sections, example.sections());
  expect_reads_as(bytes, example.sections());
}

std::vector<float> some_values(std::size_t count, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> values(count);
  for (float& value : values) value = float(int(random() % 20001) - 10000) / 64;
  return values;
}

TEST(Codec, RoundTripsSupportsOfEveryKind) {
  for (const std::uint32_t extent : {1u, 2u, 31u, 32u, 33u, 63u, 64u, 65u, 127u, 1000u, (1u << 20) - 1, 1u << 20,
                                     (1u << 20) + 1, 0x7fffffffu, 0x80000000u, 0xfffffff0u}) {
    const std::uint32_t begin = extent % 13;
    std::vector<std::vector<std::uint32_t>> supports = {{}, {begin}, {begin + extent - 1}};
    const std::uint32_t some = std::min(extent, 1000u);
    std::vector<std::uint32_t> first, last, even;
    for (std::uint32_t i = 0; i < some; ++i) {
      first.push_back(begin + i);
      last.push_back(begin + extent - some + i);
      even.push_back(begin + std::uint32_t(std::uint64_t{extent} * i / some));
    }
    supports.insert(supports.end(), {first, last, even});
    if (extent > 1) supports.push_back({begin, begin + extent - 1});
    if (extent > 1000 && extent <= 1u << 20) {  // all of them
      for (std::uint32_t i = some; i < extent; ++i) first.push_back(begin + i);
      supports.push_back(first);
    }
    for (const std::vector<std::uint32_t>& support : supports)
      for (const ValueCoding values : {ValueCoding::f32, ValueCoding::f16})
        expect_round_trip({IndexCoding::elias_fano, values}, begin, extent, support,
                          some_values(support.size(), extent));
  }
}

TEST(Codec, EliasFanoFitsTheBoundOfEveryCapacity) {
  const Codec codec{IndexCoding::elias_fano, ValueCoding::f32};
  for (std::uint32_t extent = 0; extent <= 150; ++extent) {
    std::size_t largest = 0;
    for (std::uint32_t count = 0; count <= extent; ++count) {
      std::vector<std::uint32_t> indices(count);
      for (std::uint32_t i = 0; i < count; ++i) indices[i] = extent - count + i;
      const std::vector<float> values(count, 1.0f);
      const Section section = SparseSection{0, extent, false, 0, indices, values};
      std::vector<std::byte> out(4096);
      PayloadHeader header;
      largest = std::max(largest, encode(codec, header, {}, {&section, 1}, out));
      const SectionShape shape{false, count, extent};
      ASSERT_LE(largest, payload_bound(codec, 0, {&shape, 1})) << "up to " << count << " of " << extent;
    }
  }
}

TEST(Codec, EliasFanoSizeNeverFallsWithTheCount) {
  for (std::size_t extent = 1; extent <= 600; ++extent)
    for (std::size_t count = 0; count < extent; ++count)
      ASSERT_LE(elias_fano_bytes(extent, count), elias_fano_bytes(extent, count + 1)) << count << " of " << extent;
  std::mt19937_64 random(5);
  for (int round = 0; round < 200'000; ++round) {
    const std::size_t extent = 2 + random() % ((std::uint64_t{1} << (1 + random() % 32)) - 1);
    const std::size_t power = std::size_t{1} << random() % 32;  // just below and above these the low bits change
    const std::size_t count =
        std::min(extent - 1, round % 2 == 0 ? random() % extent : extent / power - random() % 2 * (extent >= power));
    ASSERT_LE(elias_fano_bytes(extent, count), elias_fano_bytes(extent, count + 1)) << count << " of " << extent;
  }
}

TEST(Codec, EliasFanoChoosesTheBestNumberOfLowBits) {
  for (std::size_t extent = 1; extent <= 300; ++extent)
    for (std::size_t count = 1; count <= extent; ++count) {
      const auto bits = [&](unsigned low) { return count + ((extent - 1) >> low) + low * count; };
      const unsigned chosen = elias_fano_low_bits(extent, count);
      EXPECT_EQ(chosen, reference::low_bits(extent, count));
      for (unsigned low = 0; low < 9; ++low) ASSERT_LE(bits(chosen), bits(low)) << count << " of " << extent;
    }
}

// log2 C(n, k) / k bits are what an index costs at best.
TEST(Codec, EliasFanoIsWithinSevenPercentOfEntropy) {
  constexpr std::size_t kNumel = 16u << 20;
  for (const double density : {0.001, 0.0013, 0.002, 0.003, 0.005, 0.0078, 0.01}) {
    const auto count = static_cast<std::size_t>(density * double(kNumel));
    double entropy = 0;
    for (std::size_t i = 0; i < count; ++i) entropy += std::log2(double(kNumel - i) / double(i + 1));
    const double spent = 8.0 * double(elias_fano_bytes(kNumel, count));
    EXPECT_LT(spent, 1.07 * entropy) << "at density " << density;
    EXPECT_GT(spent, entropy);
    RecordProperty("bits_per_entry_at_" + std::to_string(density), std::to_string(spent / double(count)));
  }
}

TEST(Codec, EliasFanoRefusesWhatDoesNotAscendInsideItsUnit) {
  const Codec codec{IndexCoding::elias_fano, ValueCoding::f32};
  const auto error = [&](const OwnedSection& owned) {
    Example example;
    example.owned = {owned};
    std::vector<std::byte> out(4096);
    return error_of([&] { encode(codec, {}, {}, example.sections(), out); });
  };
  const std::vector<float> two = {1.0f, 2.0f};
  for (const std::vector<std::uint32_t>& indices : {std::vector<std::uint32_t>{5, 5}, {6, 5}, {3, 5}, {5, 24}})
    EXPECT_TRUE(
        says(error(sparse_section(4, 20, indices, two)), ErrorCode::invalid_argument, {"elias_fano", "ascend"}));
  EXPECT_TRUE(says(error(hashed_section(4, 36, 77, 8, {4, 11})), ErrorCode::invalid_argument, {"hashed order"}));
}

// ---- values ----------------------------------------------------------------------------------------------------------

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

// ---- bounds and blocks -----------------------------------------------------------------------------------------------

TEST(Codec, BoundIsHeaderBitsAndSectionsRoundedUpToEight) {
  EXPECT_EQ(payload_bound({}, 0, {}), 64u);
  EXPECT_EQ(payload_bound({}, 1, {}), 72u);  // 64 + 4
  EXPECT_EQ(payload_bound({}, 32, {}), 72u);
  EXPECT_EQ(payload_bound({}, 33, {}), 72u);  // 64 + 8
  EXPECT_EQ(payload_bound({}, 65, {}), 80u);  // 64 + 12
  const std::vector<SectionShape> shapes = {{true, 5}, {false, 0}, {false, 7}};
  EXPECT_EQ(payload_bound({}, 3, shapes), 240u);  // 64 + 4 + (32 + 20) + 32 + (32 + 56)
  const Codec coded{IndexCoding::elias_fano, ValueCoding::bf16};
  const std::vector<SectionShape> coded_shapes = {{true, 5}, {false, 0, 50}, {false, 7, 100}};
  EXPECT_EQ(payload_bound(coded, 3, coded_shapes), 208u);  // 64 + 4 + (32 + 20) + 32 + (32 + 8 + 16)
  EXPECT_EQ(to_string(Codec{}), "raw_u32 x f32");
  EXPECT_EQ(to_string(coded), "elias_fano x bf16");
  EXPECT_EQ(to_string(Codec{IndexCoding::raw_u32, ValueCoding::f16}), "raw_u32 x f16");
}

TEST(Codec, RefusesABlockThatIsTooSmall) {
  for (const Example& example : examples()) {
    const std::size_t needed = example.bytes().size();
    GuardedBytes out(needed - 4);
    EXPECT_TRUE(says(
        error_of([&] { encode(example.codec, example.header, example.has_gradient, example.sections(), out.bytes()); }),
        ErrorCode::invalid_argument, {std::to_string(needed), std::to_string(needed - 4)}));
    EXPECT_TRUE(out.intact());
    GuardedBytes exact(needed);
    EXPECT_EQ(encode(example.codec, example.header, example.has_gradient, example.sections(), exact.bytes()), needed);
    EXPECT_TRUE(exact.intact());
  }
}

// Range by range, with odd borders, adds the same as all at once and never writes outside.
TEST(Codec, DecodesInRanges) {
  for (std::uint32_t seed = 0; seed < 120; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Example example = random_example(seed, kCodecs[seed % kCodecs.size()]);
    const reference::Bytes bytes = encoded(example, 1 << 16);
    const Payload payload = validate(bytes, example.numel);
    std::vector<float> expected(example.numel, 0.5f);
    for (const Section& section : example.sections())
      if (const auto* dense = std::get_if<DenseSection>(&section)) {
        for (std::size_t i = 0; i < dense->values.size(); ++i) expected[dense->begin + i] += dense->values[i];
      } else {
        const auto& sparse = std::get<SparseSection>(section);
        for (std::size_t j = 0; j < sparse.indices.size(); ++j)
          if (sparse.indices[j] != kEmptySlot) expected[sparse.indices[j]] += sparse.values[j];
      }
    for (const std::size_t length : {example.numel, std::size_t{1}, std::size_t{7}, std::size_t{64}}) {
      GuardedBytes memory(example.numel * sizeof(float));
      const std::span<float> sum(reinterpret_cast<float*>(memory.bytes().data()), example.numel);
      std::fill(sum.begin(), sum.end(), 0.5f);
      DecodeCursor cursor;
      for (std::size_t first = 0; first < sum.size(); first += length)
        decode_add(payload, std::uint32_t(first), sum.subspan(first, std::min(length, sum.size() - first)), cursor);
      ASSERT_TRUE(same_bits(sum, expected)) << "ranges of " << length;
      ASSERT_TRUE(memory.intact());
    }
  }
}

}  // namespace
}  // namespace thinwire::test
