// The wire format, written byte by byte from docs/wire_format.md. Everything is little-endian.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string_view>
#include <variant>
#include <vector>

#include "reference/murmur3.h"
#include "thinwire/codec.h"

namespace thinwire::reference {

/// Positions in the 64-byte header, and in the 32 bytes that lead a section.
inline constexpr std::size_t kVersionAt = 4, kFlagsAt = 6, kSlicesAt = 20, kPayloadBytesAt = 40, kNonFiniteAt = 56,
                             kChecksumAt = 60;
inline constexpr std::size_t kKindAt = 0, kIndexCodingAt = 1, kValueCodingAt = 2, kSectionFlagsAt = 3, kBeginAt = 4,
                             kExtentAt = 8, kCountAt = 12, kHashSeedAt = 16, kSectionHeader = 32;

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

inline void put_section(Bytes& out, const Section& section) {
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
  put(out, 1, 1);
  put(out, 0, 2);
  put(out, sparse.hashed_order ? 1 : 0, 1);
  put(out, sparse.begin, 4);
  put(out, sparse.extent, 4);
  put(out, sparse.indices.size(), 4);
  put(out, sparse.hash_seed, 4);
  put(out, 0, 12);
  for (const std::uint32_t index : sparse.indices) put(out, index, 4);
  for (const float value : sparse.values) put(out, std::bit_cast<std::uint32_t>(value), 4);
}

inline Bytes payload(const PayloadHeader& header, const std::vector<bool>& has_gradient,
                     const std::vector<Section>& sections) {
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
    for (const Section& section : sections) put_section(out, section);
  }
  overwrite(out, kPayloadBytesAt, out.size(), 8);
  seal(out);
  return out;
}

}  // namespace thinwire::reference
