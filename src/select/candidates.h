// Candidates of a selection: everything at or above a bound, cut back to the k best whenever too many pile up.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "thinwire/select.h"

namespace thinwire {

/// Where the k largest of some magnitudes end: all keys above `key` and the first `ties` equal to it.
struct Cut {
  std::uint32_t key = 0;
  std::size_t ties = 0;
};

/// The cut after the k largest of `values`; 1 <= k <= values.size(). `keys` is scratch.
/// Cost: one histogram of the keys, then a selection within one of its bins.
Cut cut_after(std::span<const float> values, std::size_t k, std::vector<std::uint32_t>& keys);

/// Keeps the min(k, size) entries of largest magnitude, ties to the earlier one, in their order.
void keep_largest(SparseGradient& entries, std::size_t k, std::vector<std::uint32_t>& keys);

/// Collects entries block by block in ascending index order. Holds at most 2k entries and one block.
class Candidates {
 public:
  using PutBack = std::function<void(const TakenEntries& taken)>;

  /// Entries of the other side and those below `bound` are passed over; a bound of 1 takes all but zeros. With
  /// `put_back`, the entries of `collect` are taken out of their blocks, and those that fall behind go there.
  void begin(std::size_t k, std::uint32_t bound, Side side, const PutBack* put_back = nullptr);
  /// What the hits of the next block must reach: after a cut only strictly larger entries can still win.
  std::uint32_t bound() const noexcept { return bound_; }
  void collect(const UnitBlock& block);
  /// A whole unit as it stands, block by block; takes nothing out.
  void collect(UnitView unit);

  /// True if the k best of the unit are among those held, or the bound was so low that all of its entries are.
  bool complete() const noexcept { return found_ >= k_ || first_bound_ <= 1; }
  std::uint32_t first_bound() const noexcept { return first_bound_; }
  /// How many reached the bound. It rises once more than 2k have: from then on this is only the least that there are.
  std::size_t found() const noexcept { return found_; }
  /// The values of the min(k, found) best, ascending by index; until the next call.
  std::span<const float> best();
  /// Lets only the `k` best stay, if they are fewer than at `begin`.
  void limit(std::size_t k) noexcept { k_ = std::min(k_, k); }

  /// The min(k, found) best, ascending by index, go to `out`, and where they were taken out, to `taken`.
  void finish(SparseGradient& out, TakenEntries& taken);
  /// The least key of the min(k, found) best; 1 if there is none.
  std::uint32_t least_of_best();
  /// Puts back whatever was taken out, and forgets all.
  void abandon() noexcept;

 private:
  void collect_hits(const float* values, std::uint32_t offset, std::span<const std::uint32_t> hits);
  void cut();

  std::size_t k_ = 0;
  Side side_ = Side::both;
  std::uint32_t bound_ = 1;
  std::uint32_t first_bound_ = 1;
  std::size_t found_ = 0;  // at or above the bound so far
  const PutBack* put_back_ = nullptr;
  TakenEntries held_;
  TakenEntries lost_;
  std::vector<std::uint32_t> keys_;
};

}  // namespace thinwire
