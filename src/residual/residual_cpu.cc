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

// The update of a block, element by element or vector by vector; each yields the new v. first() is the first element
// that was refused.
template <Update kUpdate>
class BlockUpdate {
 public:
  BlockUpdate(const MomentumRule& rule, const float* HWY_RESTRICT g, float* HWY_RESTRICT u, float* HWY_RESTRICT v,
              size_t count)
      : rule_(rule), g_(g), u_(u), v_(v), first_(count) {}

  size_t first() const { return first_; }

  HWY_INLINE float Element(size_t i) {
    float none = 0.0f;
    if (!accumulate_element(rule_, g_[i], kHasVelocity ? u_[i] : none, v_[i])) first_ = std::min(first_, i);
    return v_[i];
  }

  HWY_INLINE hn::Vec<Floats> Vector(size_t i) {
    const Floats d;
    const hn::RebindToSigned<Floats> di;
    const auto factor = hn::Set(d, rule_.momentum);
    const auto gradient = hn::LoadU(d, g_ + i);
    auto addend = gradient;
    auto velocity = gradient;
    if constexpr (kHasVelocity) {
      velocity = hn::Add(hn::Mul(factor, hn::LoadU(d, u_ + i)), gradient);
      addend = velocity;
      if constexpr (kUpdate == Update::nesterov) addend = hn::Add(hn::Mul(factor, velocity), gradient);
    }
    const auto value = kUpdate == Update::replace ? addend : hn::Add(hn::LoadU(d, v_ + i), addend);
    const auto exponent = hn::Set(di, 0x7f800000);
    if (HWY_UNLIKELY(!hn::AllFalse(di, hn::Eq(hn::And(hn::BitCast(di, value), exponent), exponent)))) {
      for (size_t j = i; j < i + hn::Lanes(d); ++j) Element(j);
      return hn::LoadU(d, v_ + i);
    }
    hn::StoreU(value, d, v_ + i);
    if constexpr (kHasVelocity) hn::StoreU(velocity, d, u_ + i);
    return value;
  }

 private:
  static constexpr bool kHasVelocity = kUpdate == Update::momentum || kUpdate == Update::nesterov;
  const MomentumRule rule_;
  const float* HWY_RESTRICT g_;
  float* HWY_RESTRICT u_;
  float* HWY_RESTRICT v_;
  size_t first_;
};

// With `hits` null: the update alone.
template <Update kUpdate>
size_t Accumulate(const MomentumRule& rule, const float* g, float* u, float* v, size_t count, uint32_t bound,
                  uint32_t* hits, size_t* found) {
  BlockUpdate<kUpdate> update(rule, g, u, v, count);
  if (hits != nullptr) {
    *found = FindHits([&update](size_t i) HWY_ATTR { return update.Vector(i); },
                      [&update](size_t i) HWY_ATTR { return update.Element(i); }, count, bound, hits);
    return update.first();
  }
  const size_t lanes = hn::Lanes(Floats());
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) update.Vector(i);
  for (; i < count; ++i) update.Element(i);
  return update.first();
}

size_t AccumulateBlock(const MomentumRule& rule, const float* g, float* u, float* v, size_t count, uint32_t bound,
                       uint32_t* hits, size_t* found) {
  if (!rule.error_feedback) return Accumulate<Update::replace>(rule, g, u, v, count, bound, hits, found);
  if (rule.nesterov) return Accumulate<Update::nesterov>(rule, g, u, v, count, bound, hits, found);
  if (rule.momentum != 0.0f) return Accumulate<Update::momentum>(rule, g, u, v, count, bound, hits, found);
  return Accumulate<Update::plain>(rule, g, u, v, count, bound, hits, found);
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
  return HWY_DYNAMIC_DISPATCH(AccumulateBlock)(rule, g, u, v, count, kNoBound, nullptr, nullptr);
}

std::size_t accumulate_and_find(const MomentumRule& rule, const float* g, float* u, float* v, std::size_t count,
                                std::uint32_t bound, std::uint32_t* hits, std::size_t& found) {
  return HWY_DYNAMIC_DISPATCH(AccumulateBlock)(rule, g, u, v, count, bound, hits, &found);
}

}  // namespace thinwire
#endif
