// codec.h: payloads are the bytes that the format document describes, and come back as what went in.
#include "thinwire/codec.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "helpers.h"
#include "payloads.h"

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
  const std::size_t used = encode({}, example.header, example.has_gradient, example.sections(), out);
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

// THINWIRE_WRITE_GOLDEN=1 writes the files anew, from the format document's bytes and not from the encoder's.
TEST(Golden, FilesAreWhatTheFormatSays) {
  for (const Example& example : examples()) {
    SCOPED_TRACE(example.name);
    const reference::Bytes expected = reference::payload(example.header, example.has_gradient, example.sections());
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
    } else {
      EXPECT_TRUE(payload.has_gradient.empty());
      EXPECT_TRUE(payload.sections.empty());
    }
    expect_same_header(read_header(golden), example.header);
  }
}

TEST(Codec, RoundTripsRandomPayloads) {
  for (std::uint32_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Example example = random_example(seed);
    std::vector<SectionShape> shapes;
    for (const Section& section : example.sections()) {
      const auto* dense = std::get_if<DenseSection>(&section);
      shapes.push_back({dense != nullptr,
                        dense != nullptr ? dense->values.size() : std::get<SparseSection>(section).indices.size()});
    }
    const std::size_t bound = payload_bound({}, example.header.slices, shapes);
    const reference::Bytes bytes = encoded(example, bound);
    EXPECT_EQ(bytes, reference::payload(example.header, example.has_gradient, example.sections()));
    const Payload payload = validate(bytes, example.numel);
    expect_same_header(payload.header, example.header);
    EXPECT_EQ(payload.has_gradient, example.has_gradient);
    expect_same_sections(payload.sections, example.sections());
  }
}

TEST(Codec, BoundIsHeaderBitsAndSectionsRoundedUpToEight) {
  EXPECT_EQ(payload_bound({}, 0, {}), 64u);
  EXPECT_EQ(payload_bound({}, 1, {}), 72u);  // 64 + 4
  EXPECT_EQ(payload_bound({}, 32, {}), 72u);
  EXPECT_EQ(payload_bound({}, 33, {}), 72u);  // 64 + 8
  EXPECT_EQ(payload_bound({}, 65, {}), 80u);  // 64 + 12
  const std::vector<SectionShape> shapes = {{true, 5}, {false, 0}, {false, 7}};
  EXPECT_EQ(payload_bound({}, 3, shapes), 240u);  // 64 + 4 + (32 + 20) + 32 + (32 + 56)
  EXPECT_EQ(to_string(Codec{}), "raw_u32 x f32");
}

TEST(Codec, RefusesABlockThatIsTooSmall) {
  for (const Example& example : examples()) {
    const std::size_t needed = reference::payload(example.header, example.has_gradient, example.sections()).size();
    GuardedBytes out(needed - 4);
    EXPECT_TRUE(
        says(error_of([&] { encode({}, example.header, example.has_gradient, example.sections(), out.bytes()); }),
             ErrorCode::invalid_argument, {std::to_string(needed), std::to_string(needed - 4)}));
    EXPECT_TRUE(out.intact());
    GuardedBytes exact(needed);
    EXPECT_EQ(encode({}, example.header, example.has_gradient, example.sections(), exact.bytes()), needed);
    EXPECT_TRUE(exact.intact());
  }
}

// Range by range, with odd borders, adds the same as all at once and never writes outside.
TEST(Codec, DecodesInRanges) {
  for (std::uint32_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Example example = random_example(seed);
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
