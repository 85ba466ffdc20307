// Names and sizes of the small types.
#include "thinwire/types.h"

#include <bit>

#include "thinwire/error.h"
#include "thinwire/parameter.h"

static_assert(std::endian::native == std::endian::little, "thinwire's wire format is written as it lies in memory");

namespace thinwire {

const char* to_string(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::invalid_argument:
      return "invalid_argument";
    case ErrorCode::unsupported:
      return "unsupported";
    case ErrorCode::timeout:
      return "timeout";
    case ErrorCode::remote:
      return "remote";
    case ErrorCode::corrupt_payload:
      return "corrupt_payload";
    case ErrorCode::system:
      return "system";
  }
  return "unknown";
}

const char* to_string(DType dtype) noexcept {
  switch (dtype) {
    case DType::f32:
      return "f32";
    case DType::f16:
      return "f16";
    case DType::bf16:
      return "bf16";
  }
  return "unknown";
}

std::size_t size_of(DType dtype) noexcept { return dtype == DType::f32 ? 4 : 2; }

std::size_t numel(const Bucket& bucket) noexcept {
  std::size_t sum = 0;
  for (const BucketSlice& slice : bucket.slices) sum += slice.numel;
  return sum;
}

}  // namespace thinwire
