// Stage 2 on the CPU: finds a block's candidates. Enters: v in the L1 cache. Leaves: offsets.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "select/select_cpu.cc"
#include "hwy/foreach_target.h"
// The order matters: foreach_target includes this file once more for each target.
#include <bit>
#include <cstdint>

#include "core/magnitude.h"
#include "hwy/highway.h"
#include "select/select_kernels.h"

HWY_BEFORE_NAMESPACE();
namespace thinwire {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// At most eight lanes, so that a mask is one byte on every target.
using Floats = hn::CappedTag<float, 8>;

template <class D>
HWY_INLINE uint32_t MaskByte(D d, hn::Mask<D> mask) {
  uint8_t bytes[8] = {};
  hn::StoreMaskBits(d, mask, bytes);
  return bytes[0];
}

// First the non-empty groups of 32 are gathered without a branch, then they are opened.
size_t FindAtLeast(const float* HWY_RESTRICT values, size_t count, uint32_t bound, uint32_t* HWY_RESTRICT offsets) {
  const Floats d;
  const hn::RebindToSigned<Floats> di;
  const size_t lanes = hn::Lanes(d);
  const auto magnitude = hn::Set(di, 0x7fffffff);
  const auto below = hn::Set(di, static_cast<int32_t>(bound) - 1);
  uint32_t masks[kBlock / 32 + 1];
  uint32_t starts[kBlock / 32 + 1];
  size_t groups = 0;
  const size_t whole = count / 32 * 32;
  for (size_t i = 0; i < whole; i += 32) {
    uint32_t mask = 0;
    for (size_t j = 0; j < 32; j += lanes) {
      const auto key = hn::And(hn::BitCast(di, hn::LoadU(d, values + i + j)), magnitude);
      mask |= MaskByte(di, hn::Gt(key, below)) << j;
    }
    masks[groups] = mask;
    starts[groups] = static_cast<uint32_t>(i);
    groups += mask != 0;
  }
  size_t found = 0;
  for (size_t group = 0; group < groups; ++group)
    for (uint32_t mask = masks[group]; mask != 0; mask &= mask - 1)
      offsets[found++] = starts[group] + static_cast<uint32_t>(std::countr_zero(mask));
  for (size_t i = whole; i < count; ++i) {
    offsets[found] = static_cast<uint32_t>(i);
    found += magnitude_key(values[i]) >= bound;
  }
  return found;
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace thinwire
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace thinwire {
namespace {
HWY_EXPORT(FindAtLeast);
}  // namespace

std::size_t find_at_least(const float* values, std::size_t count, std::uint32_t bound, std::uint32_t* offsets) {
  return HWY_DYNAMIC_DISPATCH(FindAtLeast)(values, count, bound, offsets);
}

}  // namespace thinwire
#endif
