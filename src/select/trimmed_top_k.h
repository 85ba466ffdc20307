// RedSync's trimmed top-k: candidates above a threshold between mean and maximum, then the exact top-k of them.
#pragma once

#include "select/candidates.h"
#include "select/statistics.h"

namespace thinwire {

class TrimmedTopKSelection {
 public:
  void begin(const SampleSource& source, std::size_t k, double epsilon);
  static std::uint32_t bound() noexcept { return kNoBound; }
  void collect(const UnitBlock& block) { statistics_.collect(block); }
  void finish(SparseGradient& out, TakenEntries& taken);
  static void abandon() noexcept {}
  static std::size_t fallbacks() noexcept { return 0; }

 private:
  SampleSource source_;
  std::size_t k_ = 0;
  double epsilon_ = 0;
  Statistics statistics_;
  Candidates candidates_;
};

}  // namespace thinwire
