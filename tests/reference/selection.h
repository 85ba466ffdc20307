// Selectors as the papers describe them: sort everything, look at everything.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <variant>
#include <vector>

#include "reference/murmur3.h"
#include "thinwire/select.h"
#include "thinwire/sparse_gradient.h"

namespace thinwire::reference {

struct Entry {
  std::uint32_t index = 0;
  float value = 0;
};
/// Magnitudes compare as the bits without the sign.
inline std::uint32_t key(float value) { return std::bit_cast<std::uint32_t>(value) & 0x7fffffffu; }
inline bool beats(const Entry& a, const Entry& b) {
  return key(a.value) != key(b.value) ? key(a.value) > key(b.value) : a.index < b.index;
}

/// All entries; those of the other side as zeros.
inline std::vector<Entry> entries_of(UnitView unit, Side side) {
  const auto counts = [side](float value) {
    return side == Side::both || (side == Side::largest ? value > 0 : value < 0);
  };
  std::vector<Entry> entries;
  for (const UnitSegment& segment : unit)
    for (std::size_t i = 0; i < segment.numel; ++i)
      entries.push_back(
          {segment.offset + static_cast<std::uint32_t>(i), counts(segment.values[i]) ? segment.values[i] : 0.0f});
  return entries;
}

inline std::size_t target_count(double density, std::size_t numel) {
  if (numel == 0) return 0;
  return std::max<std::size_t>(1, static_cast<std::size_t>(std::floor(density * double(numel) + 0.5)));
}

inline SparseGradient ascending(std::vector<Entry> entries) {
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.index < b.index; });
  SparseGradient out;
  for (const Entry& entry : entries) {
    out.indices.push_back(entry.index);
    out.values.push_back(entry.value);
  }
  return out;
}

/// The `count` largest entries, zeros apart.
inline std::vector<Entry> largest(std::vector<Entry> entries, std::size_t count) {
  std::erase_if(entries, [](const Entry& entry) { return entry.value == 0; });
  count = std::min(count, entries.size());
  std::partial_sort(entries.begin(), entries.begin() + std::ptrdiff_t(count), entries.end(), beats);
  entries.resize(count);
  return entries;
}

inline SparseGradient top_k(UnitView unit, double density, Side side = Side::both) {
  const std::vector<Entry> entries = entries_of(unit, side);
  return ascending(largest(entries, target_count(density, entries.size())));
}

/// The r-th largest key of all, or the matching one of a sample drawn with replacement; never 0.
inline std::uint32_t hashed_threshold(const HashedSlots& how, const std::vector<Entry>& entries, std::uint32_t seed) {
  const std::size_t n = entries.size();
  const std::size_t k = target_count(how.density, n);
  const std::size_t r = std::min(n, how.layout == HashedSlots::Layout::a ? 2 * k : k);
  const auto s = static_cast<std::size_t>(
      std::max(std::ceil(how.sample_fraction * double(n)), std::ceil(64.0 * double(n) / double(r))));
  std::vector<std::uint32_t> keys;
  std::size_t rank = r;
  if (2 * s >= n) {
    for (const Entry& entry : entries) keys.push_back(key(entry.value));
  } else {
    for (std::size_t i = 0; i < s; ++i)
      keys.push_back(key(entries[draw(hash_counter(std::uint32_t(i), seed ^ 0x9E3779B9u), n)].value));
    rank = std::max<std::size_t>(1, static_cast<std::size_t>(std::floor(double(s) * double(r) / double(n) + 0.5)));
  }
  std::nth_element(keys.begin(), keys.begin() + std::ptrdiff_t(rank) - 1, keys.end(), std::greater<>());
  return std::max(1u, keys[rank - 1]);
}

/// Entries at or above the threshold.
inline std::vector<Entry> hashed_candidates(const HashedSlots& how, UnitView unit, std::uint32_t seed,
                                            Side side = Side::both) {
  std::vector<Entry> entries = entries_of(unit, side);
  if (entries.empty()) return entries;
  const std::uint32_t threshold = hashed_threshold(how, entries, seed);
  std::erase_if(entries, [threshold](const Entry& entry) { return key(entry.value) < threshold; });
  return entries;
}

inline SparseGradient hashed_slots(const HashedSlots& how, UnitView unit, std::uint32_t seed, Side side = Side::both) {
  std::size_t numel = 0;
  for (const UnitSegment& segment : unit) numel += segment.numel;
  if (numel == 0) return {};
  const std::size_t k = target_count(how.density, numel);
  const bool layout_a = how.layout == HashedSlots::Layout::a;
  const std::size_t slots = layout_a ? k : 4 * k;

  std::map<std::uint32_t, Entry> table;
  for (const Entry& entry : hashed_candidates(how, unit, seed, side)) {
    const std::uint32_t slot = draw(hash_counter(entry.index - unit.front().offset, seed), slots);
    const auto [place, is_free] = table.try_emplace(slot, entry);
    if (!is_free && beats(entry, place->second)) place->second = entry;
  }
  if (!layout_a) {
    std::vector<Entry> winners;
    for (const auto& [slot, entry] : table) winners.push_back(entry);
    return ascending(largest(winners, static_cast<std::size_t>(std::ceil(1.25 * double(k)))));
  }
  SparseGradient out;
  out.hashed_order = true;
  out.hash_seed = seed;
  out.indices.assign(slots, kEmptySlot);
  out.values.assign(slots, 0.0f);
  for (const auto& [slot, entry] : table) {
    out.indices[slot] = entry.index;
    out.values[slot] = entry.value;
  }
  return out;
}

inline SparseGradient select(const Selector& selector, UnitView unit, std::uint32_t seed, Side side = Side::both) {
  if (const auto* hashed = std::get_if<HashedSlots>(&selector)) return hashed_slots(*hashed, unit, seed, side);
  return top_k(unit, density(selector), side);
}

}  // namespace thinwire::reference
