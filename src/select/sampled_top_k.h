// DGC's sampled top-k: a threshold from a strided sample, lowered if too few reach it. As with HashedSlots the sample is
// read after the pass that accumulates: single positions of what the pass will leave would miss the cache in g, u and v.
#pragma once

#include "select/candidates.h"
#include "select/sample.h"

namespace thinwire {

class SampledTopKSelection {
 public:
  void begin(const SampleSource& source, const SampledTopK& selector, std::size_t k);
  static std::uint32_t bound() noexcept { return kNoBound; }
  static void collect(const UnitBlock&) {}
  void finish(SparseGradient& out, TakenEntries& taken);
  static void abandon() noexcept {}
  std::size_t fallbacks() const noexcept { return fallbacks_; }

 private:
  std::uint32_t threshold();

  SampleSource source_;
  SampledTopK selector_;
  std::size_t k_ = 0;
  std::size_t fallbacks_ = 0;
  Candidates candidates_;
  Sample sample_;
};

}  // namespace thinwire
