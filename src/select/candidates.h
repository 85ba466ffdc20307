// Candidates of a selection: everything at or above a bound, cut back to the k best whenever too many pile up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "thinwire/sparse_gradient.h"

namespace thinwire {

/// Magnitude key of rank `rank` (1 = largest) among keys; reorders them. 1 <= rank <= keys.size().
std::uint32_t key_of_rank(std::span<std::uint32_t> keys, std::size_t rank);

/// Keeps the k entries of largest magnitude, ties to the earlier one, in their order. Returns the least kept key.
std::uint32_t keep_largest(std::vector<std::uint32_t>& indices, std::vector<float>& values, std::size_t k,
                           std::vector<std::uint32_t>& scratch);

/// Collects entries block by block in ascending index order. Holds at most 2k entries and one block.
class Candidates {
 public:
  /// Entries below `bound` are passed over; a bound of 1 takes all but zeros.
  void begin(std::size_t k, std::uint32_t bound);
  void collect(const float* values, std::size_t count, std::uint32_t offset);
  /// A whole unit, block by block.
  void collect(UnitView unit);

  /// Entries at or above the bound so far, capped at k: k means that the k best are among those held.
  std::size_t found() const noexcept { return found_ < k_ ? found_ : k_; }
  std::uint32_t bound() const noexcept { return bound_; }

  /// The min(k, found) best, ascending by index, go to `out`.
  void take(SparseGradient& out);
  /// The least key of the min(k, found) best; 1 if there is none. Ends the collection.
  std::uint32_t least_of_best();

 private:
  std::size_t k_ = 0;
  std::uint32_t bound_ = 1;
  std::uint32_t pruned_bound_ = 1;  // after a prune only strictly larger entries can still win
  std::size_t found_ = 0;
  std::vector<std::uint32_t> indices_;
  std::vector<float> values_;
  std::vector<std::uint32_t> scratch_;
};

}  // namespace thinwire
