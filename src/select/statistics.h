// RedSync's statistics of a unit: mean and maximum, and the thresholds between them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "select/candidates.h"
#include "select/sample.h"

namespace thinwire {

/// Mean and maximum of the magnitudes; under a side, of the values with the sign that makes the side positive. All
/// elements count for the mean, whatever their sign.
class Statistics {
 public:
  void begin(std::size_t numel, Side side);
  /// Each block of the unit once, in order.
  void collect(const UnitBlock& block);

  /// The least key above mean + ratio·(max - mean); at least 1, so that zeros stay out.
  std::uint32_t key_above(double ratio) const;

 private:
  std::size_t numel_ = 0;
  Side side_ = Side::both;
  double sum_ = 0;
  std::uint32_t max_ = 0;  // key; 0 without a value of the side
};

/// The k largest of the unit, or all of the side if they are fewer, end up in `candidates`, found above mean +
/// r·(max - mean), r = 1 - epsilon, lowered by epsilon until they are k. A sweep for each value of r that is tried.
void collect_trimmed(Candidates& candidates, const SampleSource& source, std::size_t k, const Statistics& statistics,
                     double epsilon);

}  // namespace thinwire
