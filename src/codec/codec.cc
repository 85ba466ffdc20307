// Stage 3: payloads. Enters: selected entries and dense values of one bucket. Leaves: bytes, and back.
// docs/wire_format.md describes every byte.
#include "thinwire/codec.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "codec/wire.h"
#include "core/check.h"
#include "core/hash.h"

namespace thinwire {
namespace {

std::size_t bitmap_bytes(std::size_t slices) { return (slices + 31) / 32 * 4; }

template <class T>
void put(std::span<std::byte> out, std::size_t at, T value) {
  static_assert(std::is_trivially_copyable_v<T>);
  std::memcpy(out.data() + at, &value, sizeof value);
}

// Writes the elements, if any, and returns where they end.
template <class T>
std::size_t put_all(std::span<std::byte> out, std::size_t at, std::span<const T> values) {
  const std::span<const std::byte> bytes = std::as_bytes(values);
  std::copy(bytes.begin(), bytes.end(), out.begin() + static_cast<std::ptrdiff_t>(at));
  return at + bytes.size();
}

template <class T>
T get(std::span<const std::byte> in, std::size_t at) {
  T value;
  std::memcpy(&value, in.data() + at, sizeof value);
  return value;
}

[[noreturn]] void refuse(std::size_t position, const std::string& why) {
  throw Error(ErrorCode::corrupt_payload, "payload refused at byte " + std::to_string(position) + ": " + why, position);
}

void check(bool sound, std::size_t position, const char* why) {
  if (!sound) refuse(position, why);
}

// The payload's bytes, with the four of the checksum counted as zero.
std::uint32_t checksum(std::span<const std::byte> payload) {
  std::uint32_t h = 0;
  for (std::size_t at = 0; at < payload.size(); at += 4)
    h = murmur3_mix(h, at == wire::kChecksum ? 0 : get<std::uint32_t>(payload, at));
  return murmur3_final(h, static_cast<std::uint32_t>(payload.size()));
}

std::size_t section_bytes(const Section& section) {
  return std::visit(
      [](const auto& s) {
        using T = std::decay_t<decltype(s)>;
        return wire::kSectionHeader + 4 * s.values.size() * (std::is_same_v<T, DenseSection> ? 1 : 2);
      },
      section);
}

std::size_t write_section(std::span<std::byte> out, std::size_t at, const DenseSection& section) {
  const auto count = static_cast<std::uint32_t>(section.values.size());
  put(out, at + wire::kKind, wire::kDense);
  put(out, at + wire::kBegin, section.begin);
  put(out, at + wire::kExtent, count);
  put(out, at + wire::kCount, count);
  return put_all(out, at + wire::kSectionHeader, section.values);
}

std::size_t write_section(std::span<std::byte> out, std::size_t at, const SparseSection& section) {
  require(section.indices.size() == section.values.size(), "a sparse section has as many indices as values");
  put(out, at + wire::kKind, wire::kSparse);
  put(out, at + wire::kSectionFlags, section.hashed_order ? wire::kHashedOrder : std::uint8_t{0});
  put(out, at + wire::kBegin, section.begin);
  put(out, at + wire::kExtent, section.extent);
  put(out, at + wire::kCount, static_cast<std::uint32_t>(section.indices.size()));
  put(out, at + wire::kHashSeed, section.hash_seed);
  at = put_all(out, at + wire::kSectionHeader, section.indices);
  return put_all(out, at, section.values);
}

// Each index once and inside the unit: ascending, or in the slot its hash names.
void check_indices(const SparseSection& section, std::size_t at) {
  const auto slots = static_cast<std::uint32_t>(section.indices.size());
  for (std::uint32_t j = 0; j < slots; ++j, at += 4) {
    const std::uint32_t index = section.indices[j];
    if (section.hashed_order && index == kEmptySlot) {
      check(section.values[j] == 0.0f, at + 4 * std::size_t{slots}, "an empty slot has a value");
      continue;
    }
    check(index >= section.begin && index - section.begin < section.extent, at, "index outside its unit");
    if (section.hashed_order)
      check(scale_hash(murmur3_32(index - section.begin, section.hash_seed), slots) == j, at, "index in a wrong slot");
    else
      check(j == 0 || index > section.indices[j - 1], at, "indices do not ascend");
  }
}

// Where the next section may stand: dense ones come first, and those of one kind ascend without overlap.
struct Order {
  std::uint8_t kind = wire::kDense;
  std::uint64_t free = 0;  // first offset that no section of this kind has taken
};

// Reads the section at `at` and moves `at` and `order` behind it.
Section read_section(std::span<const std::byte> payload, std::size_t numel, std::size_t& at, Order& order) {
  const std::size_t start = at;
  check(payload.size() - at >= wire::kSectionHeader, payload.size(), "section header cut off");
  const auto kind = get<std::uint8_t>(payload, at + wire::kKind);
  const auto flags = get<std::uint8_t>(payload, at + wire::kSectionFlags);
  const auto begin = get<std::uint32_t>(payload, at + wire::kBegin);
  const auto extent = get<std::uint32_t>(payload, at + wire::kExtent);
  const std::size_t count = get<std::uint32_t>(payload, at + wire::kCount);
  const auto hash_seed = get<std::uint32_t>(payload, at + wire::kHashSeed);
  check(kind <= wire::kSparse, at + wire::kKind, "unknown kind of section");
  check(kind >= order.kind, at + wire::kKind, "dense section behind a sparse one");
  if (kind != order.kind) order = {.kind = kind, .free = 0};
  check(get<std::uint8_t>(payload, at + wire::kIndexCoding) == 0, at + wire::kIndexCoding, "unknown index coding");
  check(get<std::uint8_t>(payload, at + wire::kValueCoding) == 0, at + wire::kValueCoding, "unknown value coding");
  check(flags == 0 || (flags == wire::kHashedOrder && kind == wire::kSparse), at + wire::kSectionFlags,
        "unknown section flag");
  check(begin >= order.free, at + wire::kBegin, "sections overlap or do not ascend");
  check(std::uint64_t{begin} + extent <= numel, at + wire::kExtent, "section reaches past the bucket");
  check(flags == wire::kHashedOrder || hash_seed == 0, at + wire::kHashSeed, "hash seed without hashed order");
  for (std::size_t j = wire::kSectionHeader - 12; j < wire::kSectionHeader; j += 4)
    check(get<std::uint32_t>(payload, at + j) == 0, at + j, "reserved bytes are not zero");
  order.free = std::uint64_t{begin} + extent;
  at += wire::kSectionHeader;
  const std::size_t words = kind == wire::kSparse ? 2 * count : count;
  check((payload.size() - at) / 4 >= words, payload.size(), "section cut off");
  const auto* data = payload.data() + at;
  at += 4 * words;
  if (kind == wire::kDense) {
    check(count == extent, start + wire::kCount, "a dense section holds every element of its extent");
    return DenseSection{.begin = begin, .values = {reinterpret_cast<const float*>(data), count}};
  }
  SparseSection section{.begin = begin,
                        .extent = extent,
                        .hashed_order = flags == wire::kHashedOrder,
                        .hash_seed = hash_seed,
                        .indices = {reinterpret_cast<const std::uint32_t*>(data), count},
                        .values = {reinterpret_cast<const float*>(data) + count, count}};
  check(section.hashed_order || count <= extent, start + wire::kCount, "more entries than elements");
  check_indices(section, start + wire::kSectionHeader);
  return section;
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

std::string to_string(const Codec&) { return "raw_u32 x f32"; }

std::size_t payload_bound(const Codec&, std::size_t slices, std::span<const SectionShape> sections) noexcept {
  std::size_t bytes = kHeaderBytes + bitmap_bytes(slices);
  for (const SectionShape& shape : sections) bytes += wire::kSectionHeader + shape.capacity * (shape.dense ? 4 : 8);
  return (bytes + 7) / 8 * 8;
}

std::size_t encode(const Codec&, const PayloadHeader& header, const std::vector<bool>& has_gradient,
                   std::span<const Section> sections, std::span<std::byte> out) {
  const bool header_only = (header.flags & (PayloadHeader::relayout | PayloadHeader::failed)) != 0;
  std::size_t bytes = kHeaderBytes;
  if (!header_only) {
    require(has_gradient.size() == header.slices, "has_gradient has one bit per slice");
    bytes += bitmap_bytes(header.slices);
    for (const Section& section : sections) bytes += section_bytes(section);
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
      at = std::visit([&](const auto& s) { return write_section(out, at, s); }, section);
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
  require(reinterpret_cast<std::uintptr_t>(bytes.data()) % 4 == 0, "a payload must be aligned to 4 bytes");
  Payload payload{.header = read_header(bytes), .has_gradient = {}, .sections = {}};
  if (payload.header.flags != 0) return payload;
  bytes = bytes.first(get<std::uint64_t>(bytes, wire::kPayloadBytes));
  check(!payload.header.non_finite || *payload.header.non_finite < numel, wire::kNonFinite, "offset past the bucket");
  std::size_t at = kHeaderBytes;
  const std::size_t slices = payload.header.slices;
  check(bytes.size() - at >= bitmap_bytes(slices), bytes.size(), "gradient bits cut off");
  payload.has_gradient.resize(slices);
  for (std::size_t i = 0; i < 8 * bitmap_bytes(slices); ++i) {
    const bool bit = (bytes[at + i / 8] >> (i % 8) & std::byte{1}) != std::byte{0};
    if (i < slices) payload.has_gradient[i] = bit;
    check(i < slices || !bit, at + i / 8, "gradient bit without a slice");
  }
  at += bitmap_bytes(slices);
  for (Order order; at < bytes.size();) payload.sections.push_back(read_section(bytes, numel, at, order));
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
