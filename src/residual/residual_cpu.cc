// Stage 1 on the CPU: the update of one block. Enters: g, u, v in the L1 cache. Leaves: u, v.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "residual/residual_cpu.cc"
#include "hwy/foreach_target.h"
// The order matters: foreach_target includes this file once more for each target.
#include <algorithm>
#include <bit>
#include <cstdint>

#include "hwy/highway.h"
#include "residual/residual_kernels.h"

HWY_BEFORE_NAMESPACE();
namespace thinwire {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

enum class Update { replace, plain, momentum, nesterov };

template <Update kUpdate>
size_t ScalarUpdate(float m, const float* g, float* u, float* v, size_t i) {
  float velocity = 0.0f;
  float addend = g[i];
  if constexpr (kUpdate == Update::momentum || kUpdate == Update::nesterov) {
    velocity = m * u[i];
    velocity += g[i];
    addend = velocity;
    if constexpr (kUpdate == Update::nesterov) {
      addend = m * velocity;
      addend += g[i];
    }
  }
  const float value = kUpdate == Update::replace ? addend : v[i] + addend;
  if ((std::bit_cast<uint32_t>(value) & 0x7f800000u) == 0x7f800000u) return 1;
  v[i] = value;
  if constexpr (kUpdate == Update::momentum || kUpdate == Update::nesterov) u[i] = velocity;
  return 0;
}

template <Update kUpdate>
size_t UpdateBlock(float m, const float* HWY_RESTRICT g, float* HWY_RESTRICT u, float* HWY_RESTRICT v, size_t count) {
  const hn::ScalableTag<float> d;
  const hn::RebindToSigned<decltype(d)> di;
  const size_t lanes = hn::Lanes(d);
  const auto factor = hn::Set(d, m);
  const auto exponent = hn::Set(di, 0x7f800000);
  size_t first = count;
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto gradient = hn::LoadU(d, g + i);
    auto addend = gradient;
    auto velocity = gradient;
    if constexpr (kUpdate == Update::momentum || kUpdate == Update::nesterov) {
      velocity = hn::Add(hn::Mul(factor, hn::LoadU(d, u + i)), gradient);
      addend = velocity;
      if constexpr (kUpdate == Update::nesterov) addend = hn::Add(hn::Mul(factor, velocity), gradient);
    }
    const auto before = hn::LoadU(d, v + i);
    const auto value = kUpdate == Update::replace ? addend : hn::Add(before, addend);
    const auto broken = hn::Eq(hn::And(hn::BitCast(di, value), exponent), exponent);
    if (HWY_LIKELY(hn::AllFalse(di, broken))) {
      hn::StoreU(value, d, v + i);
      if constexpr (kUpdate == Update::momentum || kUpdate == Update::nesterov) hn::StoreU(velocity, d, u + i);
    } else {
      for (size_t j = i; j < i + lanes; ++j)
        if (ScalarUpdate<kUpdate>(m, g, u, v, j)) first = std::min(first, j);
    }
  }
  for (; i < count; ++i)
    if (ScalarUpdate<kUpdate>(m, g, u, v, i)) first = std::min(first, i);
  return first;
}

size_t Replace(float m, const float* g, float* u, float* v, size_t count) {
  return UpdateBlock<Update::replace>(m, g, u, v, count);
}
size_t Plain(float m, const float* g, float* u, float* v, size_t count) {
  return UpdateBlock<Update::plain>(m, g, u, v, count);
}
size_t Momentum(float m, const float* g, float* u, float* v, size_t count) {
  return UpdateBlock<Update::momentum>(m, g, u, v, count);
}
size_t Nesterov(float m, const float* g, float* u, float* v, size_t count) {
  return UpdateBlock<Update::nesterov>(m, g, u, v, count);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace thinwire
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace thinwire {
namespace {
HWY_EXPORT(Replace);
HWY_EXPORT(Plain);
HWY_EXPORT(Momentum);
HWY_EXPORT(Nesterov);
}  // namespace

std::size_t accumulate_block(const MomentumRule& rule, const float* g, float* u, float* v, std::size_t count) {
  const float m = rule.momentum;
  if (!rule.error_feedback) return HWY_DYNAMIC_DISPATCH(Replace)(m, g, u, v, count);
  if (rule.nesterov) return HWY_DYNAMIC_DISPATCH(Nesterov)(m, g, u, v, count);
  if (m != 0.0f) return HWY_DYNAMIC_DISPATCH(Momentum)(m, g, u, v, count);
  return HWY_DYNAMIC_DISPATCH(Plain)(m, g, u, v, count);
}

}  // namespace thinwire
#endif
