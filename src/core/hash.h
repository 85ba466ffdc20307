// Counter-based hashing: the only source of randomness, so that every backend draws the same samples and slots.
// MurmurHash3_x86_32 by Austin Appleby (public domain algorithm), written for words and for bytes.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

namespace thinwire {

inline std::uint32_t murmur3_mix(std::uint32_t h, std::uint32_t word) noexcept {
  word *= 0xcc9e2d51u;
  word = std::rotl(word, 15);
  word *= 0x1b873593u;
  h ^= word;
  h = std::rotl(h, 13);
  return h * 5u + 0xe6546b64u;
}

inline std::uint32_t murmur3_final(std::uint32_t h, std::uint32_t length) noexcept {
  h ^= length;
  h ^= h >> 16;
  h *= 0x85ebca6bu;
  h ^= h >> 13;
  h *= 0xc2b2ae35u;
  return h ^ (h >> 16);
}

/// MurmurHash3_x86_32 of the four little-endian bytes of `counter`.
inline std::uint32_t murmur3_32(std::uint32_t counter, std::uint32_t seed) noexcept {
  return murmur3_final(murmur3_mix(seed, counter), 4);
}

/// MurmurHash3_x86_32 of bytes.
inline std::uint32_t murmur3_32(std::span<const std::byte> bytes, std::uint32_t seed) noexcept {
  std::uint32_t h = seed;
  std::size_t i = 0;
  for (; i + 4 <= bytes.size(); i += 4) {
    std::uint32_t word;
    std::memcpy(&word, bytes.data() + i, 4);
    h = murmur3_mix(h, word);
  }
  std::uint32_t tail = 0;
  for (std::size_t j = bytes.size(); j-- > i;) tail = tail << 8 | std::to_integer<std::uint32_t>(bytes[j]);
  if (i < bytes.size()) {
    tail *= 0xcc9e2d51u;
    tail = std::rotl(tail, 15);
    h ^= tail * 0x1b873593u;
  }
  return murmur3_final(h, static_cast<std::uint32_t>(bytes.size()));
}

inline std::span<const std::byte> bytes_of(std::string_view text) noexcept {
  return std::as_bytes(std::span<const char>(text.data(), text.size()));
}

/// Uniform in [0, range): the high part of hash·range.
inline std::uint32_t scale_hash(std::uint32_t hash, std::uint32_t range) noexcept {
  return static_cast<std::uint32_t>(std::uint64_t{hash} * range >> 32);
}

/// The seed of one unit in one step.
inline std::uint32_t unit_seed(std::uint64_t seed, std::uint64_t step, std::string_view unit_name) noexcept {
  std::uint32_t h = murmur3_32(static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32));
  h = murmur3_32(static_cast<std::uint32_t>(step), h);
  h = murmur3_32(static_cast<std::uint32_t>(step >> 32), h);
  return murmur3_32(bytes_of(unit_name), h);
}

/// 64 bits over text, for the comparison of options and layouts between ranks (FNV-1a).
inline std::uint64_t text_hash(std::string_view text) noexcept {
  std::uint64_t h = 0xcbf29ce484222325u;
  for (const char c : text) {
    h ^= static_cast<unsigned char>(c);
    h *= 0x100000001b3u;
  }
  return h;
}

}  // namespace thinwire
