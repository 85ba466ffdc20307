// codec.h, validate: whatever bytes arrive, they are refused with a position or safe to decode.
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

Bytes bytes_of_example(const Example& example) {
  return reference::payload(example.header, example.has_gradient, example.sections());
}

TEST(Corruption, EveryFlippedBitIsRefused) {
  for (const Example& example : examples()) {
    const Bytes good = bytes_of_example(example);
    for (std::size_t bit = 0; bit < 8 * good.size(); ++bit) {
      Bytes bad = good;
      bad[bit / 8] ^= std::byte(1u << bit % 8);
      ASSERT_TRUE(refused(bad, example.numel)) << example.name << ", bit " << bit;
    }
  }
}

TEST(Corruption, EveryTruncationIsRefused) {
  for (const Example& example : examples()) {
    const Bytes good = bytes_of_example(example);
    for (std::size_t size = 0; size < good.size(); ++size) {
      const Bytes cut(good.begin(), good.begin() + std::ptrdiff_t(size));
      ASSERT_TRUE(refused(cut, example.numel, size)) << example.name << ", " << size << " bytes";
    }
  }
}

// The same with a size and a checksum that fit the shortened bytes.
TEST(Corruption, TruncationsWithAValidChecksumAreRefused) {
  for (const Example& example : examples()) {
    const Bytes good = bytes_of_example(example);
    for (std::size_t size = 64; size < good.size(); size += 4) {
      Bytes cut(good.begin(), good.begin() + std::ptrdiff_t(size));
      reference::overwrite(cut, reference::kPayloadBytesAt, size, 8);
      reference::seal(cut);
      std::size_t border =
          68 + (example.header.slices > 32 ? 4 : 0);  // a cut between two sections leaves a sound payload
      bool between = size == border;
      for (const Section& section : example.sections()) {
        const auto* dense = std::get_if<DenseSection>(&section);
        border +=
            32 + (dense != nullptr ? 4 * dense->values.size() : 8 * std::get<SparseSection>(section).values.size());
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
  std::size_t accepted = 0;
  for (std::uint32_t round = 0; round < 20'000; ++round) {
    const Example example = random_example(round % 50);
    Bytes bytes = bytes_of_example(example);
    for (std::uint32_t changes = 1 + random() % 3; changes > 0; --changes) {
      const std::size_t at = random() % bytes.size();
      bytes[at] = random() % 2 == 0 ? std::byte(random()) : bytes[at] ^ std::byte(1u << random() % 8);
    }
    reference::seal(bytes);
    std::vector<std::uint32_t> memory;
    try {
      const Payload payload = validate_copy(bytes, example.numel, memory);
      ++accepted;
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
  EXPECT_GT(accepted, 1000u) << "almost nothing came through: the test shows little";
}

/// A payload for 40 elements and one slice, with one field of its only section changed and the checksum made to fit.
class Crafted : public ::testing::Test {
 protected:
  static constexpr std::size_t kSection = 68;
  static constexpr std::size_t kIndices = kSection + 32;
  Bytes good(const OwnedSection& section) const { return with({section}); }
  Bytes with(std::vector<OwnedSection> sections) const {
    Example example;
    example.header.slices = 1;
    example.has_gradient = {true};
    example.owned = std::move(sections);
    return bytes_of_example(example);
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
  EXPECT_TRUE(refuses(good(sparse), kSection + reference::kIndexCodingAt, 1, 1));
  EXPECT_TRUE(refuses(good(sparse), kSection + reference::kValueCodingAt, 1, 1));
  EXPECT_TRUE(refuses(good(sparse), kSection + reference::kSectionFlagsAt, 2, 1));
  EXPECT_TRUE(refuses(good(sparse), kSection + reference::kExtentAt, 33, 4)) << "past the bucket";
  EXPECT_TRUE(refuses(good(sparse), kSection + reference::kExtentAt, 0xFFFFFFFFu, 4)) << "past 32 bits";
  for (const std::size_t reserved : {20, 24, 28}) EXPECT_TRUE(refuses(good(sparse), kSection + reserved, 1, 4));
  EXPECT_TRUE(refuses(good(sparse), kSection + reference::kHashSeedAt, 5, 4)) << "a seed without hashed order";
  const OwnedSection dense = dense_section(0, {1.0f, 2.0f});
  EXPECT_TRUE(refuses(good(dense), kSection + reference::kSectionFlagsAt, 1, 1)) << "a dense section in hashed order";
  Bytes bytes = good(dense);
  reference::overwrite(bytes, kSection + reference::kExtentAt, 3, 4);
  reference::seal(bytes);
  EXPECT_TRUE(refused(bytes, 40)) << "fewer values than elements";
  bytes = good(sparse);
  reference::overwrite(bytes, kSection + reference::kCountAt, 0xFFFFFFFFu, 4);
  reference::seal(bytes);
  EXPECT_TRUE(refused(bytes, 40)) << "a count that overflows";
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
