// Finds the elements of a block whose magnitude reaches a bound: the loop that stages 1 and 2 share. Included once per
// SIMD target.
#if defined(THINWIRE_CORE_FIND_HITS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef THINWIRE_CORE_FIND_HITS_INL_H_
#undef THINWIRE_CORE_FIND_HITS_INL_H_
#else
#define THINWIRE_CORE_FIND_HITS_INL_H_
#endif

#include <bit>
#include <cstddef>
#include <cstdint>

#include "core/magnitude.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace thinwire {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// At most eight lanes, so that a mask is one byte on every target.
using Floats = hn::CappedTag<float, 8>;

// Elements that `find_hits` asks for in one go.
inline constexpr size_t kHitGroup = 32;

template <class D>
HWY_INLINE uint32_t MaskByte(D d, hn::Mask<D> mask) {
  uint8_t bytes[8] = {};
  hn::StoreMaskBits(d, mask, bytes);
  return bytes[0];
}

// Positions, ascending, of those of the elements [0, count) whose key is at least `bound`; returns how many.
// vector_at(i) yields Lanes(Floats()) elements from i on, element_at(i) one; each is asked once, in order. First the
// non-empty groups of 32 are noted without a branch, then they are opened. count <= kBlock; `hits` needs room for
// count + 1.
template <class VectorAt, class ElementAt>
HWY_INLINE size_t FindHits(const VectorAt& vector_at, const ElementAt& element_at, size_t count, uint32_t bound,
                           uint32_t* HWY_RESTRICT hits) {
  const Floats d;
  const hn::RebindToSigned<Floats> di;
  const size_t lanes = hn::Lanes(d);
  const auto magnitude = hn::Set(di, 0x7fffffff);
  const auto below = hn::Set(di, static_cast<int32_t>(bound - 1));
  uint32_t masks[kBlock / kHitGroup + 1];
  uint32_t starts[kBlock / kHitGroup + 1];
  size_t groups = 0;
  const size_t whole = count / kHitGroup * kHitGroup;
  for (size_t i = 0; i < whole; i += kHitGroup) {
    uint32_t mask = 0;
    HWY_UNROLL(8)
    for (size_t j = 0; j < kHitGroup; j += lanes) {
      const auto key = hn::And(hn::BitCast(di, vector_at(i + j)), magnitude);
      mask |= MaskByte(di, hn::Gt(key, below)) << j;
    }
    masks[groups] = mask;
    starts[groups] = static_cast<uint32_t>(i);
    groups += mask != 0;
  }
  size_t found = 0;
  for (size_t group = 0; group < groups; ++group)
    for (uint32_t mask = masks[group]; mask != 0; mask &= mask - 1)
      hits[found++] = starts[group] + static_cast<uint32_t>(std::countr_zero(mask));
  for (size_t i = whole; i < count; ++i) {
    hits[found] = static_cast<uint32_t>(i);
    found += magnitude_key(element_at(i)) >= bound;
  }
  return found;
}

}  // namespace HWY_NAMESPACE
}  // namespace thinwire
HWY_AFTER_NAMESPACE();

#endif
