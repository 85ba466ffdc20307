// core/hash.h: the counter-based hash against its published test vectors and against a slow one.
#include "core/hash.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "reference/murmur3.h"

namespace thinwire::test {
namespace {

std::uint32_t of_text(std::string_view text, std::uint32_t seed) { return murmur3_32(bytes_of(text), seed); }

TEST(Hash, PublishedVectors) {
  EXPECT_EQ(of_text("", 0), 0u);
  EXPECT_EQ(of_text("", 1), 0x514E28B7u);
  EXPECT_EQ(of_text("", 0xffffffffu), 0x81F16F39u);
  EXPECT_EQ(of_text("\xff\xff\xff\xff", 0), 0x76293B50u);
  EXPECT_EQ(of_text("\x21\x43\x65\x87", 0), 0xF55B516Bu);
  EXPECT_EQ(of_text("\x21\x43\x65\x87", 0x5082EDEEu), 0x2362F9DEu);
  EXPECT_EQ(of_text("\x21\x43\x65", 0), 0x7E4A8634u);
  EXPECT_EQ(of_text("\x21\x43", 0), 0xA0F7B07Au);
  EXPECT_EQ(of_text("\x21", 0), 0x72661CF4u);
  EXPECT_EQ(of_text("Hello, world!", 0x9747b28cu), 0x24884CBAu);
  EXPECT_EQ(murmur3_32(0x87654321u, 0), 0xF55B516Bu);
  EXPECT_EQ(murmur3_32(0x87654321u, 0x5082EDEEu), 0x2362F9DEu);
}

TEST(Hash, AgreesWithTheSlowOne) {
  std::string text;
  std::vector<std::uint8_t> bytes;
  for (std::uint32_t i = 0; i < 40; ++i) {
    EXPECT_EQ(of_text(text, i * 77), reference::murmur3_x86_32(bytes, i * 77)) << i << " bytes";
    EXPECT_EQ(murmur3_32(i * 0x01234567u, i), reference::hash_counter(i * 0x01234567u, i));
    bytes.push_back(static_cast<std::uint8_t>(250 - 13 * i));
    text.push_back(static_cast<char>(bytes.back()));
  }
}

TEST(Hash, ScalesToTheRange) {
  EXPECT_EQ(scale_hash(0, 10), 0u);
  EXPECT_EQ(scale_hash(0xffffffffu, 10), 9u);
  EXPECT_EQ(scale_hash(0x80000000u, 10), 5u);
  EXPECT_EQ(scale_hash(0x7fffffffu, 10), 4u);
  EXPECT_EQ(scale_hash(0xffffffffu, 0xffffffffu), 0xfffffffeu);
}

// Every part of the key counts: the upper halves of seed and step, and each letter of the name.
TEST(Hash, SeedsOfUnitsDiffer) {
  std::set<std::uint32_t> seeds;
  for (const std::uint64_t seed : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{1} << 32})
    for (const std::uint64_t step : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{1} << 32})
      for (const char* name : {"", "a", "b", "ab", "layer.weight", "layer.bias"})
        seeds.insert(unit_seed(seed, step, name));
  EXPECT_EQ(seeds.size(), 3u * 3u * 6u);
}

TEST(Hash, TextHashIsFnv1a) {
  EXPECT_EQ(text_hash(""), 0xcbf29ce484222325u);
  EXPECT_EQ(text_hash("a"), 0xaf63dc4c8601ec8cu);
  EXPECT_EQ(text_hash("foobar"), 0x85944171f73967e8u);
}

}  // namespace
}  // namespace thinwire::test
