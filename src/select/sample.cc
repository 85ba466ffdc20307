#include "select/sample.h"

#include <algorithm>

#include "core/magnitude.h"
#include "core/tuning.h"
#include "select/candidates.h"

namespace thinwire {

void Sample::clear() noexcept {
  places_.clear();
  runs_.clear();
  values_.clear();
  segment_ = segment_begin_ = 0;
}

void Sample::add(const SampleSource& source, std::size_t position, std::size_t count) {
  if (position < segment_begin_) segment_ = segment_begin_ = 0;
  while (position - segment_begin_ >= source.unit[segment_].numel) segment_begin_ += source.unit[segment_++].numel;
  const UnitSegment& segment = source.unit[segment_];
  const std::size_t within = position - segment_begin_;
  count = std::min(count, segment.numel - within);
  places_.push_back(segment.values + within);
  runs_.push_back(
      {.offset = static_cast<std::uint32_t>(segment.offset + within), .count = static_cast<std::uint32_t>(count)});
  values_.resize(values_.size() + count);
}

void Sample::read(const SampleSource& source) {
  fetch(source);
  if (source.side == Side::both) return;
  for (float& value : values_)
    if (sided_key(value, source.side) < 0) value = 0.0f;
}

void Sample::fetch(const SampleSource& source) {
  if (source.pass != nullptr && source.pass->peek) {
    source.pass->peek(runs_, values_.data());
    return;
  }
  float* out = values_.data();
  for (std::size_t r = 0; r < runs_.size(); ++r) {
    if (r + kSamplePrefetch < runs_.size()) {
      const float* ahead = places_[r + kSamplePrefetch];
      __builtin_prefetch(ahead);
      __builtin_prefetch(ahead + runs_[r + kSamplePrefetch].count - 1);
    }
    out = std::copy_n(places_[r], runs_[r].count, out);
  }
}

std::uint32_t Sample::key_of_rank(std::size_t rank) { return cut_after(values_, rank, keys_).key; }

}  // namespace thinwire
