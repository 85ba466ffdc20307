// Finds the elements of a block that reach a bound: the loop that stages 1 and 2 share. Included once per SIMD target.
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
#include "core/tuning.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace thinwire {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// At most eight lanes, so that a mask is one byte on every target.
using Floats = hn::CappedTag<float, 8>;

// Hits are found in groups of 32 elements: one bit of a word each.
inline constexpr size_t kGroup = 32;
inline constexpr size_t kGroupVectors = kGroup / hn::MaxLanes(Floats());

// Asks for what a sweep reads a while later: with a comparison for each element the processor does not look as far ahead
// on its own as it does in a bare read.
HWY_INLINE void PrefetchGroup(const float* group) {
  constexpr size_t kCacheLine = 16;
  for (size_t i = 0; i < kGroup; i += kCacheLine) __builtin_prefetch(group + kSweepPrefetch + i);
}

template <class D>
HWY_INLINE uint32_t MaskByte(D d, hn::Mask<D> mask) {
  uint8_t bytes[8] = {};
  hn::StoreMaskBits(d, mask, bytes);
  return bytes[0];
}

// Of the group vector_at(0) … vector_at(kGroupVectors - 1): a bit for each element whose key under the side is at least
// `bound`; kSided says that the side is not `both`. One bit operation makes a key either way.
template <bool kSided, class VectorAt>
HWY_INLINE uint32_t GroupHits(const VectorAt& vector_at, uint32_t bound, Side side) {
  const hn::RebindToSigned<Floats> di;
  const auto key_bits = hn::Set(di, static_cast<int32_t>(kSided ? sign_flip(side) : kMagnitudeBits));
  const auto below = hn::Set(di, static_cast<int32_t>(bound - 1));
  uint32_t mask = 0;
  HWY_UNROLL(8)
  for (size_t j = 0; j < kGroupVectors; ++j) {
    const auto bits = hn::BitCast(di, vector_at(j));
    const auto key = kSided ? hn::Xor(bits, key_bits) : hn::And(bits, key_bits);
    mask |= MaskByte(di, hn::Gt(key, below)) << (j * hn::MaxLanes(Floats()));
  }
  return mask;
}

// Positions, ascending, of the hits among the elements [0, count); returns how many. group_at(i) yields the hits of the
// group that starts at i, element_at(i) whether one element is a hit; each is asked once, in order. First the groups with
// hits are noted without a branch, then they are opened. count <= kBlock; `hits` needs room for count + 1.
template <class GroupAt, class ElementAt>
HWY_INLINE size_t FindHits(const GroupAt& group_at, const ElementAt& element_at, size_t count,
                           uint32_t* HWY_RESTRICT hits) {
  uint32_t masks[kBlock / kGroup + 1];
  uint32_t starts[kBlock / kGroup + 1];
  size_t groups = 0;
  const size_t whole = count / kGroup * kGroup;
  for (size_t i = 0; i < whole; i += kGroup) {
    const uint32_t mask = group_at(i);
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
    found += element_at(i);
  }
  return found;
}

}  // namespace HWY_NAMESPACE
}  // namespace thinwire
HWY_AFTER_NAMESPACE();

#endif
