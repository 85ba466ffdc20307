// Stage 3: payloads. Enters: selected entries and dense values of one bucket. Leaves: bytes, and back.
// docs/wire_format.md describes every byte.
#include "thinwire/codec.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>

#include "codec/bytes.h"
#include "codec/elias_fano.h"
#include "codec/values.h"
#include "codec/wire.h"
#include "core/check.h"
#include "core/hash.h"

namespace thinwire {
namespace {

std::size_t bitmap_bytes(std::size_t slices) { return (slices + 31) / 32 * 4; }

// Writes the elements, if any, and returns where they end.
template <class T>
std::size_t put_all(std::span<std::byte> out, std::size_t at, std::span<const T> values) {
  const std::span<const std::byte> bytes = std::as_bytes(values);
  std::copy(bytes.begin(), bytes.end(), out.begin() + static_cast<std::ptrdiff_t>(at));
  return at + bytes.size();
}

// The payload's bytes, with the four of the checksum counted as zero.
std::uint32_t checksum(std::span<const std::byte> payload) {
  std::uint32_t h = 0;
  for (std::size_t at = 0; at < payload.size(); at += 4)
    h = murmur3_mix(h, at == wire::kChecksum ? 0 : get<std::uint32_t>(payload, at));
  return murmur3_final(h, static_cast<std::uint32_t>(payload.size()));
}

std::size_t index_bytes(IndexCoding coding, std::size_t extent, std::size_t count) {
  return coding == IndexCoding::raw_u32 ? 4 * count : elias_fano_bytes(extent, count);
}

std::size_t section_bytes(const Codec&, const DenseSection& section) {
  return wire::kSectionHeader + 4 * section.values.size();
}

std::size_t section_bytes(const Codec& codec, const SparseSection& section) {
  const ValueCoding coding = section.coding.value_or(codec.values);
  const std::size_t count = section.values.size();
  require(section.indices.size() == count, "a sparse section has as many indices as values");
  if (codec.indices == IndexCoding::elias_fano) {
    require(!section.hashed_order, "elias_fano needs ascending indices, not hashed order");
    require(ascend_inside(section.indices, section.begin, section.extent),
            "elias_fano needs indices that ascend inside their unit");
  }
  require(coding != ValueCoding::shared_mean || !section.hashed_order,
          "shared_mean needs entries in every place, not hashed order");
  return wire::kSectionHeader + index_bytes(codec.indices, section.extent, count) + value_bytes(coding, count);
}

std::size_t write_section(const Codec&, std::span<std::byte> out, std::size_t at, const DenseSection& section) {
  const auto count = static_cast<std::uint32_t>(section.values.size());
  put(out, at + wire::kKind, wire::kDense);
  put(out, at + wire::kBegin, section.begin);
  put(out, at + wire::kExtent, count);
  put(out, at + wire::kCount, count);
  return put_all(out, at + wire::kSectionHeader, section.values);
}

std::size_t write_section(const Codec& codec, std::span<std::byte> out, std::size_t at, const SparseSection& section) {
  const std::size_t count = section.indices.size();
  const ValueCoding coding = section.coding.value_or(codec.values);
  const int exponent = value_exponent(coding, section.values);
  put(out, at + wire::kKind, wire::kSparse);
  put(out, at + wire::kIndexCoding, codec.indices);
  put(out, at + wire::kValueCoding, coding);
  put(out, at + wire::kSectionFlags, section.hashed_order ? wire::kHashedOrder : std::uint8_t{0});
  put(out, at + wire::kBegin, section.begin);
  put(out, at + wire::kExtent, section.extent);
  put(out, at + wire::kCount, static_cast<std::uint32_t>(count));
  put(out, at + wire::kHashSeed, section.hash_seed);
  put(out, at + wire::kExponent, static_cast<std::int8_t>(exponent));
  at += wire::kSectionHeader;
  if (codec.indices == IndexCoding::elias_fano) {
    put(out, at - wire::kSectionHeader + wire::kLowBits,
        static_cast<std::uint8_t>(elias_fano_low_bits(section.extent, count)));
    elias_fano_encode(section.indices, section.begin, section.extent, out.subspan(at));
  } else {
    put_all(out, at, section.indices);
  }
  at += index_bytes(codec.indices, section.extent, count);
  encode_values(coding, exponent, section.values, out.subspan(at));
  return at + value_bytes(coding, count);
}

// Raw indices, which stand at `at`. Each once and inside the unit: ascending, or in the slot its hash names.
void check_indices(const SparseSection& section, std::size_t at) {
  if (!section.hashed_order && ascend_inside(section.indices, section.begin, section.extent)) return;
  const auto slots = static_cast<std::uint32_t>(section.indices.size());
  for (std::uint32_t j = 0; j < slots; ++j, at += 4) {
    const std::uint32_t index = section.indices[j];
    if (section.hashed_order && index == kEmptySlot) continue;
    check(index >= section.begin && index - section.begin < section.extent, at, "index outside its unit");
    if (section.hashed_order)
      check(scale_hash(murmur3_32(index - section.begin, section.hash_seed), slots) == j, at, "index in a wrong slot");
    else
      check(j == 0 || index > section.indices[j - 1], at, "indices do not ascend");
  }
}

// Free slots hold nothing. The values stand at `at`, each `width` bytes wide.
void check_free_slots(const SparseSection& section, std::size_t at, std::size_t width) {
  for (std::size_t j = 0; j < section.indices.size(); ++j)
    check(section.indices[j] != kEmptySlot || section.values[j] == 0.0f, at + width * j, "an empty slot has a value");
}

// Memory of the payload's own.
template <class T>
std::span<T> allocate(Payload& payload, std::size_t count) {
  const std::shared_ptr<T[]> memory = std::make_shared_for_overwrite<T[]>(count);
  payload.decoded.emplace_back(memory);
  return {memory.get(), count};
}

// Where the next section may stand: dense ones come first, and those of one kind ascend without overlap.
struct Order {
  std::uint8_t kind = wire::kDense;
  std::uint64_t free = 0;  // first offset that no section of this kind has taken
};

// Reads the section at `at` into `payload` and moves `at` and `order` behind it.
void read_section(std::span<const std::byte> bytes, std::size_t numel, std::size_t& at, Order& order,
                  Payload& payload) {
  const std::size_t start = at;
  check(bytes.size() - at >= wire::kSectionHeader, bytes.size(), "section header cut off");
  const auto kind = get<std::uint8_t>(bytes, at + wire::kKind);
  const Codec codec{.indices = get<IndexCoding>(bytes, at + wire::kIndexCoding),
                    .values = get<ValueCoding>(bytes, at + wire::kValueCoding)};
  const auto flags = get<std::uint8_t>(bytes, at + wire::kSectionFlags);
  const auto begin = get<std::uint32_t>(bytes, at + wire::kBegin);
  const auto extent = get<std::uint32_t>(bytes, at + wire::kExtent);
  const std::size_t count = get<std::uint32_t>(bytes, at + wire::kCount);
  const auto hash_seed = get<std::uint32_t>(bytes, at + wire::kHashSeed);
  const auto low_bits = get<std::uint8_t>(bytes, at + wire::kLowBits);
  const auto exponent = get<std::int8_t>(bytes, at + wire::kExponent);
  const bool sparse = kind == wire::kSparse;
  const bool elias_fano = codec.indices == IndexCoding::elias_fano;
  check(kind <= wire::kSparse, at + wire::kKind, "unknown kind of section");
  check(kind >= order.kind, at + wire::kKind, "dense section behind a sparse one");
  if (kind != order.kind) order = {.kind = kind, .free = 0};
  check(codec.indices <= (sparse ? IndexCoding::elias_fano : IndexCoding::raw_u32), at + wire::kIndexCoding,
        "unknown index coding");
  check(codec.values <= (sparse ? ValueCoding::shared_mean : ValueCoding::f32), at + wire::kValueCoding,
        "unknown value coding");
  const bool may_be_hashed = sparse && !elias_fano && codec.values != ValueCoding::shared_mean;
  check(flags == 0 || (flags == wire::kHashedOrder && may_be_hashed), at + wire::kSectionFlags, "unknown section flag");
  check(begin >= order.free, at + wire::kBegin, "sections overlap or do not ascend");
  check(std::uint64_t{begin} + extent <= numel, at + wire::kExtent, "section reaches past the bucket");
  check(sparse || count == extent, at + wire::kCount, "a dense section holds every element of its extent");
  check(count <= extent || flags == wire::kHashedOrder, at + wire::kCount, "more entries than elements");
  check(flags == wire::kHashedOrder || hash_seed == 0, at + wire::kHashSeed, "hash seed without hashed order");
  check(low_bits == (elias_fano ? elias_fano_low_bits(extent, count) : 0), at + wire::kLowBits,
        "number of low bits is not what extent and count make it");
  check(codec.values == ValueCoding::f16 ? exponent >= kMinExponent && exponent <= kMaxExponent : exponent == 0,
        at + wire::kExponent, "exponent out of range");
  for (std::size_t j = wire::kReserved; j < wire::kSectionHeader; j += 2)
    check(get<std::uint16_t>(bytes, at + j) == 0, at + j, "reserved bytes are not zero");
  order.free = std::uint64_t{begin} + extent;
  at += wire::kSectionHeader;
  const std::span<const std::byte> rest = bytes.subspan(at);
  const std::size_t for_indices = sparse ? index_bytes(codec.indices, extent, count) : 0;
  const std::size_t for_values = value_bytes(codec.values, count);
  check(rest.size() >= for_indices + for_values, bytes.size(), "section cut off");
  at += for_indices + for_values;
  const std::span<const std::byte> value_data = rest.subspan(for_indices, for_values);
  std::span<const float> values(reinterpret_cast<const float*>(value_data.data()), count);
  if (!sparse) {
    payload.sections.emplace_back(DenseSection{.begin = begin, .values = values});
    return;
  }
  if (codec.values != ValueCoding::f32) {
    const std::span<float> decoded = allocate<float>(payload, count);
    decode_values(codec.values, exponent, value_data, at - for_values, decoded);
    values = decoded;
  }
  std::span<const std::uint32_t> indices(reinterpret_cast<const std::uint32_t*>(rest.data()), count);
  if (elias_fano) {
    const std::span<std::uint32_t> decoded = allocate<std::uint32_t>(payload, count);
    elias_fano_decode(rest.first(for_indices), start + wire::kSectionHeader, begin, extent, decoded);
    indices = decoded;
  }
  const SparseSection section{.begin = begin,
                              .extent = extent,
                              .hashed_order = flags == wire::kHashedOrder,
                              .hash_seed = hash_seed,
                              .indices = indices,
                              .values = values};
  if (!elias_fano) check_indices(section, start + wire::kSectionHeader);
  if (section.hashed_order) check_free_slots(section, at - for_values, codec.values == ValueCoding::f32 ? 4 : 2);
  payload.sections.emplace_back(section);
}

void add_section(const DenseSection& section, std::uint32_t first, std::span<float> sum, std::size_t&,
                 std::vector<std::uint32_t>&) {
  const std::size_t begin = std::max<std::size_t>(section.begin, first);
  const std::size_t end = std::min(std::size_t{section.begin} + section.values.size(), first + sum.size());
  for (std::size_t i = begin; i < end; ++i) sum[i - first] += section.values[i - section.begin];
}

void add_section(const SparseSection& section, std::uint32_t first, std::span<float> sum, std::size_t& next,
                 std::vector<std::uint32_t>& order) {
  const std::size_t end = first + sum.size();
  if (!section.hashed_order) {
    for (; next < section.indices.size() && section.indices[next] < end; ++next)
      sum[section.indices[next] - first] += section.values[next];
    return;
  }
  if (next == 0 && order.empty()) {
    for (std::uint32_t slot = 0; slot < section.indices.size(); ++slot)
      if (section.indices[slot] != kEmptySlot) order.push_back(slot);
    std::sort(order.begin(), order.end(),
              [&](std::uint32_t a, std::uint32_t b) { return section.indices[a] < section.indices[b]; });
  }
  for (; next < order.size() && section.indices[order[next]] < end; ++next)
    sum[section.indices[order[next]] - first] += section.values[order[next]];
}

}  // namespace

std::string to_string(ValueCoding values) {
  constexpr std::array<const char*, 4> kValues = {"f32", "bf16", "f16", "shared_mean"};
  return kValues[static_cast<std::size_t>(values)];
}

std::string to_string(const Codec& codec) {
  constexpr std::array<const char*, 2> kIndices = {"raw_u32", "elias_fano"};
  return std::string(kIndices[static_cast<std::size_t>(codec.indices)]) + " x " + to_string(codec.values);
}

std::size_t payload_bound(const Codec& codec, std::size_t slices, std::span<const SectionShape> sections) noexcept {
  std::size_t bytes = kHeaderBytes + bitmap_bytes(slices);
  for (const SectionShape& shape : sections) {
    const ValueCoding coding = shape.dense ? ValueCoding::f32 : shape.coding.value_or(codec.values);
    bytes += wire::kSectionHeader + value_bytes(coding, shape.capacity);
    if (shape.dense) continue;
    const bool ascending = codec.indices == IndexCoding::elias_fano;  // so there are at most `extent`
    bytes +=
        index_bytes(codec.indices, shape.extent, ascending ? std::min(shape.capacity, shape.extent) : shape.capacity);
  }
  return (bytes + 7) / 8 * 8;
}

std::size_t encode(const Codec& codec, const PayloadHeader& header, const std::vector<bool>& has_gradient,
                   std::span<const Section> sections, std::span<std::byte> out) {
  const bool header_only = (header.flags & (PayloadHeader::relayout | PayloadHeader::failed)) != 0;
  std::size_t bytes = kHeaderBytes;
  if (!header_only) {
    require(has_gradient.size() == header.slices, "has_gradient has one bit per slice");
    bytes += bitmap_bytes(header.slices);
    for (const Section& section : sections)
      bytes += std::visit([&codec](const auto& s) { return section_bytes(codec, s); }, section);
  }
  require(out.size() >= bytes, "a payload of " + std::to_string(bytes) + " bytes does not fit into a block of " +
                                   std::to_string(out.size()));
  std::fill(out.begin(), out.begin() + kHeaderBytes, std::byte{0});
  put(out, wire::kMagic, wire::kMagicValue);
  put(out, wire::kVersion, kWireVersion);
  put(out, wire::kFlags, header.flags);
  put(out, wire::kStep, header.step);
  put(out, wire::kJob, header.job);
  put(out, wire::kSlices, header.slices);
  put(out, wire::kOptionsHash, header.options_hash);
  put(out, wire::kLayoutHash, header.layout_hash);
  put(out, wire::kPayloadBytes, std::uint64_t{bytes});
  put(out, wire::kBlockBytes, header.block_bytes);
  put(out, wire::kNonFinite, header.non_finite.value_or(wire::kNone));
  std::size_t at = kHeaderBytes;
  if (!header_only) {
    std::fill_n(out.begin() + kHeaderBytes, bitmap_bytes(header.slices), std::byte{0});
    for (std::size_t i = 0; i < has_gradient.size(); ++i)
      if (has_gradient[i]) out[at + i / 8] |= std::byte{1} << (i % 8);
    at += bitmap_bytes(header.slices);
    for (const Section& section : sections) {
      std::fill_n(out.begin() + static_cast<std::ptrdiff_t>(at), wire::kSectionHeader, std::byte{0});
      at = std::visit([&](const auto& s) { return write_section(codec, out, at, s); }, section);
    }
  }
  put(out, wire::kChecksum, checksum(out.first(bytes)));
  std::fill(out.begin() + static_cast<std::ptrdiff_t>(bytes), out.end(), std::byte{0});
  return bytes;
}

PayloadHeader read_header(std::span<const std::byte> bytes) {
  check(bytes.size() >= kHeaderBytes, bytes.size(), "header cut off");
  check(get<std::uint32_t>(bytes, wire::kMagic) == wire::kMagicValue, wire::kMagic, "not a thinwire payload");
  check(get<std::uint8_t>(bytes, wire::kVersion) == kWireVersion, wire::kVersion, "another wire version");
  check(get<std::uint8_t>(bytes, wire::kVersion + 1) == 0, wire::kVersion + 1, "reserved byte is not zero");
  PayloadHeader header{.flags = get<std::uint16_t>(bytes, wire::kFlags),
                       .step = get<std::uint64_t>(bytes, wire::kStep),
                       .job = get<std::uint32_t>(bytes, wire::kJob),
                       .slices = get<std::uint32_t>(bytes, wire::kSlices),
                       .options_hash = get<std::uint64_t>(bytes, wire::kOptionsHash),
                       .layout_hash = get<std::uint64_t>(bytes, wire::kLayoutHash),
                       .block_bytes = get<std::uint64_t>(bytes, wire::kBlockBytes),
                       .non_finite = std::nullopt};
  check((header.flags & ~(PayloadHeader::relayout | PayloadHeader::failed)) == 0, wire::kFlags, "unknown flag");
  const auto payload_bytes = get<std::uint64_t>(bytes, wire::kPayloadBytes);
  check(payload_bytes >= kHeaderBytes && payload_bytes % 4 == 0, wire::kPayloadBytes, "impossible size");
  check(payload_bytes <= bytes.size(), bytes.size(), "payload cut off");
  check(header.flags == 0 || payload_bytes == kHeaderBytes, wire::kPayloadBytes,
        "flagged payload is not a header alone");
  if (const auto index = get<std::uint32_t>(bytes, wire::kNonFinite); index != wire::kNone) header.non_finite = index;
  check(get<std::uint32_t>(bytes, wire::kChecksum) == checksum(bytes.first(payload_bytes)), wire::kChecksum,
        "checksum does not match");
  return header;
}

Payload validate(std::span<const std::byte> bytes, std::size_t numel) {
  return validate(read_header(bytes), bytes, numel);
}

Payload validate(const PayloadHeader& header, std::span<const std::byte> bytes, std::size_t numel) {
  require(reinterpret_cast<std::uintptr_t>(bytes.data()) % 4 == 0, "a payload must be aligned to 4 bytes");
  Payload payload{.header = header, .has_gradient = {}, .sections = {}, .decoded = {}};
  if (header.flags != 0) return payload;
  bytes = bytes.first(get<std::uint64_t>(bytes, wire::kPayloadBytes));
  check(!header.non_finite || *header.non_finite < numel, wire::kNonFinite, "offset past the bucket");
  std::size_t at = kHeaderBytes;
  const std::size_t slices = header.slices;
  check(bytes.size() - at >= bitmap_bytes(slices), bytes.size(), "gradient bits cut off");
  payload.has_gradient.resize(slices);
  for (std::size_t i = 0; i < 8 * bitmap_bytes(slices); ++i) {
    const bool bit = (bytes[at + i / 8] >> (i % 8) & std::byte{1}) != std::byte{0};
    if (i < slices) payload.has_gradient[i] = bit;
    check(i < slices || !bit, at + i / 8, "gradient bit without a slice");
  }
  at += bitmap_bytes(slices);
  for (Order order; at < bytes.size();) read_section(bytes, numel, at, order, payload);
  return payload;
}

void decode_add(const Payload& payload, std::uint32_t first, std::span<float> sum, DecodeCursor& cursor) {
  cursor.next.resize(payload.sections.size());
  cursor.hash_order.resize(payload.sections.size());
  for (std::size_t i = 0; i < payload.sections.size(); ++i)
    std::visit([&](const auto& s) { add_section(s, first, sum, cursor.next[i], cursor.hash_order[i]); },
               payload.sections[i]);
}

}  // namespace thinwire
