// Payloads for the codec's tests: a few small ones that can be checked by hand, and random ones.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "cases.h"
#include "reference/murmur3.h"
#include "reference/wire.h"
#include "thinwire/codec.h"

namespace thinwire::test {

/// The memory that a section's spans point into.
struct OwnedSection {
  bool dense = false;
  std::uint32_t begin = 0;
  std::uint32_t extent = 0;
  bool hashed_order = false;
  std::uint32_t hash_seed = 0;
  std::vector<std::uint32_t> indices;
  std::vector<float> values;
};

struct Example {
  std::string name;
  std::size_t numel = 0;
  PayloadHeader header;
  std::vector<bool> has_gradient;
  std::vector<OwnedSection> owned;
  Codec codec = {};

  reference::Bytes bytes() const { return reference::payload(header, has_gradient, sections(), codec); }
  std::vector<Section> sections() const {
    std::vector<Section> out;
    for (const OwnedSection& s : owned)
      if (s.dense)
        out.emplace_back(DenseSection{s.begin, s.values});
      else
        out.emplace_back(SparseSection{s.begin, s.extent, s.hashed_order, s.hash_seed, s.indices, s.values});
    return out;
  }
};

inline OwnedSection dense_section(std::uint32_t begin, std::vector<float> values) {
  return {true, begin, std::uint32_t(values.size()), false, 0, {}, std::move(values)};
}
inline OwnedSection sparse_section(std::uint32_t begin, std::uint32_t extent, std::vector<std::uint32_t> indices,
                                   std::vector<float> values) {
  return {false, begin, extent, false, 0, std::move(indices), std::move(values)};
}
/// Entries go to their slots; of two in one slot the later stays.
inline OwnedSection hashed_section(std::uint32_t begin, std::uint32_t extent, std::uint32_t seed, std::size_t slots,
                                   const std::vector<std::uint32_t>& indices) {
  OwnedSection out{
      false, begin, extent, true, seed, std::vector<std::uint32_t>(slots, kEmptySlot), std::vector<float>(slots, 0.0f)};
  for (const std::uint32_t index : indices) {
    const std::uint32_t slot = reference::draw(reference::hash_counter(index - begin, seed), slots);
    out.indices[slot] = index;
    out.values[slot] = 0.5f - float(index);
  }
  return out;
}

/// Each has a file of its name in tests/golden. Values are such as their coding can hold.
inline std::vector<Example> examples() {
  const PayloadHeader header{0, 0x1122334455667788u, 3, 2, 0xA1A2A3A4A5A6A7A8u, 0xB1B2B3B4B5B6B7B8u, 256, std::nullopt};
  PayloadHeader relayout = header, failed = header, overflow = header, many = header;
  relayout.flags = PayloadHeader::relayout;
  failed.flags = PayloadHeader::failed;
  overflow.non_finite = 11;
  many.slices = 35;
  std::vector<bool> bits(35, false);
  bits[0] = bits[9] = bits[31] = bits[32] = bits[34] = true;
  return {
      {"relayout", 40, relayout, {}, {}},
      {"failed", 40, failed, {}, {}},
      {"empty", 40, header, {true, false}, {}},
      {"dense", 40, header, {true, true}, {dense_section(2, {1.0f, -2.0f, 0.5f})}},
      {"sparse", 40, header, {false, true}, {sparse_section(8, 32, {8, 20, 39}, {-1.5f, 1e-40f, 3.0f})}},
      {"hashed", 40, header, {true, true}, {hashed_section(4, 36, 77, 8, {4, 11, 19, 27, 39})}},
      {"mixed",
       40,
       overflow,
       {true, true},
       {dense_section(0, {0.25f, 0.0f}), dense_section(10, {7.0f}), sparse_section(2, 8, {}, {}),
        sparse_section(11, 9, {12}, {4.0f}), hashed_section(20, 20, 9, 4, {21, 30, 38})}},
      {"many_slices", 40, many, bits, {sparse_section(0, 40, {0}, {1.0f})}},
      {"elias_fano",
       2000,
       header,
       {true, true},
       {dense_section(1, {0.5f}), sparse_section(2, 8, {}, {}),
        sparse_section(10, 100, {10, 11, 39, 40, 41, 70, 109}, {1e-40f, 2.0f, -3.0f, 4.0f, 5.5f, 6.0f, 7.0f}),
        sparse_section(110, 3, {110, 111, 112}, {1.0f, 2.0f, 3.0f}), sparse_section(1000, 1000, {1999}, {-0.1f})},
       {IndexCoding::elias_fano, ValueCoding::f32}},
      {"bf16",
       40,
       header,
       {true, true},
       {dense_section(1, {0.1f}), sparse_section(2, 18, {3, 5, 9}, {1.0078125f, -0x1.fep127f, 0x1p-133f}),
        hashed_section(20, 20, 9, 6, {21, 30, 38})},
       {IndexCoding::raw_u32, ValueCoding::bf16}},
      {"f16",
       60,
       header,
       {true, true},
       {sparse_section(2, 18, {3, 5, 9}, {70016.0f, -1.0f, 0x1p-22f}), sparse_section(20, 4, {20}, {0x1.8p-148f}),
        sparse_section(24, 8, {25, 31}, {-0x1.ffcp127f, 0x1p89f}), hashed_section(40, 20, 9, 6, {41, 50, 58})},
       {IndexCoding::raw_u32, ValueCoding::f16}},
      {"elias_fano_f16",
       300,
       header,
       {true, true},
       {sparse_section(4, 256, {5, 69, 200}, {1.5f, -2.25f, 1024.0f})},
       {IndexCoding::elias_fano, ValueCoding::f16}},
      {"shared_mean",
       300,
       header,
       {true, true},
       {dense_section(1, {0.1f}), sparse_section(2, 3, {}, {}),
        sparse_section(5, 250, {5, 69, 200}, {1.5f, 1.5f, 1.5f})},
       {IndexCoding::raw_u32, ValueCoding::shared_mean}},
  };
}

/// Up to three dense sections, then up to three sparse ones, with gaps between them; where the codec allows it some are
/// hashed. Values are such as it can hold.
inline Example random_example(std::uint32_t seed, const Codec& codec = {}) {
  std::mt19937 random(seed);
  const auto below = [&](std::uint32_t n) { return std::uint32_t(random() % n); };
  Example example;
  const std::uint32_t slices = below(70);
  for (std::uint32_t i = 0; i < slices; ++i) example.has_gradient.push_back(below(3) != 0);
  std::uint32_t at = below(5);
  for (std::uint32_t i = below(4); i > 0; --i) {
    std::vector<float> values(below(20));
    for (float& value : values) value = float(below(2000)) - 1000.0f;
    const auto count = std::uint32_t(values.size());
    example.owned.push_back(dense_section(at, std::move(values)));
    at += count + below(3);
  }
  for (std::uint32_t i = below(4); i > 0; --i) {
    const std::uint32_t extent = 1 + below(150);
    std::vector<std::uint32_t> indices;
    std::vector<float> values;
    for (std::uint32_t index = at; index < at + extent; ++index)
      if (below(3) == 0) {
        indices.push_back(index);
        values.push_back(float(below(2000)) - 1000.5f);
      }
    if (below(2) == 0 || codec.indices == IndexCoding::elias_fano || codec.values == ValueCoding::shared_mean)
      example.owned.push_back(sparse_section(at, extent, indices, values));
    else
      example.owned.push_back(hashed_section(at, extent, random(), 1 + below(60), indices));
    example.owned.back().values = reference::received(codec.values, example.owned.back().values);
    at += extent + below(3);
  }
  example.codec = codec;
  example.numel = at + below(4) + 1;
  example.header = {0, random(), below(100), slices, random(), random(), random(), std::nullopt};
  if (below(2) == 0) example.header.non_finite = below(std::uint32_t(example.numel));
  return example;
}

}  // namespace thinwire::test
