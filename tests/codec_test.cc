// codec.h: payloads are the bytes that the format document describes, and come back as what went in.
#include "thinwire/codec.h"

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>

#include "cases.h"
#include "codec/elias_fano.h"
#include "round_trip.h"

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
