// thinwire, stage 2: selectors. Which entries of the accumulated residual travel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <variant>

#include "thinwire/sparse_gradient.h"

namespace thinwire {

// Common to all selectors. k = max(1, floor(density·numel + 0.5)). Magnitudes compare as the unsigned bits without the
// sign; of equal magnitudes the smaller index wins. Zeros are never selected, so an exact selector returns
// min(k, nonzeros) entries. Where a side is asked for, values of the other sign count as zeros. The same input, seed and
// memory give the same entries on every SIMD target and backend.

/// The k entries of largest magnitude, exactly. One pass: a bound below the k-th magnitude is estimated from a sample,
/// candidates at or above it are collected, the k-th is found among them. A bound that was too high is noticed by the
/// count and lowered, so the result is exact for every input.
struct TopK {
  double density = 0.001;  ///< k / numel, in (0, 1]
  friend bool operator==(const TopK&, const TopK&) = default;
};

/// RedSync's trimmed top-k (arXiv 1808.04357, communication-set selection): candidates above
/// mean + r·(max - mean) of the magnitudes (under a side, of the signed values), r = 1 - epsilon, lowered by epsilon until
/// k are found; then the exact top-k of the candidates. Returns the same entries as TopK.
struct TrimmedTopK {
  double density = 0.001;
  double epsilon = 0.2;  ///< step of r, in (0, 1)
  friend bool operator==(const TrimmedTopK&, const TrimmedTopK&) = default;
};

/// DRAGONN's randomized hashing (Wang et al., ICML 2022). Entries at or above a threshold taken from a sample go to slot
/// (murmur3_32(index, seed) · slots) >> 32 of a table; in a slot the larger magnitude wins. Losers stay in the residual and
/// meet other rivals in the next step, whose seed differs.
struct HashedSlots {
  enum class Layout : std::uint8_t {
    a,  ///< candidates at rank 2k into k slots, sent as they lie: fixed size, about 0.865k useful entries
    b,  ///< candidates at rank k into 4k slots, compacted, at most 1.25k entries, about 0.885k expected
  };
  double density = 0.001;
  Layout layout = Layout::b;
  /// Share of the unit that is sampled for the threshold, in (0, 1]; at least 64 expected survivors are sampled for,
  /// so small units are read whole (sampling noise of the threshold).
  double sample_fraction = 0.01;
  friend bool operator==(const HashedSlots&, const HashedSlots&) = default;
};

/// RedSync's threshold binary search (arXiv 1808.04357, communication-set selection): entries above
/// mean + r·(max - mean) of the magnitudes (under a side, of the signed values), r being bisected in [0, 1] until k to
/// capacity of them are left. The authors stop when r is known to some width, which on heavy tails leaves the count orders
/// of magnitude off k; this stops on the count alone. Returns the nnz largest, k <= nnz <= 1.25k; where no r leaves such a
/// count (ties, fewer than k above the mean), the k largest exactly, which counts as a fallback.
///
/// With a SelectionMemory the r of a search serves the selections that follow, with fresh mean and max, in one sweep. Their
/// count is checked: beyond capacity the largest are kept, below k/2 the search is repeated, as a fallback.
struct ThresholdSearch {
  double density = 0.001;
  /// Selections that one search serves, itself included; 1: each searches, and nothing is remembered.
  std::uint32_t reuse_interval = 5;
  friend bool operator==(const ThresholdSearch&, const ThresholdSearch&) = default;
};

/// DGC's sampled top-k (Lin et al., ICLR 2018): entries at or above a threshold taken from a strided sample that starts at
/// random. More than k of them: the k largest. Fewer than 0.8k: the threshold is lowered by a fifth, ten times at most,
/// each a sweep and a fallback; then what is there is taken. Returns the nnz largest, nnz <= k.
struct SampledTopK {
  double density = 0.001;
  /// Share of the unit that is sampled, in (0, 1]; at least 2 expected survivors are sampled for. Where the stride would
  /// fall below 11, the whole unit is read and the selection is exact.
  double sample_fraction = 0.01;
  friend bool operator==(const SampledTopK&, const SampledTopK&) = default;
};

using Selector = std::variant<TopK, TrimmedTopK, HashedSlots, ThresholdSearch, SampledTopK>;

/// "top_k(density=0.001)", "hashed_slots(density=0.001, layout=b, sample_fraction=0.01)", …
std::string to_string(const Selector& selector);
/// Errors: invalid_argument naming the field that is out of range.
void validate(const Selector& selector);
double density(const Selector& selector) noexcept;
/// k for a unit of numel elements: max(1, floor(density·numel + 0.5)), and 0 for an empty unit.
std::size_t target_count(const Selector& selector, std::size_t numel) noexcept;
/// The most entries (for layout A: exactly the slots) that a selection from numel elements returns.
std::size_t capacity(const Selector& selector, std::size_t numel) noexcept;

/// The pass that a selection may ride on, as the residual runs it. Without it the unit's values are already there.
struct SelectionPass {
  /// Writes the values of the runs, one behind the other, as the coming pass will leave them.
  std::function<void(std::span<const UnitRun> runs, float* out)> peek;
  /// Writes the entries back to where they were. Where it is given, a selection takes candidates out of the blocks while
  /// they lie in the cache, and puts back what is not selected.
  std::function<void(const TakenEntries& taken)> put_back;
};

/// What a selector carries from one selection of a unit to the next; kept by the caller, one for each unit and side.
struct SelectionMemory {
  double ratio = 0;        ///< r of the last threshold that a search has found
  std::uint32_t uses = 0;  ///< selections that have used it, the search included; 0: none is known
};

/// What is asked of one selection, beyond its selector.
struct SelectionTask {
  Side side = Side::both;
  SelectionMemory* memory = nullptr;  ///< null: nothing is remembered. Must stay valid until `finish`, which updates it
  SelectionPass pass;
};

/// One selection from one unit, in the steps that let it ride on the pass that accumulates the residual:
///
///     selection.begin(selector, unit, seed, task);   // TopK samples the values that the pass is about to produce
///     for each block, in order, with the side's hits at or above selection.bound():  selection.collect(block);
///     selection.finish(out, taken);                  // may read the unit again
///
/// Reusable: memory is kept between units. Scratch: about 2·capacity + 4096 entries, O(slots) for HashedSlots.
class Selection {
 public:
  Selection();
  ~Selection();
  Selection(Selection&&) noexcept;
  Selection& operator=(Selection&&) noexcept;

  /// The unit's memory must stay valid until `finish`.
  void begin(const Selector& selector, UnitView unit, std::uint32_t seed, SelectionTask task = {});
  /// What the next block's hits must reach; kNoBound if this selection wants none.
  std::uint32_t bound() const noexcept;
  void collect(const UnitBlock& block);
  /// `taken` receives the selected entries as they were taken out, or nothing if they still stand in the unit.
  void finish(SparseGradient& out, TakenEntries& taken);
  /// Instead of `finish`: puts back whatever was taken out.
  void abandon() noexcept;

  /// Sweeps beyond the expected ones that the last selection needed because a sampled or reused bound was too high, and
  /// searches that found no threshold.
  std::size_t fallbacks() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// begin, collect and finish over values that are already there; `scratch` keeps its memory. Errors: those of `validate`.
void select(const Selector& selector, UnitView unit, std::uint32_t seed, Selection& scratch, SparseGradient& out,
            Side side = Side::both, SelectionMemory* memory = nullptr);
void select(const Selector& selector, UnitView unit, std::uint32_t seed, SparseGradient& out, Side side = Side::both,
            SelectionMemory* memory = nullptr);

}  // namespace thinwire
