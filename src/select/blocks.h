// How every selector walks a unit.
#pragma once

#include <algorithm>

#include "core/magnitude.h"
#include "thinwire/sparse_gradient.h"

namespace thinwire {

/// Calls f(values, count, offset) for each block of at most kBlock elements; blocks start anew with each segment.
template <class F>
void for_each_block(UnitView unit, const F& f) {
  for (const UnitSegment& segment : unit)
    for (std::size_t begin = 0; begin < segment.numel; begin += kBlock)
      f(segment.values + begin, std::min(kBlock, segment.numel - begin),
        static_cast<std::uint32_t>(segment.offset + begin));
}

inline std::size_t unit_numel(UnitView unit) noexcept {
  std::size_t sum = 0;
  for (const UnitSegment& segment : unit) sum += segment.numel;
  return sum;
}

}  // namespace thinwire
