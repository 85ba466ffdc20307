#include "select/top_k.h"

#include <algorithm>
#include <cmath>

#include "core/hash.h"
#include "core/tuning.h"

namespace thinwire {
namespace {

// A key that at least k elements probably reach: of a sample of `groups` runs of neighbours, one run in each of as many
// equal strata, the key `sigmas` standard deviations below the rank that k corresponds to. 1 if no bound is worth taking.
std::uint32_t sampled_bound(const SampleSource& source, std::size_t k, double sigmas,
                            std::vector<std::uint32_t>& keys) {
  const std::size_t stride = source.numel / kTopKSampleGroups;
  if (stride <= 2 * kTopKGroup || k >= source.numel / 4) return 1;
  keys.clear();
  for (std::size_t group = 0; group < kTopKSampleGroups; ++group) {
    const std::uint32_t hash = murmur3_32(static_cast<std::uint32_t>(group), sampling_seed(source.seed));
    const std::size_t within = scale_hash(hash, static_cast<std::uint32_t>(stride - kTopKGroup + 1));
    source.read(group * stride + within, kTopKGroup, keys);
  }
  const double expected = static_cast<double>(keys.size()) * static_cast<double>(k) / static_cast<double>(source.numel);
  const auto rank = static_cast<std::size_t>(expected + sigmas * std::sqrt(expected)) + 1;
  return rank < keys.size() ? key_of_rank(keys, rank) : 1;
}

}  // namespace

void TopKSelection::begin(const SampleSource& source, std::size_t k) {
  source_ = source;
  k_ = k;
  fallbacks_ = 0;
  candidates_.begin(k, sampled_bound(source, k, kTopKSigmas, keys_));
}

void TopKSelection::finish(SparseGradient& out) {
  source_.peek = nullptr;  // the pass is over: the unit holds the values
  for (const bool again : {true, false}) {
    if (candidates_.found() >= k_ || candidates_.bound() <= 1) break;
    ++fallbacks_;
    const std::uint32_t lower = again ? sampled_bound(source_, k_, kTopKRetrySigmas, keys_) : 1;
    candidates_.begin(k_, std::min(lower, candidates_.bound() - 1));
    candidates_.collect(source_.unit);
  }
  candidates_.take(out);
}

}  // namespace thinwire
