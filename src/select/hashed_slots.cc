#include "select/hashed_slots.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "core/hash.h"
#include "core/magnitude.h"
#include "core/tuning.h"
#include "select/blocks.h"
#include "select/select_kernels.h"

namespace thinwire {

void HashedSlotsSelection::begin(const SampleSource& source, const HashedSlots& selector, std::size_t k,
                                 std::size_t capacity) {
  source_ = source;
  source_.pass = nullptr;
  selector_ = selector;
  capacity_ = capacity;
  const bool layout_a = selector.layout == HashedSlots::Layout::a;
  rank_ = std::min(layout_a ? 2 * k : k, source.numel);
  const std::size_t slots = layout_a ? k : 4 * k;
  slot_indices_.assign(slots, kEmptySlot);
  slot_values_.assign(slots, 0.0f);
}

// The magnitude of rank `rank_` as a sample with replacement shows it; exactly, where the sample would not be much
// smaller than the unit. At least 1, so that zeros are no candidates.
std::uint32_t HashedSlotsSelection::threshold() {
  const auto numel = static_cast<double>(source_.numel);
  const double share = static_cast<double>(rank_) / numel;
  const double samples =
      std::max(std::ceil(selector_.sample_fraction * numel), std::ceil(kHashedSampleSurvivors / share));
  if (2 * samples >= numel) {
    whole_.begin(rank_, 1, source_.side);
    whole_.collect(source_.unit);
    return whole_.least_of_best();
  }
  sample_.clear();
  for (std::uint32_t i = 0; i < static_cast<std::uint32_t>(samples); ++i)
    sample_.add(source_,
                scale_hash(murmur3_32(i, sampling_seed(source_.seed)), static_cast<std::uint32_t>(source_.numel)), 1);
  sample_.read(source_);
  const auto sampled_rank = static_cast<std::size_t>(std::floor(samples * share + 0.5));
  return std::max(sample_.key_of_rank(std::max<std::size_t>(sampled_rank, 1)), 1u);
}

void HashedSlotsSelection::insert(const float* values, std::size_t count, std::uint32_t offset,
                                  std::uint32_t threshold) {
  std::array<std::uint32_t, kBlock + 1> hits;
  const std::size_t found = find_at_least(values, count, threshold, source_.side, hits.data());
  const auto slots = static_cast<std::uint32_t>(slot_indices_.size());
  const std::uint32_t first = source_.unit.front().offset;
  for (std::size_t j = 0; j < found; ++j) {
    const std::uint32_t index = offset + hits[j];
    const std::uint32_t slot = scale_hash(murmur3_32(index - first, source_.seed), slots);
    // Entries come in ascending order, so of equal magnitudes the smaller index is there first.
    if (magnitude_key(values[hits[j]]) <= magnitude_key(slot_values_[slot])) continue;
    slot_indices_[slot] = index;
    slot_values_[slot] = values[hits[j]];
  }
}

void HashedSlotsSelection::finish(SparseGradient& out, TakenEntries& taken) {
  taken.count = 0;
  const std::uint32_t least = threshold();
  for_each_block(source_.unit, [&](const float* values, std::size_t count, std::uint32_t offset) {
    insert(values, count, offset, least);
  });
  if (selector_.layout == HashedSlots::Layout::a) {
    out.indices.assign(slot_indices_.begin(), slot_indices_.end());
    out.values.assign(slot_values_.begin(), slot_values_.end());
    out.hashed_order = true;
    out.hash_seed = source_.seed;
    return;
  }
  order_.clear();
  for (std::uint32_t slot = 0; slot < slot_indices_.size(); ++slot)
    if (slot_indices_[slot] != kEmptySlot) order_.push_back(slot);
  std::sort(order_.begin(), order_.end(),
            [this](std::uint32_t a, std::uint32_t b) { return slot_indices_[a] < slot_indices_[b]; });
  for (const std::uint32_t slot : order_) {
    out.indices.push_back(slot_indices_[slot]);
    out.values.push_back(slot_values_[slot]);
  }
  keep_largest(out, capacity_, order_);
}

}  // namespace thinwire
