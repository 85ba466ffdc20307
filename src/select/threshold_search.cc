#include "select/threshold_search.h"

#include <algorithm>

#include "core/magnitude.h"
#include "core/tuning.h"

namespace thinwire {

void ThresholdSearchSelection::begin(const SampleSource& source, const ThresholdSearch& selector, std::size_t k,
                                     std::size_t capacity, SelectionMemory* memory) {
  source_ = source;
  reuse_interval_ = selector.reuse_interval;
  k_ = k;
  capacity_ = capacity;
  fallbacks_ = 0;
  memory_ = reuse_interval_ > 1 ? memory : nullptr;
  statistics_.begin(source.numel, source.side);
}

void ThresholdSearchSelection::finish(SparseGradient& out, TakenEntries& taken) {
  if (!reuse()) search();
  candidates_.finish(out, taken);
}

// Takes what lies above the threshold of an earlier search. The residual moves between steps, and near its threshold a
// small move can mean a large one in the count: false if too few are found.
bool ThresholdSearchSelection::reuse() {
  if (memory_ == nullptr || memory_->uses == 0 || memory_->uses >= reuse_interval_) return false;
  candidates_.begin(capacity_, statistics_.key_above(memory_->ratio), source_.side);
  candidates_.collect(source_.unit);
  if (2 * candidates_.found() < k_) {
    ++fallbacks_;
    return false;
  }
  ++memory_->uses;
  return true;
}

// Bisects until k to `capacity` entries lie above the threshold. One entry more than `capacity` is kept from the sweeps,
// so the count above any threshold is known, or known to be too large, without another one.
void ThresholdSearchSelection::search() {
  collect_trimmed(candidates_, source_, capacity_ + 1, statistics_, kThresholdSearchTrim);
  const std::span<const float> held = candidates_.best();
  double low = 0;
  double high = 1;
  for (int probe = 0; probe < kThresholdSearchProbes; ++probe) {
    const double ratio = low + (high - low) / 2;
    const std::uint32_t least = statistics_.key_above(ratio);
    const auto count = static_cast<std::size_t>(
        std::count_if(held.begin(), held.end(), [least](float value) { return magnitude_key(value) >= least; }));
    if (count >= k_ && count <= capacity_) {
      if (memory_ != nullptr) *memory_ = {.ratio = ratio, .uses = 1};
      return candidates_.limit(count);
    }
    (count < k_ ? high : low) = ratio;
  }
  ++fallbacks_;
  if (memory_ != nullptr) *memory_ = {};
  candidates_.limit(k_);
}

}  // namespace thinwire
