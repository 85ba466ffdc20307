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
namespace {

// The key of rank `rank` as a sample with replacement shows it; 0 if the unit had better be read whole.
std::uint32_t sampled_threshold(const SampleSource& source, std::size_t rank, double sample_fraction,
                                std::vector<std::uint32_t>& keys) {
  const auto numel = static_cast<double>(source.numel);
  const double share = static_cast<double>(rank) / numel;
  const double samples = std::max(std::ceil(sample_fraction * numel), std::ceil(kHashedSampleSurvivors / share));
  if (2 * samples >= numel) return 0;
  keys.clear();
  for (std::uint32_t i = 0; i < static_cast<std::uint32_t>(samples); ++i) {
    const std::uint32_t hash = murmur3_32(i, sampling_seed(source.seed));
    source.read(scale_hash(hash, static_cast<std::uint32_t>(source.numel)), 1, keys);
  }
  const auto sampled_rank = static_cast<std::size_t>(std::floor(samples * share + 0.5));
  return std::max(key_of_rank(keys, std::max<std::size_t>(sampled_rank, 1)), 1u);
}

}  // namespace

void HashedSlotsSelection::begin(const SampleSource& source, const HashedSlots& selector, std::size_t k,
                                 std::size_t capacity) {
  source_ = source;
  layout_ = selector.layout;
  capacity_ = capacity;
  begin_ = source.unit.front().offset;
  const std::size_t rank = std::min(layout_ == HashedSlots::Layout::a ? 2 * k : k, source.numel);
  threshold_ = sampled_threshold(source, rank, selector.sample_fraction, scratch_);
  if (threshold_ == 0) whole_.begin(rank, 1);
  const std::size_t slots = layout_ == HashedSlots::Layout::a ? k : 4 * k;
  slot_indices_.assign(slots, kEmptySlot);
  slot_values_.assign(slots, 0.0f);
}

void HashedSlotsSelection::collect(const float* values, std::size_t count, std::uint32_t offset) {
  if (threshold_ == 0)
    whole_.collect(values, count, offset);
  else
    insert(values, count, offset);
}

void HashedSlotsSelection::insert(const float* values, std::size_t count, std::uint32_t offset) {
  std::array<std::uint32_t, kBlock + 1> hits;
  const std::size_t found = find_at_least(values, count, threshold_, hits.data());
  const auto slots = static_cast<std::uint32_t>(slot_indices_.size());
  for (std::size_t j = 0; j < found; ++j) {
    const std::uint32_t index = offset + hits[j];
    const std::uint32_t slot = scale_hash(murmur3_32(index - begin_, source_.seed), slots);
    // Entries come in ascending order, so of equal magnitudes the smaller index is there first.
    if (magnitude_key(values[hits[j]]) <= magnitude_key(slot_values_[slot])) continue;
    slot_indices_[slot] = index;
    slot_values_[slot] = values[hits[j]];
  }
}

void HashedSlotsSelection::finish(SparseGradient& out) {
  if (threshold_ == 0) {
    threshold_ = whole_.least_of_best();
    for_each_block(source_.unit, [this](const float* values, std::size_t count, std::uint32_t offset) {
      insert(values, count, offset);
    });
  }
  if (layout_ == HashedSlots::Layout::a) {
    out.indices.assign(slot_indices_.begin(), slot_indices_.end());
    out.values.assign(slot_values_.begin(), slot_values_.end());
    out.hashed_order = true;
    out.hash_seed = source_.seed;
    return;
  }
  std::vector<std::uint32_t>& order = scratch_;
  order.clear();
  for (std::uint32_t slot = 0; slot < slot_indices_.size(); ++slot)
    if (slot_indices_[slot] != kEmptySlot) order.push_back(slot);
  std::sort(order.begin(), order.end(),
            [this](std::uint32_t a, std::uint32_t b) { return slot_indices_[a] < slot_indices_[b]; });
  for (const std::uint32_t slot : order) {
    out.indices.push_back(slot_indices_[slot]);
    out.values.push_back(slot_values_[slot]);
  }
  if (out.nnz() > capacity_) keep_largest(out.indices, out.values, capacity_, scratch_);
}

}  // namespace thinwire
