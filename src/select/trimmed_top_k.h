// RedSync's trimmed top-k: mean and maximum of the magnitudes, then candidates above mean + r·(max - mean).
#pragma once

#include "select/candidates.h"

namespace thinwire {

class TrimmedTopKSelection {
 public:
  void begin(UnitView unit, std::size_t numel, std::size_t k, double epsilon);
  void collect(const float* values, std::size_t count, std::uint32_t offset);
  void finish(SparseGradient& out);

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
