// DRAGONN's hashed slots: candidates above a sampled threshold compete for the slots of a table. The threshold is sampled
// after the pass that accumulates: a random sample of what the pass will leave would miss the cache in g, u and v.
#pragma once

#include "select/candidates.h"
#include "select/sample.h"

namespace thinwire {

class HashedSlotsSelection {
 public:
  void begin(const SampleSource& source, const HashedSlots& selector, std::size_t k, std::size_t capacity);
  static std::uint32_t bound() noexcept { return kNoBound; }
  static void collect(const UnitBlock&) {}
  void finish(SparseGradient& out, TakenEntries& taken);
  static void abandon() noexcept {}
  static std::size_t fallbacks() noexcept { return 0; }

 private:
  std::uint32_t threshold();
  void insert(const float* values, std::size_t count, std::uint32_t offset, std::uint32_t threshold);

  SampleSource source_;
  HashedSlots selector_;
  std::size_t rank_ = 0;  // of the threshold among the magnitudes
  std::size_t capacity_ = 0;
  Candidates whole_;
  Sample sample_;
  std::vector<std::uint32_t> slot_indices_;
  std::vector<float> slot_values_;
  std::vector<std::uint32_t> order_;
};

}  // namespace thinwire
