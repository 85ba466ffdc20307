// Stage 1 on the CPU: the update of one block. Enters: g, u, v in the L1 cache. Leaves: u, v.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "residual/residual_cpu.cc"
#include "hwy/foreach_target.h"
// The order matters: foreach_target includes this file once more for each target.
#include <algorithm>
#include <cstdint>

#include "core/find_hits-inl.h"
#include "hwy/highway.h"
#include "residual/residual_kernels.h"

HWY_BEFORE_NAMESPACE();
namespace thinwire {
namespace HWY_NAMESPACE {
namespace {

enum class Update { replace, plain, momentum, nesterov };

// The update of a block, in groups and single elements. What would not be finite is never stored.
// kSided: the side of the hits is not `both`.
template <Update kUpdate, bool kSided>
class BlockUpdate {
 public:
  BlockUpdate(const MomentumRule& rule, const float* g, float* u, float* v, size_t count, uint32_t bound, Side side)
      : rule_(rule), g_(g), u_(u), v_(v), bound_(bound), side_(kSided ? side : Side::both), first_(count) {}

  // The first element that was refused.
  size_t first() const { return first_; }

  // Whether the new v is a hit.
  HWY_INLINE bool Element(size_t i) {
    float none = 0.0f;
    if (!accumulate_element(rule_, g_[i], kHasVelocity ? u_[i] : none, v_[i])) first_ = std::min(first_, i);
    return reaches(v_[i], bound_, side_);
  }

  HWY_INLINE uint32_t Group(size_t begin) {
    const Floats d;
    const auto factor = hn::Set(d, rule_.momentum);
    const auto decay = hn::Set(d, rule_.residual_decay);
    hn::Vec<Floats> velocities[kGroupVectors];
    hn::Vec<Floats> values[kGroupVectors];
    HWY_UNROLL(8)
    for (size_t j = 0; j < kGroupVectors; ++j) {
      const size_t i = begin + j * hn::MaxLanes(d);
      const auto gradient = hn::LoadU(d, g_ + i);
      auto addend = gradient;
      if constexpr (kHasVelocity) {
        velocities[j] = hn::Add(hn::Mul(factor, hn::LoadU(d, u_ + i)), gradient);
        addend = velocities[j];
        if constexpr (kUpdate == Update::nesterov) addend = hn::Add(hn::Mul(factor, velocities[j]), gradient);
      }
      values[j] = kUpdate == Update::replace ? addend : hn::Add(hn::Mul(decay, hn::LoadU(d, v_ + i)), addend);
    }
    if (HWY_UNLIKELY(!AllFinite(values))) return GroupByElements(begin);
    HWY_UNROLL(8)
    for (size_t j = 0; j < kGroupVectors; ++j) {
      const size_t i = begin + j * hn::MaxLanes(d);
      if constexpr (kHasVelocity) hn::StoreU(velocities[j], d, u_ + i);
      hn::StoreU(values[j], d, v_ + i);
    }
    return GroupHits<kSided>([&values](size_t j) HWY_ATTR { return values[j]; }, bound_, side_);
  }

 private:
  static constexpr bool kHasVelocity = kUpdate == Update::momentum || kUpdate == Update::nesterov;

  static HWY_INLINE bool AllFinite(const hn::Vec<Floats> (&values)[kGroupVectors]) {
    const hn::RebindToSigned<Floats> di;
    const auto magnitude = hn::Set(di, 0x7fffffff);
    auto largest = hn::Zero(di);
    HWY_UNROLL(8)
    for (size_t j = 0; j < kGroupVectors; ++j)
      largest = hn::Max(largest, hn::And(hn::BitCast(di, values[j]), magnitude));
    return hn::AllTrue(di, hn::Lt(largest, hn::Set(di, 0x7f800000)));
  }

  HWY_NOINLINE uint32_t GroupByElements(size_t begin) {
    uint32_t hits = 0;
    for (size_t j = 0; j < kGroup; ++j) hits |= uint32_t{Element(begin + j)} << j;
    return hits;
  }

  const MomentumRule rule_;
  const float* HWY_RESTRICT g_;
  float* HWY_RESTRICT u_;
  float* HWY_RESTRICT v_;
  uint32_t bound_;
  Side side_;
  size_t first_;
};

// The hits that a block's update looks for; with `positions` null the update is all there is.
struct Hits {
  uint32_t bound;
  Side side;
  uint32_t* positions;
  size_t* found;
};

template <Update kUpdate, bool kSided>
size_t AccumulateAs(const MomentumRule& rule, const float* g, float* u, float* v, size_t count, const Hits& hits) {
  BlockUpdate<kUpdate, kSided> update(rule, g, u, v, count, hits.bound, hits.side);
  if (hits.positions != nullptr) {
    *hits.found = FindHits([&update](size_t i) HWY_ATTR { return update.Group(i); },
                           [&update](size_t i) HWY_ATTR { return update.Element(i); }, count, hits.positions);
    return update.first();
  }
  size_t i = 0;
  for (; i + kGroup <= count; i += kGroup) update.Group(i);
  for (; i < count; ++i) update.Element(i);
  return update.first();
}

template <Update kUpdate>
size_t Accumulate(const MomentumRule& rule, const float* g, float* u, float* v, size_t count, const Hits& hits) {
  return hits.side == Side::both ? AccumulateAs<kUpdate, false>(rule, g, u, v, count, hits)
                                 : AccumulateAs<kUpdate, true>(rule, g, u, v, count, hits);
}

size_t AccumulateBlock(const MomentumRule& rule, const float* g, float* u, float* v, size_t count, uint32_t bound,
                       Side side, uint32_t* positions, size_t* found) {
  const Hits hits{.bound = bound, .side = side, .positions = positions, .found = found};
  if (!rule.error_feedback) return Accumulate<Update::replace>(rule, g, u, v, count, hits);
  if (rule.nesterov) return Accumulate<Update::nesterov>(rule, g, u, v, count, hits);
  if (rule.momentum != 0.0f) return Accumulate<Update::momentum>(rule, g, u, v, count, hits);
  return Accumulate<Update::plain>(rule, g, u, v, count, hits);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace thinwire
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace thinwire {
namespace {
HWY_EXPORT(AccumulateBlock);
}  // namespace

std::size_t accumulate_block(const MomentumRule& rule, const float* g, float* u, float* v, std::size_t count) {
  return HWY_DYNAMIC_DISPATCH(AccumulateBlock)(rule, g, u, v, count, kNoBound, Side::both, nullptr, nullptr);
}

std::size_t accumulate_and_find(const MomentumRule& rule, const float* g, float* u, float* v, std::size_t count,
                                std::uint32_t bound, Side side, std::uint32_t* hits, std::size_t& found) {
  return HWY_DYNAMIC_DISPATCH(AccumulateBlock)(rule, g, u, v, count, bound, side, hits, &found);
}

}  // namespace thinwire
#endif
