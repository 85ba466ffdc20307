// codec.h, validate: whatever bytes arrive, they are refused with a position or safe to decode.
#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <random>

#include "helpers.h"
#include "payloads.h"
#include "thinwire/codec.h"

namespace thinwire::test {
namespace {

using reference::Bytes;

/// A copy that ends where its memory ends, so that a sanitizer sees any read past it.
Payload validate_copy(const Bytes& bytes, std::size_t numel, std::vector<std::uint32_t>& memory) {
  memory.assign((bytes.size() + 3) / 4, 0);
  std::copy(bytes.begin(), bytes.end(), reinterpret_cast<std::byte*>(memory.data()));
  return validate({reinterpret_cast<const std::byte*>(memory.data()), bytes.size()}, numel);
}

/// Refused as corrupt, with a position inside the bytes or at their end, and a sentence.
::testing::AssertionResult refused(const Bytes& bytes, std::size_t numel,
                                   std::optional<std::size_t> position = std::nullopt) {
  std::vector<std::uint32_t> memory;
  try {
    validate_copy(bytes, numel, memory);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::corrupt_payload) return ::testing::AssertionFailure() << "code of: " << error.what();
    if (!error.position()) return ::testing::AssertionFailure() << "no position: " << error.what();
    if (*error.position() > bytes.size())
      return ::testing::AssertionFailure() << "position past the end: " << error.what();
    if (position && *error.position() != *position)
      return ::testing::AssertionFailure()
             << "position " << *error.position() << " instead of " << *position << ": " << error.what();
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure() << "was accepted";
}

TEST(Corruption, EveryFlippedBitIsRefused) {
  for (const Example& example : examples()) {
    const Bytes good = example.bytes();
    for (std::size_t bit = 0; bit < 8 * good.size(); ++bit) {
      Bytes bad = good;
      bad[bit / 8] ^= std::byte(1u << bit % 8);
      ASSERT_TRUE(refused(bad, example.numel)) << example.name << ", bit " << bit;
    }
  }
}

TEST(Corruption, EveryTruncationIsRefused) {
  for (const Example& example : examples()) {
    const Bytes good = example.bytes();
    for (std::size_t size = 0; size < good.size(); ++size) {
      const Bytes cut(good.begin(), good.begin() + std::ptrdiff_t(size));
      ASSERT_TRUE(refused(cut, example.numel, size)) << example.name << ", " << size << " bytes";
    }
  }
}

// The same with a size and a checksum that fit the shortened bytes.
TEST(Corruption, TruncationsWithAValidChecksumAreRefused) {
  for (const Example& example : examples()) {
    const Bytes good = example.bytes();
    for (std::size_t size = 64; size < good.size(); size += 4) {
      Bytes cut(good.begin(), good.begin() + std::ptrdiff_t(size));
      reference::overwrite(cut, reference::kPayloadBytesAt, size, 8);
      reference::seal(cut);
      std::size_t border =
          68 + (example.header.slices > 32 ? 4 : 0);  // a cut between two sections leaves a sound payload
      bool between = size == border;
      for (const Section& section : example.sections()) {
        border += reference::section_bytes(section, example.codec);
        between = between || size == border;
      }
      std::vector<std::uint32_t> memory;
      if (between)
        EXPECT_NO_THROW(validate_copy(cut, example.numel, memory)) << example.name << ", " << size << " bytes";
      else
        ASSERT_TRUE(refused(cut, example.numel, size)) << example.name << ", " << size << " bytes";
    }
  }
}

TEST(Corruption, RandomBytesNeverCrash) {
  std::mt19937 random(1);
  for (int round = 0; round < 3000; ++round) {
    Bytes bytes(random() % 300);
    for (std::byte& byte : bytes) byte = std::byte(random());
    ASSERT_TRUE(refused(bytes, 1000)) << "round " << round;
  }
}

// Changed anywhere but with a matching checksum: refused, or decoded without leaving the buffer.
TEST(Corruption, SealedMutationsAreRefusedOrSafe) {
  std::mt19937 random(2);
  std::array<std::size_t, kCodecs.size()> accepted = {};
  for (std::uint32_t round = 0; round < 60'000; ++round) {
    const std::size_t codec = round % kCodecs.size();
    const Example example = random_example(round % 300, kCodecs[codec]);
    Bytes bytes = example.bytes();
    for (std::uint32_t changes = 1 + random() % 3; changes > 0; --changes) {
      const std::size_t at = random() % bytes.size();
      bytes[at] = random() % 2 == 0 ? std::byte(random()) : bytes[at] ^ std::byte(1u << random() % 8);
    }
    reference::seal(bytes);
    std::vector<std::uint32_t> memory;
    try {
      const Payload payload = validate_copy(bytes, example.numel, memory);
      ++accepted[codec];
      GuardedBytes out(example.numel * sizeof(float));
      const std::span<float> sum(reinterpret_cast<float*>(out.bytes().data()), example.numel);
      DecodeCursor cursor;
      decode_add(payload, 0, sum.first(example.numel / 2), cursor);
      decode_add(payload, std::uint32_t(example.numel / 2), sum.subspan(example.numel / 2), cursor);
      ASSERT_TRUE(out.intact()) << "round " << round;
    } catch (const Error& error) {
      ASSERT_EQ(error.code(), ErrorCode::corrupt_payload) << "round " << round << ": " << error.what();
      ASSERT_TRUE(error.position() && *error.position() <= bytes.size()) << "round " << round << ": " << error.what();
    }
  }
  for (std::size_t codec = 0; codec < accepted.size(); ++codec)
    EXPECT_GT(accepted[codec], 500u) << to_string(kCodecs[codec])
                                     << ": almost nothing came through, the test shows little";
}

// Any bits at all for the indices, between a header and values that are sound: what is accepted is what the oracle reads.
TEST(Corruption, RandomEliasFanoBitsAreRefusedOrReadAsTheOracleDoes) {
  std::mt19937 random(3);
  std::size_t accepted = 0;
  for (std::uint32_t round = 0; round < 60'000; ++round) {
    const std::uint32_t extent = 1 + random() % (round % 2 == 0 ? 20 : 200);
    const std::uint32_t count = 1 + random() % std::min(extent, 12u);
    std::vector<std::uint32_t> indices(extent);
    std::iota(indices.begin(), indices.end(), 0u);
    std::shuffle(indices.begin(), indices.end(), random);
    indices.resize(count);
    std::sort(indices.begin(), indices.end());
    Example example;
    example.codec = {IndexCoding::elias_fano, ValueCoding::f32};
    example.owned = {sparse_section(0, extent, indices, std::vector<float>(count, 1.0f))};
    Bytes bytes = example.bytes();
    const std::size_t end = bytes.size() - 4 * std::size_t{count};
    if (round % 4 == 3)
      for (std::size_t at = 96; at < end; ++at) bytes[at] = std::byte(random());
    else
      for (std::uint32_t flips = 1 + random() % 3; flips > 0; --flips) {
        const std::size_t bit = 8 * 96 + random() % (8 * (end - 96));
        bytes[bit / 8] ^= std::byte(1u << bit % 8);
      }
    reference::seal(bytes);
    std::vector<std::uint32_t> memory;
    try {
      const Payload payload = validate_copy(bytes, extent, memory);
      const auto& section = std::get<SparseSection>(payload.sections.at(0));
      ASSERT_TRUE(std::ranges::equal(section.indices, reference::read_sections(bytes).at(0).indices));
      for (std::size_t j = 0; j < count; ++j) {
        ASSERT_LT(section.indices[j], extent);
        ASSERT_TRUE(j == 0 || section.indices[j] > section.indices[j - 1]);
      }
      ++accepted;
    } catch (const Error& error) {
      ASSERT_EQ(error.code(), ErrorCode::corrupt_payload) << "round " << round << ": " << error.what();
      ASSERT_TRUE(error.position() && *error.position() >= 96 && *error.position() <= end) << error.what();
    }
  }
  EXPECT_GT(accepted, 1000u) << "almost nothing came through: the test shows little";
}

/// A payload for 40 elements and one slice, with one field of its only section changed and the checksum made to fit.
class Crafted : public ::testing::Test {
 protected:
  static constexpr std::size_t kSection = 68;
  static constexpr std::size_t kIndices = kSection + 32;
  Bytes good(const OwnedSection& section, const Codec& codec = {}) const { return with({section}, codec); }
  Bytes with(std::vector<OwnedSection> sections, const Codec& codec = {}) const {
    Example example;
    example.codec = codec;
    example.header.slices = 1;
    example.has_gradient = {true};
    example.owned = std::move(sections);
    return example.bytes();
  }
  ::testing::AssertionResult refuses(Bytes bytes, std::size_t at, std::uint64_t value, std::size_t width) const {
    std::vector<std::uint32_t> memory;
    EXPECT_NO_THROW(validate_copy(bytes, 40, memory)) << "it must be sound before";
    reference::overwrite(bytes, at, value, width);
    reference::seal(bytes);
    return refused(bytes, 40, at);
  }
  const OwnedSection sparse = sparse_section(8, 20, {9, 12, 27}, {1.0f, 2.0f, 3.0f});
  const OwnedSection hashed = hashed_section(4, 36, 77, 8, {4, 11, 19, 27, 39});
};

TEST_F(Crafted, IndicesOutOfOrderOrOutOfRange) {
  EXPECT_TRUE(refuses(good(sparse), kIndices + 4, 9, 4)) << "twice the same";
  EXPECT_TRUE(refuses(good(sparse), kIndices + 4, 8, 4)) << "descending";
  EXPECT_TRUE(refuses(good(sparse), kIndices, 7, 4)) << "before its unit";
  EXPECT_TRUE(refuses(good(sparse), kIndices + 8, 28, 4)) << "behind its unit";
  EXPECT_TRUE(refuses(good(sparse), kIndices + 8, 40, 4)) << "behind the bucket";
  EXPECT_TRUE(refuses(good(sparse), kIndices + 8, 0xFFFFFFFFu, 4)) << "a free slot where there are no slots";
}

TEST_F(Crafted, EntriesInWrongSlots) {
  const auto first =
      std::size_t(std::find_if(hashed.indices.begin(), hashed.indices.end(), [](auto i) { return i != kEmptySlot; }) -
                  hashed.indices.begin());
  std::uint32_t stranger = 4;
  while (reference::draw(reference::hash_counter(stranger - 4, 77), 8) == first) ++stranger;
  EXPECT_TRUE(refuses(good(hashed), kIndices + 4 * first, stranger, 4));
  EXPECT_TRUE(refuses(good(hashed), kIndices + 4 * first, 3, 4)) << "before its unit";
  EXPECT_TRUE(refuses(good(hashed), kIndices + 4 * first, 40, 4)) << "behind its unit";
  const auto free =
      std::size_t(std::find(hashed.indices.begin(), hashed.indices.end(), kEmptySlot) - hashed.indices.begin());
  ASSERT_LT(free, 8u);
  EXPECT_TRUE(refuses(good(hashed), kIndices + 4 * 8 + 4 * free, 0x3F800000u, 4)) << "a free slot with a value";
}

TEST_F(Crafted, FieldsOfSections) {
  EXPECT_TRUE(refuses(good(sparse), kSection + reference::kKindAt, 2, 1));
  EXPECT_TRUE(refuses(good(sparse), kSection + reference::kIndexCodingAt, 2, 1));
  EXPECT_TRUE(refuses(good(sparse), kSection + reference::kValueCodingAt, 4, 1));
  EXPECT_TRUE(refuses(good(sparse), kSection + reference::kSectionFlagsAt, 2, 1));
  EXPECT_TRUE(refuses(good(sparse), kSection + reference::kExtentAt, 33, 4)) << "past the bucket";
  EXPECT_TRUE(refuses(good(sparse), kSection + reference::kExtentAt, 0xFFFFFFFFu, 4)) << "past 32 bits";
  for (const std::size_t reserved : {20, 24, 28}) EXPECT_TRUE(refuses(good(sparse), kSection + reserved, 1, 4));
  for (const std::size_t reserved : {20, 21, 22}) EXPECT_TRUE(refuses(good(sparse), kSection + reserved, 1, 1));
  EXPECT_TRUE(refuses(good(sparse), kSection + reference::kHashSeedAt, 5, 4)) << "a seed without hashed order";
  const OwnedSection dense = dense_section(0, {1.0f, 2.0f});
  EXPECT_TRUE(refuses(good(dense), kSection + reference::kSectionFlagsAt, 1, 1)) << "a dense section in hashed order";
  EXPECT_TRUE(refuses(good(dense), kSection + reference::kIndexCodingAt, 1, 1)) << "a dense section with indices";
  EXPECT_TRUE(refuses(good(dense), kSection + reference::kValueCodingAt, 1, 1)) << "a dense section that is not f32";
  Bytes bytes = good(dense);
  reference::overwrite(bytes, kSection + reference::kExtentAt, 3, 4);
  reference::seal(bytes);
  EXPECT_TRUE(refused(bytes, 40)) << "fewer values than elements";
  bytes = good(sparse);
  reference::overwrite(bytes, kSection + reference::kCountAt, 0xFFFFFFFFu, 4);
  reference::seal(bytes);
  EXPECT_TRUE(refused(bytes, 40)) << "a count that overflows";
}

// Offsets 1, 4 and 19 of 20 make 2 low bits: 1010001 in unary, then 10, 00, 11; 13 bits.
TEST_F(Crafted, EliasFanoBits) {
  const Codec coded{IndexCoding::elias_fano, ValueCoding::f32};
  const Bytes bytes = good(sparse, coded);
  ASSERT_EQ(reference::number(bytes, kIndices, 4), 0b11'00'01'1000101u);
  EXPECT_TRUE(refuses(bytes, kSection + reference::kLowBitsAt, 1, 1));
  EXPECT_TRUE(refuses(bytes, kSection + reference::kLowBitsAt, 3, 1));
  EXPECT_TRUE(refuses(bytes, kSection + reference::kExponentAt, 1, 1));
  EXPECT_TRUE(refuses(bytes, kSection + reference::kReservedAt, 1, 1));
  EXPECT_TRUE(refuses(bytes, kSection + reference::kSectionFlagsAt, 1, 1)) << "hashed order";
  EXPECT_TRUE(refuses(bytes, kSection + reference::kCountAt, 21, 4)) << "more entries than elements";
  const auto refuses_bits = [&](const Bytes& from, std::uint32_t bits, std::size_t byte) {
    Bytes bad = from;
    reference::overwrite(bad, kIndices, bits, 4);
    reference::seal(bad);
    return refused(bad, 40, kIndices + byte);
  };
  EXPECT_TRUE(refuses_bits(bytes, 0b11'00'01'0000101u, 0)) << "two indices";
  EXPECT_TRUE(refuses_bits(bytes, 0b11'00'01'1010101u, 0)) << "four indices";
  for (std::size_t bit = 13; bit < 32; ++bit)
    EXPECT_TRUE(refuses_bits(bytes, 0b11'00'01'1000101u | 1u << bit, bit / 8)) << "unused bit " << bit;
  const Bytes close = good(sparse_section(8, 20, {9, 10, 27}, {1.0f, 2.0f, 3.0f}), coded);
  ASSERT_EQ(reference::number(close, kIndices, 4), 0b11'10'01'1000011u);
  EXPECT_TRUE(refuses_bits(close, 0b11'01'01'1000011u, 0)) << "twice the same";
  EXPECT_TRUE(refuses_bits(close, 0b11'00'01'1000011u, 0)) << "descending";
  const Bytes short_unit = good(sparse_section(8, 18, {9, 12, 25}, {1.0f, 2.0f, 3.0f}), coded);
  ASSERT_EQ(reference::number(short_unit, kIndices, 4), 0b01'00'01'1000101u);
  EXPECT_TRUE(refuses_bits(short_unit, 0b10'00'01'1000101u, 0)) << "behind its unit";
}

TEST_F(Crafted, HalfValues) {
  const std::size_t values = kIndices + 4 * 3;
  for (const ValueCoding coding : {ValueCoding::bf16, ValueCoding::f16}) {
    const Bytes bytes = good(sparse, {IndexCoding::raw_u32, coding});
    const std::uint64_t largest = coding == ValueCoding::bf16 ? 0x7f7f : 0x77ff;
    for (const std::uint64_t bad : {largest + 1, std::uint64_t{0x7fff}, 0x8000 + largest + 1, std::uint64_t{0xffff}})
      for (const std::size_t j : {0, 1, 2}) EXPECT_TRUE(refuses(bytes, values + 2 * j, bad, 2)) << bad;
    EXPECT_TRUE(refuses(bytes, values + 6, 1, 2)) << "unused bytes";
    EXPECT_TRUE(refuses(bytes, values + 6, 0x8000, 2)) << "unused bytes";
    std::vector<std::uint32_t> memory;
    Bytes extreme = bytes;
    reference::overwrite(extreme, values, largest, 2);
    if (coding == ValueCoding::f16) reference::overwrite(extreme, kSection + reference::kExponentAt, 113, 1);
    reference::seal(extreme);
    const Payload payload = validate_copy(extreme, 40, memory);
    EXPECT_TRUE(std::isfinite(std::get<SparseSection>(payload.sections.at(0)).values[0]));

    const Bytes slots = good(hashed, {IndexCoding::raw_u32, coding});
    const auto free =
        std::size_t(std::find(hashed.indices.begin(), hashed.indices.end(), kEmptySlot) - hashed.indices.begin());
    EXPECT_TRUE(refuses(slots, kIndices + 4 * 8 + 2 * free, 0x3c00, 2)) << "a free slot with a value";
  }
  const Bytes bf16 = good(sparse, {IndexCoding::raw_u32, ValueCoding::bf16});
  EXPECT_TRUE(refuses(bf16, kSection + reference::kExponentAt, 1, 1));
  const Bytes f16 = good(sparse, {IndexCoding::raw_u32, ValueCoding::f16});
  for (const int exponent : {-128, -126, 114, 127})
    EXPECT_TRUE(refuses(f16, kSection + reference::kExponentAt, std::uint64_t(exponent), 1)) << exponent;
}

TEST_F(Crafted, SharedMeans) {
  const Bytes bytes = good(sparse, {IndexCoding::raw_u32, ValueCoding::shared_mean});
  const std::size_t mean = kIndices + 4 * 3;
  for (const std::uint64_t bad : {0x7f800000u, 0xff800000u, 0x7fc00000u})
    EXPECT_TRUE(refuses(bytes, mean, bad, 4)) << "not finite";
  EXPECT_TRUE(refuses(bytes, kSection + reference::kExponentAt, 1, 1));
  EXPECT_TRUE(refuses(bytes, kSection + reference::kSectionFlagsAt, 1, 1)) << "hashed order";
}

// The checksum is taken once: a header that was read already vouches for it, and for nothing else.
TEST_F(Crafted, AHeaderThatWasReadStandsForTheChecksum) {
  Bytes bytes = good(sparse);
  const PayloadHeader header = read_header(bytes);
  reference::overwrite(bytes, kIndices + 4, 9, 4);
  EXPECT_TRUE(refused(bytes, 40, reference::kChecksumAt));
  const Error error = error_of([&] { validate(header, bytes, 40); });
  EXPECT_EQ(error.position(), kIndices + 4) << "all else is checked again: " << error.what();
}

TEST_F(Crafted, SectionsThatOverlapOrDescend) {
  const OwnedSection low = sparse_section(0, 10, {3}, {1.0f}), high = sparse_section(9, 5, {9}, {1.0f});
  const OwnedSection dense_low = dense_section(0, {1.0f, 2.0f}), dense_high = dense_section(1, {1.0f, 2.0f});
  const std::size_t second_sparse = kSection + 32 + 8, second_dense = kSection + 32 + 8;
  EXPECT_TRUE(refused(with({low, high}), 40, second_sparse + reference::kBeginAt));
  EXPECT_TRUE(refused(with({high, low}), 40, second_sparse + reference::kBeginAt));
  EXPECT_TRUE(refused(with({dense_low, dense_high}), 40, second_dense + reference::kBeginAt));
  EXPECT_TRUE(refused(with({low, dense_section(20, {1.0f})}), 40, second_sparse + reference::kKindAt))
      << "dense behind sparse";
}

TEST_F(Crafted, FieldsOfTheHeader) {
  EXPECT_TRUE(refuses(good(sparse), 0, 'X', 1));
  EXPECT_TRUE(refuses(good(sparse), reference::kVersionAt, 2, 1));
  EXPECT_TRUE(refuses(good(sparse), reference::kVersionAt + 1, 1, 1));
  EXPECT_TRUE(refuses(good(sparse), reference::kFlagsAt, 4, 2));
  EXPECT_TRUE(refuses(good(sparse), reference::kNonFiniteAt, 40, 4)) << "past the bucket";
  Bytes bytes = good(sparse);
  reference::overwrite(bytes, reference::kSlicesAt, 0xFFFFFFFFu, 4);
  reference::seal(bytes);
  EXPECT_TRUE(refused(bytes, 40)) << "more bits than bytes";
  EXPECT_TRUE(refuses(good(sparse), 64, 0b11, 1)) << "the gradient bit of a second slice";
  EXPECT_TRUE(refuses(good(sparse), 67, 0x80, 1)) << "the gradient bit of a 32nd slice";
  for (const std::uint16_t flag : {PayloadHeader::relayout, PayloadHeader::failed}) {
    bytes = good(sparse);
    reference::overwrite(bytes, reference::kFlagsAt, flag, 2);
    reference::seal(bytes);
    EXPECT_TRUE(refused(bytes, 40, reference::kPayloadBytesAt)) << "a flagged payload with sections";
  }
  for (const std::uint64_t size : {std::uint64_t{0}, std::uint64_t{60}, ~std::uint64_t{0}, ~std::uint64_t{3}}) {
    bytes = good(sparse);
    reference::overwrite(bytes, reference::kPayloadBytesAt, size, 8);
    EXPECT_TRUE(refused(bytes, 40)) << "a payload of " << size << " bytes";
  }
}

TEST_F(Crafted, ForAnotherBucket) {
  std::vector<std::uint32_t> memory;
  const Bytes bytes = good(sparse);  // of [8, 28)
  EXPECT_NO_THROW(validate_copy(bytes, 28, memory));
  EXPECT_TRUE(refused(bytes, 27, kSection + reference::kExtentAt));
  EXPECT_TRUE(refused(bytes, 0, kSection + reference::kExtentAt));
}

// What lies in a block behind the payload is not the payload's.
TEST_F(Crafted, TheRestOfABlockIsIgnored) {
  Bytes bytes = good(sparse);
  bytes.resize(bytes.size() + 40, std::byte{0x5A});
  std::vector<std::uint32_t> memory;
  EXPECT_EQ(validate_copy(bytes, 40, memory).sections.size(), 1u);
}

}  // namespace
}  // namespace thinwire::test
