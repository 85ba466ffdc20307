// thinwire: the selected entries of a gradient, and the pieces of memory they are selected from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace thinwire {

/// An empty slot of a hashed table (`SparseGradient::hashed_order`): no entry, value 0.
inline constexpr std::uint32_t kEmptySlot = 0xFFFFFFFFu;

/// Entries in coordinate form. indices[j] is an offset in the *bucket's buffer*, so receivers need no remapping.
/// No index stands twice. Entries ascend by index unless `hashed_order` is set; then entry j lies in slot j of a hash
/// table, where slot(index) = (murmur3_32(index - first offset of the unit, hash_seed) * slots) >> 32, and free slots
/// hold kEmptySlot.
struct SparseGradient {
  std::vector<std::uint32_t> indices;  ///< [nnz]
  std::vector<float> values;           ///< [nnz]; after encode: exactly what receivers will decode
  bool hashed_order = false;
  std::uint32_t hash_seed = 0;

  std::size_t nnz() const noexcept { return indices.size(); }
  void clear() noexcept {
    indices.clear();
    values.clear();
    hashed_order = false;
    hash_seed = 0;
  }
};

/// One contiguous piece of a unit: numel accumulated residual values that stand at `offset` in the bucket's buffer.
struct UnitSegment {
  const float* values = nullptr;
  std::size_t numel = 0;
  std::uint32_t offset = 0;
};

/// What one selection covers: one parameter, or all sparse parameters of a bucket. Segments ascend by offset.
using UnitView = std::span<const UnitSegment>;

/// Neighbouring elements of a unit.
struct UnitRun {
  std::uint32_t offset = 0;  ///< of the first one, in the bucket's buffer
  std::uint32_t count = 0;
};

/// Which values a selection may take, by their sign. Under `largest` and `smallest` magnitudes compare as ever and values
/// of the other sign count as zeros, so that what is selected has one sign (RedSync's same-sign quantization).
enum class Side : std::uint8_t {
  both,
  largest,   ///< positive values: the k largest signed ones
  smallest,  ///< negative values: the k smallest signed ones
};

/// A bound that no magnitude reaches. Bounds compare with magnitudes as `select.h` orders them: bits without the sign.
inline constexpr std::uint32_t kNoBound = 0x80000000u;

/// A run of at most 4096 elements of a unit, on its way through the pass that accumulates and still in the L1 cache.
struct UnitBlock {
  float* values = nullptr;    ///< v [count]
  float* velocity = nullptr;  ///< u [count]; null without momentum, and where u stays
  std::size_t count = 0;
  std::uint32_t offset = 0;             ///< of values[0], in the bucket's buffer
  std::span<const std::uint32_t> hits;  ///< ascending positions in the block: values of the side, at or above the bound
};

/// Entries that were taken out of a unit's residual, with what was there: its v and, under momentum factor masking, u
/// are 0 at these offsets until they are settled or put back. kEmptySlot marks an entry that does not count.
///
/// The vectors are at least `count` long and keep their memory when the entries go from hand to hand.
struct TakenEntries {
  std::size_t count = 0;
  std::vector<std::uint32_t> indices;  ///< bucket offsets
  std::vector<float> values;           ///< v
  std::vector<float> velocities;       ///< u; 0 where there is none

  /// Makes room for `entries` entries; what is there stays.
  void reserve(std::size_t entries) {
    if (indices.size() >= entries) return;
    indices.resize(entries);
    values.resize(entries);
    velocities.resize(entries);
  }
};

}  // namespace thinwire
