// The mean of what the ranks sent: added in rank order in f32, then divided by their number.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "reference/residual.h"
#include "thinwire/sparse_gradient.h"

namespace thinwire::reference {

/// sent[r] is what rank r sent, as a dense vector.
inline std::vector<float> mean(const std::vector<std::vector<float>>& sent) {
  std::vector<float> sum(sent.front().size(), 0.0f);
  for (const std::vector<float>& one : sent)
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] = add(sum[i], one[i]);
  for (float& value : sum) value = value / static_cast<float>(sent.size());
  return sum;
}

/// dense [numel] takes the entries at their places.
inline void scatter(const SparseGradient& entries, std::span<float> dense) {
  for (std::size_t j = 0; j < entries.nnz(); ++j)
    if (entries.indices[j] != kEmptySlot) dense[entries.indices[j]] = entries.values[j];
}

}  // namespace thinwire::reference
