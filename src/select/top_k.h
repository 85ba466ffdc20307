// TopK: a sampled bound, one sweep, refinement among the candidates.
#pragma once

#include "select/candidates.h"
#include "select/sample.h"

namespace thinwire {

class TopKSelection {
 public:
  void begin(const SampleSource& source, std::size_t k);
  std::uint32_t bound() const noexcept { return candidates_.bound(); }
  void collect(const UnitBlock& block) { candidates_.collect(block); }
  void finish(SparseGradient& out, TakenEntries& taken);
  void abandon() noexcept { candidates_.abandon(); }
  std::size_t fallbacks() const noexcept { return fallbacks_; }

 private:
  SampleSource source_;
  std::size_t k_ = 0;
  std::size_t fallbacks_ = 0;
  Candidates candidates_;
  Sample sample_;
};

}  // namespace thinwire
