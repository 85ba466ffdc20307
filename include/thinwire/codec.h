// thinwire, stage 3: codecs. Selected entries become a self-describing payload and come back out of it.
// Byte by byte: docs/wire_format.md. Order of use: payload_bound -> round_values -> encode -> validate -> decode_add.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "thinwire/sparse_gradient.h"

namespace thinwire {

enum class IndexCoding : std::uint8_t {
  raw_u32,
  elias_fano,  ///< ascending indices only; within 7 % of entropy at densities up to 1 % of uniform support
};
enum class ValueCoding : std::uint8_t {
  f32,
  bf16,  ///< saturates: a finite value never becomes infinite
  f16,   ///< times a power of two per section, which its largest magnitude sets: it neither overflows nor vanishes
  shared_mean,  ///< one f32 for all entries of a section, their mean (RedSync's same-mean quantization, arXiv 1808.04357)
};

struct Codec {
  IndexCoding indices = IndexCoding::raw_u32;
  ValueCoding values = ValueCoding::f32;
  friend bool operator==(const Codec&, const Codec&) = default;
};

/// "bf16", and "elias_fano x bf16".
std::string to_string(ValueCoding values);
std::string to_string(const Codec& codec);

inline constexpr std::size_t kHeaderBytes = 64;
inline constexpr std::uint8_t kWireVersion = 1;

/// What a payload says about itself, its sender and the job it belongs to.
struct PayloadHeader {
  enum Flag : std::uint16_t {
    relayout = 1,  ///< the block has the size agreed before, but this job needs `block_bytes`: only the header counts
    failed = 2,    ///< the sender has failed: only the header counts
  };
  std::uint16_t flags = 0;
  std::uint64_t step = 0;
  std::uint32_t job = 0;                    ///< number of the bucket within the step
  std::uint32_t slices = 0;                 ///< slices of the bucket; so many bits follow the header
  std::uint64_t options_hash = 0;           ///< of the options and parameters
  std::uint64_t layout_hash = 0;            ///< of the bucket's slices and of what is done with them in this step
  std::uint64_t block_bytes = 0;            ///< the block size this job needs, the same on every rank
  std::optional<std::uint32_t> non_finite;  ///< first bucket offset whose gradient entry was not finite
};

/// Entries to encode or, after `validate`, to read. Dense sections stand before sparse ones; those of one kind ascend by
/// `begin` and do not overlap.
struct SparseSection {
  std::uint32_t begin = 0;   ///< first bucket offset of the unit
  std::uint32_t extent = 0;  ///< the unit's entries lie in [begin, begin + extent)
  bool hashed_order = false;
  std::uint32_t hash_seed = 0;
  std::span<const std::uint32_t> indices;  ///< [nnz] bucket offsets
  std::span<const float> values;           ///< [nnz]
  std::optional<ValueCoding> coding = {};  ///< of the values, instead of the codec's; for `encode`
};
struct DenseSection {
  std::uint32_t begin = 0;
  std::span<const float> values;  ///< of bucket offsets begin, begin + 1, …
};
using Section = std::variant<DenseSection, SparseSection>;

/// The shape of a section before there is anything in it.
struct SectionShape {
  bool dense = false;
  std::size_t capacity = 0;                ///< most entries of a sparse section, elements of a dense one
  std::size_t extent = 0;                  ///< of a sparse section
  std::optional<ValueCoding> coding = {};  ///< as in SparseSection
};

/// Bytes that a payload with these sections, full or not, never exceeds; a multiple of 8, at least kHeaderBytes.
std::size_t payload_bound(const Codec& codec, std::size_t slices, std::span<const SectionShape> sections) noexcept;

/// values <- what receivers will decode, for the values of one sparse section. Finite values stay finite, and doing it
/// twice changes nothing. One or two passes over the values, no scratch.
/// bf16 and f16: rounded to nearest, ties to even; value - rounded is exact in f32, so that nothing gets lost between
/// residual and receivers. shared_mean: all become the mean, summed in f64 in a fixed order; value - mean is rounded.
void round_values(ValueCoding coding, std::span<float> values) noexcept;

/// Writes header, gradient bits and sections to `out` and returns the bytes used. `has_gradient` [header.slices].
/// Of values that went through `round_values` nothing is lost; others are rounded here, dense ones never.
/// Deterministic; the unused rest of `out` is zeroed. Errors: invalid_argument if `out` is too small, or for elias_fano
/// or shared_mean with a section in hashed order.
std::size_t encode(const Codec& codec, const PayloadHeader& header, const std::vector<bool>& has_gradient,
                   std::span<const Section> sections, std::span<std::byte> out);

/// A payload that was found sound. Its sections point into the bytes it was read from, or into `decoded`.
struct Payload {
  PayloadHeader header;
  std::vector<bool> has_gradient;                    ///< [header.slices]; empty if `relayout` or `failed` is set
  std::vector<Section> sections;                     ///< empty if `relayout` or `failed` is set
  std::vector<std::shared_ptr<const void>> decoded;  ///< indices and values that were coded; copies share them
};

/// Reads the header, and takes the checksum of all that it leads.
/// Errors: corrupt_payload with the position of the first offending byte.
PayloadHeader read_header(std::span<const std::byte> bytes);

/// Checks every byte that `decode_add` will rely on, the checksum and, for hashed order, each entry's slot; never reads
/// past `bytes`. `numel` is the size of the bucket that the payload is for.
/// `bytes` must be aligned to 4. Coded indices and values are decoded here, 4 bytes each.
/// Errors: corrupt_payload with the position of the first offending byte.
Payload validate(std::span<const std::byte> bytes, std::size_t numel);
/// The same where `header` came from read_header(bytes): the checksum is not taken twice.
Payload validate(const PayloadHeader& header, std::span<const std::byte> bytes, std::size_t numel);

/// Adds the payload's entries of bucket offsets [first, first + sum.size()) to `sum`.
/// `cursor` is kept by the caller between calls with ascending, adjoining ranges; start with a fresh one.
struct DecodeCursor {
  std::vector<std::size_t> next;                       ///< one per section
  std::vector<std::vector<std::uint32_t>> hash_order;  ///< entries of hashed sections, by index
};
void decode_add(const Payload& payload, std::uint32_t first, std::span<float> sum, DecodeCursor& cursor);

}  // namespace thinwire
