#include "select/candidates.h"

#include <algorithm>
#include <array>
#include <functional>

#include "core/magnitude.h"
#include "select/blocks.h"
#include "select/select_kernels.h"

namespace thinwire {

std::uint32_t key_of_rank(std::span<std::uint32_t> keys, std::size_t rank) {
  const auto at = keys.begin() + static_cast<std::ptrdiff_t>(rank) - 1;
  std::nth_element(keys.begin(), at, keys.end(), std::greater<>());
  return *at;
}

std::uint32_t keep_largest(std::vector<std::uint32_t>& indices, std::vector<float>& values, std::size_t k,
                           std::vector<std::uint32_t>& scratch) {
  scratch.resize(values.size());
  std::transform(values.begin(), values.end(), scratch.begin(), magnitude_key);
  const std::uint32_t kth = key_of_rank(scratch, std::min(k, scratch.size()));
  if (k >= values.size()) return kth;
  std::size_t ties = k;
  for (const float value : values) ties -= magnitude_key(value) > kth;
  std::size_t kept = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::uint32_t key = magnitude_key(values[i]);
    const bool tie = key == kth && ties > 0;
    ties -= tie;
    indices[kept] = indices[i];
    values[kept] = values[i];
    kept += key > kth || tie;
  }
  indices.resize(k);
  values.resize(k);
  return kth;
}

void Candidates::begin(std::size_t k, std::uint32_t bound) {
  k_ = k;
  bound_ = pruned_bound_ = std::max(bound, 1u);
  found_ = 0;
  indices_.clear();
  values_.clear();
}

void Candidates::collect(const float* values, std::size_t count, std::uint32_t offset) {
  std::array<std::uint32_t, kBlock + 1> hits;
  const std::size_t found = find_at_least(values, count, pruned_bound_, hits.data());
  found_ += found;
  for (std::size_t j = 0; j < found; ++j) {
    indices_.push_back(offset + hits[j]);
    values_.push_back(values[hits[j]]);
  }
  if (indices_.size() > 2 * k_) pruned_bound_ = keep_largest(indices_, values_, k_, scratch_) + 1;
}

void Candidates::collect(UnitView unit) {
  for_each_block(
      unit, [this](const float* values, std::size_t count, std::uint32_t offset) { collect(values, count, offset); });
}

void Candidates::take(SparseGradient& out) {
  if (!values_.empty()) keep_largest(indices_, values_, k_, scratch_);
  out.indices.assign(indices_.begin(), indices_.end());
  out.values.assign(values_.begin(), values_.end());
}

std::uint32_t Candidates::least_of_best() {
  return values_.empty() ? 1 : keep_largest(indices_, values_, k_, scratch_);
}

}  // namespace thinwire
