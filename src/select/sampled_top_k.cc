#include "select/sampled_top_k.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/hash.h"
#include "core/magnitude.h"
#include "core/tuning.h"

namespace thinwire {
namespace {

// Every so many positions are sampled. Without a factor that the sizes of layers are made of, or each sample would come
// from the same few columns, or the same place of every filter.
std::size_t sample_stride(const SampledTopK& selector, std::size_t numel) {
  const double wanted = std::max(std::ceil(selector.sample_fraction * static_cast<double>(numel)),
                                 std::ceil(kSampledTopKSurvivors / selector.density));
  auto stride = std::max<std::size_t>(1, static_cast<std::size_t>(static_cast<double>(numel) / wanted));
  while (std::gcd(stride, std::size_t{2 * 3 * 5 * 7}) != 1) --stride;
  return stride;
}

}  // namespace

void SampledTopKSelection::begin(const SampleSource& source, const SampledTopK& selector, std::size_t k) {
  source_ = source;
  source_.pass = nullptr;
  selector_ = selector;
  k_ = k;
  fallbacks_ = 0;
}

// A key that about k elements reach; 1, and so the exact k largest, where the sample would be the unit.
std::uint32_t SampledTopKSelection::threshold() {
  const std::size_t stride = sample_stride(selector_, source_.numel);
  if (stride == 1) return 1;
  sample_.clear();
  const std::uint32_t hash = murmur3_32(0, sampling_seed(source_.seed));
  for (std::size_t position = scale_hash(hash, static_cast<std::uint32_t>(stride)); position < source_.numel;
       position += stride)
    sample_.add(source_, position, 1);
  sample_.read(source_);
  return sample_.key_of_rank(
      static_cast<std::size_t>(std::ceil(static_cast<double>(sample_.size()) * selector_.density)));
}

void SampledTopKSelection::finish(SparseGradient& out, TakenEntries& taken) {
  std::uint32_t least = threshold();
  const auto collect = [&] {
    candidates_.begin(k_, least, source_.side);
    candidates_.collect(source_.unit);
    return static_cast<double>(candidates_.found()) >= kSampledTopKEnough * static_cast<double>(k_);
  };
  for (int round = 0; !collect() && candidates_.first_bound() > 1 && round < kSampledTopKRounds; ++round) {
    ++fallbacks_;
    least = magnitude_key(static_cast<float>(double{magnitude_of_key(least)} * kSampledTopKLower));
  }
  candidates_.finish(out, taken);
}

}  // namespace thinwire
