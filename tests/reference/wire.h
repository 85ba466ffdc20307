// The wire format, written byte by byte from docs/wire_format.md. Everything is little-endian.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string_view>
#include <variant>
#include <vector>

#include "reference/murmur3.h"
#include "reference/values.h"
#include "thinwire/codec.h"

namespace thinwire::reference {

/// Positions in the 64-byte header, and in the 32 bytes that lead a section.
inline constexpr std::size_t kVersionAt = 4, kFlagsAt = 6, kSlicesAt = 20, kPayloadBytesAt = 40, kNonFiniteAt = 56,
                             kChecksumAt = 60;
inline constexpr std::size_t kKindAt = 0, kIndexCodingAt = 1, kValueCodingAt = 2, kSectionFlagsAt = 3, kBeginAt = 4,
                             kExtentAt = 8, kCountAt = 12, kHashSeedAt = 16, kLowBitsAt = 20, kExponentAt = 21,
                             kReservedAt = 22, kSectionHeader = 32;

using Bytes = std::vector<std::byte>;

inline void put(Bytes& out, std::uint64_t value, std::size_t width) {
  for (std::size_t i = 0; i < width; ++i) out.push_back(std::byte(value >> (8 * i) & 0xff));
}
inline void overwrite(Bytes& bytes, std::size_t at, std::uint64_t value, std::size_t width) {
  for (std::size_t i = 0; i < width; ++i) bytes[at + i] = std::byte(value >> (8 * i) & 0xff);
}

/// Writes the checksum of the first `used` bytes, taken while its own four bytes are zero.
inline void seal(Bytes& bytes, std::size_t used) {
  overwrite(bytes, kChecksumAt, 0, 4);
  std::vector<std::uint8_t> plain;
  for (std::size_t i = 0; i < used; ++i) plain.push_back(std::to_integer<std::uint8_t>(bytes[i]));
  overwrite(bytes, kChecksumAt, murmur3_x86_32(plain, 0), 4);
}
inline void seal(Bytes& bytes) { seal(bytes, bytes.size()); }

/// The largest l with count · 2^l <= extent.
inline unsigned low_bits(std::uint64_t extent, std::uint64_t count) {
  unsigned l = 0;
  while (count != 0 && count << (l + 1) <= extent) ++l;
  return l;
}

inline void put_elias_fano(Bytes& out, const SparseSection& section) {
  const unsigned l = low_bits(section.extent, section.indices.size());
  std::vector<bool> bits;
  std::uint32_t high = 0;
  for (const std::uint32_t index : section.indices) {
    for (; high < (index - section.begin) >> l; ++high) bits.push_back(false);
    bits.push_back(true);
  }
  if (!section.indices.empty())
    for (; high < (section.extent - 1) >> l; ++high) bits.push_back(false);
  for (const std::uint32_t index : section.indices)
    for (unsigned i = 0; i < l; ++i) bits.push_back(((index - section.begin) >> i & 1u) != 0);
  while (bits.size() % 32 != 0) bits.push_back(false);
  for (std::size_t i = 0; i < bits.size(); i += 8) {
    std::uint64_t byte = 0;
    for (std::size_t j = 0; j < 8; ++j) byte += std::uint64_t{bits[i + j]} << j;
    put(out, byte, 1);
  }
}

inline void put_section(Bytes& out, const Section& section, const Codec& codec) {
  if (const auto* dense = std::get_if<DenseSection>(&section)) {
    put(out, 0, 4);
    put(out, dense->begin, 4);
    put(out, dense->values.size(), 4);
    put(out, dense->values.size(), 4);
    put(out, 0, 16);
    for (const float value : dense->values) put(out, std::bit_cast<std::uint32_t>(value), 4);
    return;
  }
  const auto& sparse = std::get<SparseSection>(section);
  const bool elias_fano = codec.indices == IndexCoding::elias_fano;
  const int exponent = exponent_of(codec.values, sparse.values);
  put(out, 1, 1);
  put(out, elias_fano ? 1 : 0, 1);
  constexpr std::array kValueCodings = {ValueCoding::f32, ValueCoding::bf16, ValueCoding::f16,
                                        ValueCoding::shared_mean};
  put(out, std::uint64_t(std::find(kValueCodings.begin(), kValueCodings.end(), codec.values) - kValueCodings.begin()),
      1);
  put(out, sparse.hashed_order ? 1 : 0, 1);
  put(out, sparse.begin, 4);
  put(out, sparse.extent, 4);
  put(out, sparse.indices.size(), 4);
  put(out, sparse.hash_seed, 4);
  put(out, elias_fano ? low_bits(sparse.extent, sparse.indices.size()) : 0, 1);
  put(out, static_cast<std::uint64_t>(exponent), 1);
  put(out, 0, 10);
  if (elias_fano)
    put_elias_fano(out, sparse);
  else
    for (const std::uint32_t index : sparse.indices) put(out, index, 4);
  if (codec.values == ValueCoding::f32)
    for (const float value : sparse.values) put(out, std::bit_cast<std::uint32_t>(value), 4);
  else if (codec.values == ValueCoding::shared_mean) {
    if (!sparse.values.empty()) put(out, std::bit_cast<std::uint32_t>(shared_mean(sparse.values)), 4);
  } else
    for (const float value : sparse.values) put(out, half_of(codec.values, exponent, value), 2);
  while (out.size() % 4 != 0) put(out, 0, 1);
}
inline std::size_t section_bytes(const Section& section, const Codec& codec) {
  Bytes out;
  put_section(out, section, codec);
  return out.size();
}

inline Bytes payload(const PayloadHeader& header, const std::vector<bool>& has_gradient,
                     const std::vector<Section>& sections, const Codec& codec = {}) {
  Bytes out;
  for (const char letter : std::string_view("THW1")) out.push_back(std::byte(letter));
  put(out, 1, 1);
  put(out, 0, 1);
  put(out, header.flags, 2);
  put(out, header.step, 8);
  put(out, header.job, 4);
  put(out, header.slices, 4);
  put(out, header.options_hash, 8);
  put(out, header.layout_hash, 8);
  put(out, 0, 8);  // bytes used, below
  put(out, header.block_bytes, 8);
  put(out, header.non_finite.value_or(0xFFFFFFFFu), 4);
  put(out, 0, 4);  // checksum, below
  if ((header.flags & (PayloadHeader::relayout | PayloadHeader::failed)) == 0) {
    for (std::size_t word = 0; word * 32 < has_gradient.size(); ++word) {
      std::uint32_t bits = 0;
      for (std::size_t i = 0; i < 32 && word * 32 + i < has_gradient.size(); ++i)
        if (has_gradient[word * 32 + i]) bits += 1u << i;
      put(out, bits, 4);
    }
    for (const Section& section : sections) put_section(out, section, codec);
  }
  overwrite(out, kPayloadBytesAt, out.size(), 8);
  seal(out);
  return out;
}

/// A section as it stands in a sound payload, read bit by bit.
struct ReadSection {
  std::uint64_t kind = 0, begin = 0, extent = 0, hashed_order = 0, hash_seed = 0;
  std::vector<std::uint32_t> indices;  ///< of a sparse one
  std::vector<float> values;
};

inline std::uint64_t number(const Bytes& bytes, std::size_t at, std::size_t width) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < width; ++i) value += std::to_integer<std::uint64_t>(bytes.at(at + i)) << (8 * i);
  return value;
}
inline std::vector<std::uint32_t> read_elias_fano(const Bytes& bytes, std::size_t& at, const ReadSection& section,
                                                  std::size_t count, std::uint64_t l) {
  std::size_t next = 0;
  const auto bit = [&] {
    const std::uint64_t byte = number(bytes, at + next / 8, 1);
    return byte >> (next++ % 8) & 1u;
  };
  std::vector<std::uint64_t> offsets;
  std::uint64_t high = 0;
  while (offsets.size() < count)
    if (bit() != 0)
      offsets.push_back(high << l);
    else
      ++high;
  if (count != 0)
    for (; high < (section.extent - 1) >> l; ++high) bit();
  for (std::uint64_t& offset : offsets)
    for (std::uint64_t i = 0; i < l; ++i) offset += bit() << i;
  at += (next + 31) / 32 * 4;
  std::vector<std::uint32_t> indices;
  for (const std::uint64_t offset : offsets) indices.push_back(std::uint32_t(section.begin + offset));
  return indices;
}
inline std::vector<ReadSection> read_sections(const Bytes& bytes) {
  std::vector<ReadSection> sections;
  std::size_t at = 64 + (number(bytes, kSlicesAt, 4) + 31) / 32 * 4;
  while (at < number(bytes, kPayloadBytesAt, 8)) {
    ReadSection section{.kind = number(bytes, at + kKindAt, 1),
                        .begin = number(bytes, at + kBeginAt, 4),
                        .extent = number(bytes, at + kExtentAt, 4),
                        .hashed_order = number(bytes, at + kSectionFlagsAt, 1),
                        .hash_seed = number(bytes, at + kHashSeedAt, 4),
                        .indices = {},
                        .values = {}};
    const std::uint64_t index_coding = number(bytes, at + kIndexCodingAt, 1);
    const std::uint64_t value_coding = number(bytes, at + kValueCodingAt, 1);
    const std::uint64_t l = number(bytes, at + kLowBitsAt, 1);
    const auto exponent = static_cast<std::int8_t>(number(bytes, at + kExponentAt, 1));
    const std::size_t count = number(bytes, at + kCountAt, 4);
    at += kSectionHeader;
    if (index_coding == 1)
      section.indices = read_elias_fano(bytes, at, section, count, l);
    else if (section.kind == 1)
      for (std::size_t j = 0; j < count; ++j, at += 4) section.indices.push_back(std::uint32_t(number(bytes, at, 4)));
    for (std::size_t j = 0; j < count; ++j, at += value_coding == 0 ? 4 : value_coding == 3 ? 0 : 2)
      if (value_coding == 0 || value_coding == 3)
        section.values.push_back(std::bit_cast<float>(std::uint32_t(number(bytes, at, 4))));
      else
        section.values.push_back(value_of(value_coding == 1 ? ValueCoding::bf16 : ValueCoding::f16, exponent,
                                          std::uint16_t(number(bytes, at, 2))));
    at = (at + 3) / 4 * 4 + (value_coding == 3 && count > 0 ? 4 : 0);
    sections.push_back(std::move(section));
  }
  return sections;
}

}  // namespace thinwire::reference
