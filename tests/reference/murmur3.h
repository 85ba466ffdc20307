// MurmurHash3_x86_32 as its description has it: four bytes at a time, little-endian, then the tail, then the finish.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace thinwire::reference {

inline std::uint32_t rotate_left(std::uint32_t x, int by) { return (x << by) | (x >> (32 - by)); }

inline std::uint32_t murmur3_x86_32(std::span<const std::uint8_t> bytes, std::uint32_t seed) {
  const std::uint32_t c1 = 0xcc9e2d51, c2 = 0x1b873593;
  std::uint32_t hash = seed;
  const std::size_t whole = bytes.size() / 4 * 4;
  for (std::size_t i = 0; i < whole; i += 4) {
    std::uint32_t k = 0;
    for (std::size_t j = 0; j < 4; ++j) k += std::uint32_t{bytes[i + j]} << (8 * j);
    hash ^= rotate_left(k * c1, 15) * c2;
    hash = rotate_left(hash, 13) * 5 + 0xe6546b64;
  }
  std::uint32_t tail = 0;
  for (std::size_t i = whole; i < bytes.size(); ++i) tail += std::uint32_t{bytes[i]} << (8 * (i - whole));
  hash ^= rotate_left(tail * c1, 15) * c2;  // a tail of no bytes leaves the hash as it is
  hash ^= static_cast<std::uint32_t>(bytes.size());
  hash = (hash ^ hash >> 16) * 0x85ebca6b;
  hash = (hash ^ hash >> 13) * 0xc2b2ae35;
  return hash ^ hash >> 16;
}

/// Of a counter's four little-endian bytes.
inline std::uint32_t hash_counter(std::uint32_t counter, std::uint32_t seed) {
  const std::array<std::uint8_t, 4> bytes = {std::uint8_t(counter), std::uint8_t(counter >> 8),
                                             std::uint8_t(counter >> 16), std::uint8_t(counter >> 24)};
  return murmur3_x86_32(bytes, seed);
}

/// A number below `range`, drawn by the hash: the upper 32 bits of hash · range.
inline std::uint32_t draw(std::uint32_t hash, std::size_t range) {
  return static_cast<std::uint32_t>(std::uint64_t{hash} * range / (std::uint64_t{1} << 32));
}

}  // namespace thinwire::reference
