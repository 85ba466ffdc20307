// A payload there and back: from the encoder, the decoder and the oracle.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "helpers.h"
#include "payloads.h"
#include "thinwire/codec.h"

namespace thinwire::test {

inline reference::Bytes encoded(const Example& example, std::size_t block) {
  reference::Bytes out(block, std::byte{0xEE});
  const std::size_t used = encode(example.codec, example.header, example.has_gradient, example.sections(), out);
  EXPECT_LE(used, block);
  for (std::size_t i = used; i < block; ++i) EXPECT_EQ(out[i], std::byte{0}) << "the rest of the block at " << i;
  out.resize(used);
  return out;
}

inline void expect_same_header(const PayloadHeader& a, const PayloadHeader& b) {
  EXPECT_EQ(a.flags, b.flags);
  EXPECT_EQ(a.step, b.step);
  EXPECT_EQ(a.job, b.job);
  EXPECT_EQ(a.slices, b.slices);
  EXPECT_EQ(a.options_hash, b.options_hash);
  EXPECT_EQ(a.layout_hash, b.layout_hash);
  EXPECT_EQ(a.block_bytes, b.block_bytes);
  EXPECT_EQ(a.non_finite, b.non_finite);
}

inline void expect_same_sections(const std::vector<Section>& actual, const std::vector<Section>& expected) {
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
inline void expect_reads_as(const reference::Bytes& bytes, const std::vector<Section>& expected) {
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

inline std::size_t bound_of(const Example& example) {
  std::vector<SectionShape> shapes;
  for (const OwnedSection& s : example.owned) shapes.push_back({s.dense, s.values.size(), s.extent});
  return payload_bound(example.codec, example.header.slices, shapes);
}

/// A payload of one section comes back from encoder, decoder and oracle, and fits its bound.
inline void expect_round_trip(const Codec& codec, std::uint32_t begin, std::uint32_t extent,
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

}  // namespace thinwire::test
