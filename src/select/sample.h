// Samples of a unit, drawn by a counter-based hash so that every backend draws the same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "thinwire/select.h"

namespace thinwire {

/// A unit and the values that the coming pass will leave in it.
struct SampleSource {
  UnitView unit;
  std::size_t numel = 0;
  std::uint32_t seed = 0;
  const Selection::Peek* peek = nullptr;  ///< null: the values are those of the unit

  /// Appends the keys of elements [position, position + count) of the unit, cut at the end of the segment.
  void read(std::size_t position, std::size_t count, std::vector<std::uint32_t>& keys) const;
  /// Asks the memory for an element of the unit that will soon be read.
  void prefetch(std::size_t position) const;
};

/// The seed of sampling, apart from the one of hashing.
inline std::uint32_t sampling_seed(std::uint32_t seed) noexcept { return seed ^ 0x9E3779B9u; }

}  // namespace thinwire
