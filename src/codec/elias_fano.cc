#include "codec/elias_fano.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "codec/bytes.h"

namespace thinwire {
namespace {

// Bits of the unary part, which stands first: a one for each index, a zero wherever the high part grows by one.
std::size_t high_bits(std::size_t extent, std::size_t count, unsigned low_bits) {
  return count == 0 ? 0 : count + ((extent - 1) >> low_bits);
}

// The 8 bytes at `at`, zeros past the end.
std::uint64_t word_at(std::span<const std::byte> in, std::size_t at) {
  if (at + 8 <= in.size()) return get<std::uint64_t>(in, at);
  std::uint64_t word = 0;
  std::memcpy(&word, in.data() + at, in.size() - at);
  return word;
}

// Position of one number `n` (from 0) among those of a word.
unsigned one_number(std::uint64_t word, unsigned n) {
  for (; n > 0; --n) word &= word - 1;
  return static_cast<unsigned>(std::countr_zero(word));
}

}  // namespace

unsigned elias_fano_low_bits(std::size_t extent, std::size_t count) noexcept {
  return count == 0 ? 0 : static_cast<unsigned>(std::bit_width(extent / count) - 1);
}

std::size_t elias_fano_bytes(std::size_t extent, std::size_t count) noexcept {
  const unsigned low_bits = elias_fano_low_bits(extent, count);
  return (high_bits(extent, count, low_bits) + low_bits * count + 31) / 32 * 4;
}

void elias_fano_encode(std::span<const std::uint32_t> indices, std::uint32_t begin, std::uint32_t extent,
                       std::span<std::byte> out) noexcept {
  const unsigned low_bits = elias_fano_low_bits(extent, indices.size());
  const std::size_t total = high_bits(extent, indices.size(), low_bits);
  std::byte* high_at = out.data();  // the word of the unary part that is being filled
  std::size_t high_end = 64;        // the first bit behind it
  std::uint64_t high_word = 0;
  const auto flush_high = [&](std::size_t bit) {
    for (; bit >= high_end; high_end += 64, high_at += 8, high_word = 0) std::memcpy(high_at, &high_word, 8);
  };
  const auto add_high = [&](std::uint32_t index, std::size_t j) {
    const std::size_t bit = (index >> low_bits) + j;
    flush_high(bit);
    high_word |= std::uint64_t{1} << bit % 64;
  };
  std::byte* low_at = out.data() + total / 64 * 8;  // the low bits begin in the word in which the unary part ends
  unsigned filled = total % 64;
  std::uint64_t low_word = 0;
  const auto add_low = [&](std::uint64_t bits, unsigned width) {
    low_word |= bits << filled;
    filled += width;
    if (filled < 64) return;
    std::memcpy(low_at, &low_word, 8);
    low_at += 8;
    filled -= 64;
    low_word = bits >> (width - filled);
  };
  const std::uint64_t mask = (std::uint64_t{1} << low_bits) - 1;
  std::size_t j = 0;
  for (; j + 2 <= indices.size(); j += 2) {  // two at a time: each add_low waits for the one before
    const std::uint32_t a = indices[j] - begin;
    const std::uint32_t b = indices[j + 1] - begin;
    add_high(a, j);
    add_high(b, j + 1);
    add_low((a & mask) | (b & mask) << low_bits, 2 * low_bits);
  }
  if (j < indices.size()) {
    add_high(indices[j] - begin, j);
    add_low((indices[j] - begin) & mask, low_bits);
  }
  for (; filled > 0; filled -= std::min(filled, 32u), low_at += 4, low_word >>= 32) std::memcpy(low_at, &low_word, 4);
  flush_high(total);
  for (; high_word != 0; high_at += 4, high_word >>= 32) {
    std::uint32_t both;
    std::memcpy(&both, high_at, 4);
    both |= static_cast<std::uint32_t>(high_word);
    std::memcpy(high_at, &both, 4);
  }
}

void elias_fano_decode(std::span<const std::byte> in, std::size_t position, std::uint32_t begin, std::uint32_t extent,
                       std::span<std::uint32_t> indices) {
  const unsigned low_bits = elias_fano_low_bits(extent, indices.size());
  const std::size_t total = high_bits(extent, indices.size(), low_bits);
  const std::size_t used = total + low_bits * indices.size();
  if (used % 32 != 0) {
    const std::uint32_t unused = get<std::uint32_t>(in, used / 32 * 4) >> used % 32;
    check(unused == 0, position + (used + static_cast<unsigned>(std::countr_zero(unused))) / 8,
          "unused bits are not zero");
  }
  const std::uint64_t mask = (std::uint64_t{1} << low_bits) - 1;
  std::size_t j = 0;
  std::size_t at = total;  // of the low bits of index j
  for (std::size_t base = 0; base < total; base += 64) {
    std::uint64_t word = word_at(in, base / 8);
    if (total - base < 64) word &= (std::uint64_t{1} << (total - base)) - 1;
    const auto ones = static_cast<std::size_t>(std::popcount(word));
    const std::size_t left = indices.size() - j;
    if (ones > left)
      refuse(position + (base + one_number(word, static_cast<unsigned>(left))) / 8, "more indices than entries");
    for (; word != 0; word &= word - 1, ++j, at += low_bits) {
      const std::size_t high = base + static_cast<unsigned>(std::countr_zero(word)) - j;
      const std::uint64_t low = word_at(in, at / 8) >> at % 8 & mask;
      indices[j] = begin + static_cast<std::uint32_t>(high << low_bits | low);
    }
  }
  check(j == indices.size(), position + total / 8, "fewer indices than entries");
  if (!ascend_inside(indices, begin, extent))
    for (j = 0; j < indices.size(); ++j) {
      const std::uint32_t index = indices[j] - begin;
      const std::size_t byte = position + ((index >> low_bits) + j) / 8;
      check(index < extent, byte, "index outside its unit");
      check(j == 0 || indices[j] > indices[j - 1], byte, "indices do not ascend");
    }
}

}  // namespace thinwire
