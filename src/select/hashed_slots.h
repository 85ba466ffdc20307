// DRAGONN's hashed slots: candidates above a sampled threshold compete for the slots of a table.
#pragma once

#include "select/candidates.h"
#include "select/sample.h"

namespace thinwire {

class HashedSlotsSelection {
 public:
  void begin(const SampleSource& source, const HashedSlots& selector, std::size_t k, std::size_t capacity);
  void collect(const float* values, std::size_t count, std::uint32_t offset);
  void finish(SparseGradient& out);

 private:
  void insert(const float* values, std::size_t count, std::uint32_t offset);

  SampleSource source_;
  HashedSlots::Layout layout_ = HashedSlots::Layout::b;
  std::size_t capacity_ = 0;
  std::uint32_t begin_ = 0;      // first offset of the unit: what hashing counts from
  std::uint32_t threshold_ = 0;  // 0: not known before the unit has been read whole
  Candidates whole_;
  std::vector<std::uint32_t> slot_indices_;
  std::vector<float> slot_values_;
  std::vector<std::uint32_t> scratch_;
};

}  // namespace thinwire
