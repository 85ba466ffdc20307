// What the fuzz targets share: reading a case out of bytes, and saying what does not hold.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace thinwire::fuzz {

/// Ends the process, which is how a fuzzer learns of a finding.
inline void expect(bool holds, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "does not hold: %s\n", what.c_str());
  std::abort();
}

/// Equal to the bit, NaNs whatever their bits.
inline bool same(std::span<const float> a, std::span<const float> b) {
  return std::ranges::equal(a, b, [](float x, float y) {
    return std::bit_cast<std::uint32_t>(x) == std::bit_cast<std::uint32_t>(y) || (std::isnan(x) && std::isnan(y));
  });
}

/// The bytes of one case, read from the front; past their end everything is zero.
class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : left_(data, size) {}

  std::size_t size() const { return left_.size(); }
  template <class T>
  T take() {
    T value{};
    const std::size_t count = std::min(sizeof value, left_.size());
    if (count > 0) std::memcpy(&value, left_.data(), count);
    left_ = left_.subspan(count);
    return value;
  }
  /// In [0, limit), limit > 0.
  std::uint32_t below(std::uint32_t limit) {
    return (limit <= 256 ? std::uint32_t{take<std::uint8_t>()} : take<std::uint32_t>()) % limit;
  }
  bool chance() { return below(2) == 1; }
  std::vector<std::byte> bytes(std::size_t count) {
    count = std::min(count, left_.size());
    const auto* const data = reinterpret_cast<const std::byte*>(left_.data());
    left_ = left_.subspan(count);
    return {data, data + count};
  }
  std::vector<std::byte> rest() { return bytes(left_.size()); }
  std::string text(std::size_t count) {
    const std::vector<std::byte> raw = bytes(count);
    return {reinterpret_cast<const char*>(raw.data()), raw.size()};
  }
  /// Mostly small integers, whose sums are exact; now and then any bits.
  float value() {
    const auto byte = take<std::uint8_t>();
    if (byte >= 0xf8) return std::bit_cast<float>(take<std::uint32_t>());
    return static_cast<float>(static_cast<std::int8_t>(byte)) / 4;
  }
  float finite() {
    const float any = value();
    return std::isfinite(any) ? any : 0.0f;
  }

 private:
  std::span<const std::uint8_t> left_;
};

}  // namespace thinwire::fuzz
