// RedSync's threshold search: a bisection between mean and maximum that stops on the count, or the r of an earlier one.
#pragma once

#include "select/candidates.h"
#include "select/statistics.h"

namespace thinwire {

class ThresholdSearchSelection {
 public:
  void begin(const SampleSource& source, const ThresholdSearch& selector, std::size_t k, std::size_t capacity,
             SelectionMemory* memory);
  static std::uint32_t bound() noexcept { return kNoBound; }
  void collect(const UnitBlock& block) { statistics_.collect(block); }
  void finish(SparseGradient& out, TakenEntries& taken);
  static void abandon() noexcept {}
  std::size_t fallbacks() const noexcept { return fallbacks_; }

 private:
  bool reuse();
  void search();

  SampleSource source_;
  std::uint32_t reuse_interval_ = 1;
  std::size_t k_ = 0;
  std::size_t capacity_ = 0;
  std::size_t fallbacks_ = 0;
  SelectionMemory* memory_ = nullptr;
  Statistics statistics_;
  Candidates candidates_;
};

}  // namespace thinwire
