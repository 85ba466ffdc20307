// types.h and error.h: names, sizes, and the half-precision numbers that gradients are made of.
#include "thinwire/types.h"

#include <cmath>

#include "core/float16.h"
#include "helpers.h"
#include "reference/number.h"
#include "thinwire/error.h"

namespace thinwire::test {
namespace {

TEST(Types, NamesAndSizes) {
  EXPECT_STREQ(to_string(DType::f32), "f32");
  EXPECT_STREQ(to_string(DType::f16), "f16");
  EXPECT_STREQ(to_string(DType::bf16), "bf16");
  EXPECT_EQ(size_of(DType::f32), 4u);
  EXPECT_EQ(size_of(DType::f16), 2u);
  EXPECT_EQ(size_of(DType::bf16), 2u);
  EXPECT_EQ((Device{DeviceType::cuda, 1}), (Device{DeviceType::cuda, 1}));
  EXPECT_NE((Device{DeviceType::cuda, 1}), (Device{DeviceType::cuda, 0}));
  EXPECT_NE((Device{DeviceType::cuda, 0}), Device{});
}

TEST(Types, EveryHalfWidensToItsValueAndComesBack) {
  for (std::uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    const float f16 = f16_to_f32(half), bf16 = bf16_to_f32(half);
    if (std::isnan(reference::half_value(DType::f16, half))) {
      ASSERT_TRUE(std::isnan(f16)) << bits;
      ASSERT_TRUE(std::isnan(f16_to_f32(f32_to_f16(f16)))) << bits;
    } else {
      ASSERT_EQ(bits_of(f16), bits_of(reference::half_value(DType::f16, half))) << bits;
      ASSERT_EQ(f32_to_f16(f16), half);
    }
    if (std::isnan(reference::half_value(DType::bf16, half))) {
      ASSERT_TRUE(std::isnan(bf16)) << bits;
      ASSERT_TRUE(std::isnan(bf16_to_f32(f32_to_bf16(bf16)))) << bits;
    } else {
      ASSERT_EQ(bits_of(bf16), bits_of(reference::half_value(DType::bf16, half))) << bits;
      ASSERT_EQ(f32_to_bf16(bf16), half);
    }
  }
}

// Between two neighbours: the middle, and the next f32 on either side of it.
TEST(Types, RoundsToTheNearestHalfAndTiesToEven) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    const std::uint32_t infinity = dtype == DType::f16 ? 0x7c00 : 0x7f80;
    for (std::uint32_t bits = 0; bits < infinity; ++bits) {
      const double low = reference::half_magnitude(dtype, bits), high = reference::half_magnitude(dtype, bits + 1);
      const auto middle = static_cast<float>((low + high) / 2);
      for (const float value : {middle, std::nextafterf(middle, 0.0f), std::nextafterf(middle, HUGE_VALF)})
        for (const float sign : {1.0f, -1.0f}) {
          const std::uint16_t rounded = dtype == DType::f16 ? f32_to_f16(sign * value) : f32_to_bf16(sign * value);
          ASSERT_EQ(rounded, reference::round_to_half(dtype, sign * value)) << to_string(dtype) << " " << sign * value;
        }
    }
  }
  EXPECT_EQ(f32_to_f16(65519.0f), 0x7bff);
  EXPECT_EQ(f32_to_f16(65520.0f), 0x7c00);
  EXPECT_EQ(f32_to_f16(-HUGE_VALF), 0xfc00);
  EXPECT_EQ(f32_to_bf16(3.4e38f), 0x7f80);
}

TEST(Error, NamesOfCodes) {
  EXPECT_STREQ(to_string(ErrorCode::invalid_argument), "invalid_argument");
  EXPECT_STREQ(to_string(ErrorCode::unsupported), "unsupported");
  EXPECT_STREQ(to_string(ErrorCode::timeout), "timeout");
  EXPECT_STREQ(to_string(ErrorCode::remote), "remote");
  EXPECT_STREQ(to_string(ErrorCode::corrupt_payload), "corrupt_payload");
  EXPECT_STREQ(to_string(ErrorCode::system), "system");
}

TEST(Error, CarriesCodeSentenceAndPosition) {
  const Error plain(ErrorCode::timeout, "rank 3 did not come");
  EXPECT_EQ(plain.code(), ErrorCode::timeout);
  EXPECT_STREQ(plain.what(), "rank 3 did not come");
  EXPECT_EQ(plain.position(), std::nullopt);
  EXPECT_EQ(Error(ErrorCode::corrupt_payload, "bad", 17).position(), std::optional<std::size_t>(17));
}

}  // namespace
}  // namespace thinwire::test
