#include "select/trimmed_top_k.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/magnitude.h"

namespace thinwire {
namespace {

// The least key whose magnitude exceeds `threshold`; never 0, so that zeros stay out.
std::uint32_t key_above(double threshold) {
  if (threshold < 0) return 1;
  float below = static_cast<float>(std::min(threshold, double{std::numeric_limits<float>::max()}));
  if (double{below} > threshold) below = std::nextafter(below, 0.0f);
  return magnitude_key(below) + 1;
}

}  // namespace

void TrimmedTopKSelection::begin(UnitView unit, std::size_t numel, std::size_t k, double epsilon) {
  unit_ = unit;
  numel_ = numel;
  k_ = k;
  epsilon_ = epsilon;
  sum_ = 0;
  max_ = 0;
}

void TrimmedTopKSelection::collect(const UnitBlock& block) {
  const float* const values = block.values;
  sum_ += block_sum(block.count, [values](std::size_t i) { return double{std::fabs(values[i])}; });
  for (std::size_t i = 0; i < block.count; ++i) max_ = std::max(max_, magnitude_key(values[i]));
}

void TrimmedTopKSelection::finish(SparseGradient& out, TakenEntries& taken) {
  const double mean = sum_ / static_cast<double>(numel_);
  const double max = magnitude_of_key(max_);
  for (int trim = 1;; ++trim) {
    const double ratio = 1.0 - trim * epsilon_;
    candidates_.begin(k_, ratio < 0 ? 1 : key_above(mean + ratio * (max - mean)));
    candidates_.collect(unit_);
    if (candidates_.complete()) break;
  }
  candidates_.finish(out, taken);
}

}  // namespace thinwire
