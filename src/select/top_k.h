// TopK: a sampled bound, one sweep, refinement among the candidates.
#pragma once

#include "select/candidates.h"
#include "select/sample.h"

namespace thinwire {

class TopKSelection {
 public:
  void begin(const SampleSource& source, std::size_t k);
  void collect(const float* values, std::size_t count, std::uint32_t offset) {
    candidates_.collect(values, count, offset);
  }
  void finish(SparseGradient& out);
  std::size_t fallbacks() const noexcept { return fallbacks_; }

 private:
  SampleSource source_;
  std::size_t k_ = 0;
  std::size_t fallbacks_ = 0;
  Candidates candidates_;
  std::vector<std::uint32_t> keys_;
};

}  // namespace thinwire
