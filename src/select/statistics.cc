#include "select/statistics.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/magnitude.h"

namespace thinwire {

void Statistics::begin(std::size_t numel, Side side) {
  numel_ = numel;
  side_ = side;
  sum_ = 0;
  max_ = 0;
}

void Statistics::collect(const UnitBlock& block) {
  const float* const values = block.values;
  if (side_ == Side::both) {
    sum_ += block_sum(block.count, [values](std::size_t i) { return double{std::fabs(values[i])}; });
    for (std::size_t i = 0; i < block.count; ++i) max_ = std::max(max_, magnitude_key(values[i]));
    return;
  }
  const double sum = block_sum(block.count, [values](std::size_t i) { return double{values[i]}; });
  sum_ += side_ == Side::largest ? sum : -sum;
  auto max = static_cast<std::int32_t>(max_);
  for (std::size_t i = 0; i < block.count; ++i) max = std::max(max, sided_key(values[i], side_));
  max_ = static_cast<std::uint32_t>(max);
}

std::uint32_t Statistics::key_above(double ratio) const {
  const double mean = sum_ / static_cast<double>(numel_);
  const double threshold = mean + ratio * (double{magnitude_of_key(max_)} - mean);
  if (threshold < 0) return 1;
  float below = static_cast<float>(std::min(threshold, double{std::numeric_limits<float>::max()}));
  if (double{below} > threshold) below = std::nextafter(below, 0.0f);
  return magnitude_key(below) + 1;
}

void collect_trimmed(Candidates& candidates, const SampleSource& source, std::size_t k, const Statistics& statistics,
                     double epsilon) {
  for (int trim = 1;; ++trim) {
    const double ratio = 1.0 - trim * epsilon;
    candidates.begin(k, ratio < 0 ? 1 : statistics.key_above(ratio), source.side);
    candidates.collect(source.unit);
    if (candidates.complete()) return;
  }
}

}  // namespace thinwire
