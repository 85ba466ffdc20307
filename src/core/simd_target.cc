#include "core/simd_target.h"

#include "hwy/highway.h"

namespace thinwire {
namespace {
std::int64_t forced_target = 0;
}

std::vector<std::int64_t> simd_targets() {
  // The mock of force_simd_target must not hide the other targets.
  hwy::SetSupportedTargetsForTest(0);
  std::vector<std::int64_t> targets = hwy::SupportedAndGeneratedTargets();
  force_simd_target(forced_target);
  return targets;
}

std::string simd_target_name(std::int64_t target) { return hwy::TargetName(target); }

void force_simd_target(std::int64_t target) {
  forced_target = target;
  hwy::SetSupportedTargetsForTest(target);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

std::int64_t current_simd_target() { return forced_target != 0 ? forced_target : simd_targets().front(); }

}  // namespace thinwire
