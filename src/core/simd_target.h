// The SIMD targets that this machine and build can run; tests run everything on each of them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace thinwire {

/// Best first; Highway's target bits.
std::vector<std::int64_t> simd_targets();
/// "AVX2", "SSE4", …
std::string simd_target_name(std::int64_t target);
/// Makes all kernels run on `target` from now on; 0 returns to the best one. Not while kernels run.
void force_simd_target(std::int64_t target);
/// The target that kernels run on now.
std::int64_t current_simd_target();

}  // namespace thinwire
