#include "select/top_k.h"

#include <algorithm>
#include <cmath>

#include "core/hash.h"
#include "core/tuning.h"

namespace thinwire {
namespace {

// A key that at least k elements probably reach: of a sample of `groups` runs of neighbours, about one in each of as
// many equal strata, the key `sigmas` standard deviations below the rank that k corresponds to. 1 if no bound is worth taking.
std::uint32_t sampled_bound(const SampleSource& source, std::size_t k, double sigmas, Sample& sample) {
  const std::size_t stride = source.numel / kTopKSampleGroups;
  if (stride <= 2 * kTopKGroup || k >= source.numel / 4) return 1;
  sample.clear();
  for (std::uint32_t group = 0; group < kTopKSampleGroups; ++group) {
    const std::uint32_t hash = murmur3_32(group, sampling_seed(source.seed));
    const std::size_t position = group * stride + scale_hash(hash, static_cast<std::uint32_t>(stride));
    sample.add(source, position / kTopKGroup * kTopKGroup, kTopKGroup);  // in one cache line, if the unit is aligned
  }
  sample.read(source);
  const double expected =
      static_cast<double>(sample.size()) * static_cast<double>(k) / static_cast<double>(source.numel);
  const auto rank = static_cast<std::size_t>(expected + sigmas * std::sqrt(expected)) + 1;
  return rank < sample.size() ? sample.key_of_rank(rank) : 1;
}

}  // namespace

void TopKSelection::begin(const SampleSource& source, std::size_t k) {
  source_ = source;
  k_ = k;
  fallbacks_ = 0;
  const bool take = source.pass != nullptr && source.pass->put_back;
  candidates_.begin(k, sampled_bound(source, k, kTopKSigmas, sample_), source.side,
                    take ? &source.pass->put_back : nullptr);
}

void TopKSelection::finish(SparseGradient& out, TakenEntries& taken) {
  source_.pass = nullptr;  // it is over: the unit holds the values
  for (const bool again : {true, false}) {
    if (candidates_.complete()) break;
    ++fallbacks_;
    candidates_.abandon();
    const std::uint32_t lower = again ? sampled_bound(source_, k_, kTopKRetrySigmas, sample_) : 1;
    candidates_.begin(k_, std::min(lower, candidates_.first_bound() - 1), source_.side);
    candidates_.collect(source_.unit);
  }
  candidates_.finish(out, taken);
}

}  // namespace thinwire
