// RedSync's trimmed top-k: mean and maximum of the magnitudes, then candidates above mean + r·(max - mean).
#pragma once

#include "select/candidates.h"

namespace thinwire {

class TrimmedTopKSelection {
 public:
  void begin(UnitView unit, std::size_t numel, std::size_t k, double epsilon);
  static std::uint32_t bound() noexcept { return kNoBound; }
  void collect(const UnitBlock& block);
  void finish(SparseGradient& out, TakenEntries& taken);
  static void abandon() noexcept {}

 private:
  UnitView unit_;
  std::size_t numel_ = 0;
  std::size_t k_ = 0;
  double epsilon_ = 0;
  double sum_ = 0;
  std::uint32_t max_ = 0;
  Candidates candidates_;
};

}  // namespace thinwire
