// Samples of a unit, drawn by a counter-based hash so that every backend draws the same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "thinwire/select.h"

namespace thinwire {

/// A unit, what may be taken from it, and the pass that is about to run over it.
struct SampleSource {
  UnitView unit;
  std::size_t numel = 0;
  std::uint32_t seed = 0;
  Side side = Side::both;
  const SelectionPass* pass = nullptr;  ///< null: the values are those of the unit
};

/// The seed of sampling, apart from the one of hashing.
inline std::uint32_t sampling_seed(std::uint32_t seed) noexcept { return seed ^ 0x9E3779B9u; }

/// Positions that are noted first and then read in one go, so that the memory can be asked for them ahead.
class Sample {
 public:
  void clear() noexcept;
  /// Elements [position, position + count) of the unit, cut at the end of the segment.
  void add(const SampleSource& source, std::size_t position, std::size_t count);
  /// Values of the other side read as zeros.
  void read(const SampleSource& source);
  std::size_t size() const noexcept { return values_.size(); }
  /// The magnitude key of rank `rank` (1 = largest); 1 <= rank <= size().
  std::uint32_t key_of_rank(std::size_t rank);

 private:
  void fetch(const SampleSource& source);

  std::vector<const float*> places_;  // of each run, in the unit
  std::vector<UnitRun> runs_;
  std::vector<float> values_;
  std::vector<std::uint32_t> keys_;
  std::size_t segment_ = 0;        // that held the last position
  std::size_t segment_begin_ = 0;  // its first position
};

}  // namespace thinwire
