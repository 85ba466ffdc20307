// Stage 2 on the CPU: finds a block's candidates. Enters: v in the L1 cache. Leaves: positions.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "select/select_cpu.cc"
#include "hwy/foreach_target.h"
// The order matters: foreach_target includes this file once more for each target.
#include "core/find_hits-inl.h"
#include "hwy/highway.h"
#include "select/select_kernels.h"

HWY_BEFORE_NAMESPACE();
namespace thinwire {
namespace HWY_NAMESPACE {
namespace {

template <bool kSided>
size_t FindAtLeastIn(const float* HWY_RESTRICT values, size_t count, uint32_t bound, Side side,
                     uint32_t* HWY_RESTRICT hits) {
  const auto group_at = [&](size_t i) HWY_ATTR {
    PrefetchGroup(values + i);
    const auto vector_at = [&](size_t j)
                               HWY_ATTR { return hn::LoadU(Floats(), values + i + j * hn::MaxLanes(Floats())); };
    return GroupHits<kSided>(vector_at, bound, side);
  };
  const auto element_at = [&](size_t i) { return reaches(values[i], bound, side); };
  return FindHits(group_at, element_at, count, hits);
}

size_t FindAtLeast(const float* HWY_RESTRICT values, size_t count, uint32_t bound, Side side,
                   uint32_t* HWY_RESTRICT hits) {
  if (side == Side::both) return FindAtLeastIn<false>(values, count, bound, Side::both, hits);
  return FindAtLeastIn<true>(values, count, bound, side, hits);
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

std::size_t find_at_least(const float* values, std::size_t count, std::uint32_t bound, Side side, std::uint32_t* hits) {
  return HWY_DYNAMIC_DISPATCH(FindAtLeast)(values, count, bound, side, hits);
}

}  // namespace thinwire
#endif
