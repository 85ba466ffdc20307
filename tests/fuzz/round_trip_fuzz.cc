// codec.h: any sections that an encoder may be given -> bound, encode, validate -> the same sections, their values as
// round_values leaves them.
//
// A case: codec, header, slices, then sections until the bytes end.
#include "core/hash.h"
#include "fuzz.h"
#include "reference/values.h"
#include "thinwire/codec.h"

namespace thinwire::fuzz {
namespace {

constexpr std::uint32_t kLargestExtent = 70'000;

struct Owned {
  bool dense = false;
  SparseSection shape;  // without its entries
  std::vector<std::uint32_t> indices;
  std::vector<float> values;

  Section section() const {
    if (dense) return DenseSection{.begin = shape.begin, .values = values};
    SparseSection full = shape;
    full.indices = indices;
    full.values = values;
    return full;
  }
};

ValueCoding take_values(Input& input) { return static_cast<ValueCoding>(input.below(4)); }

/// Ascending offsets of the unit, at random distances; few bytes make many entries.
std::vector<std::uint32_t> take_indices(Input& input, std::uint32_t begin, std::uint32_t extent) {
  std::vector<std::uint32_t> indices;
  std::uint32_t at = input.below(8);
  while (at < extent && indices.size() < 3000) {
    const std::uint32_t run = 1 + input.below(64);
    for (std::uint32_t i = 0; i < run && at < extent; ++i) indices.push_back(begin + at++);
    const std::uint32_t gap = input.take<std::uint8_t>();
    at += gap < 128 ? gap : (gap - 127) * (gap - 127);
    if (input.size() == 0) break;
  }
  return indices;
}

Owned take_section(Input& input, const Codec& codec, bool dense, std::uint32_t begin) {
  Owned out;
  out.dense = dense;
  out.shape.begin = begin;
  if (dense) {
    out.values.resize(input.below(40));
    for (float& value : out.values) value = input.value();
    return out;
  }
  out.shape.extent = input.below(kLargestExtent);
  if (input.chance()) out.shape.coding = take_values(input);
  const ValueCoding coding = out.shape.coding.value_or(codec.values);
  out.indices = take_indices(input, begin, out.shape.extent);
  const bool may_be_hashed = codec.indices == IndexCoding::raw_u32 && coding != ValueCoding::shared_mean;
  if (may_be_hashed && input.chance()) {
    out.shape.hashed_order = true;
    out.shape.hash_seed = input.take<std::uint32_t>();
    std::vector<std::uint32_t> slots(input.below(2000), kEmptySlot);
    for (const std::uint32_t index : out.indices)
      if (!slots.empty())
        slots[scale_hash(murmur3_32(index - begin, out.shape.hash_seed), static_cast<std::uint32_t>(slots.size()))] =
            index;
    out.indices = std::move(slots);
  }
  for (const std::uint32_t index : out.indices) {
    const float any = coding == ValueCoding::f32 ? input.value() : input.finite();
    out.values.push_back(index == kEmptySlot ? 0.0f : any);
  }
  return out;
}

std::vector<float> rounded(ValueCoding coding, std::vector<float> values) {
  round_values(coding, values);
  for (const float value : values)
    if (coding != ValueCoding::f32) expect(std::isfinite(value), "finite values stay finite");
  std::vector<float> again = values;
  round_values(coding, again);
  expect(same(values, again), "rounding twice changes nothing");
  return values;
}

void check(const Payload& payload, const Codec& codec, const std::vector<Owned>& sent) {
  expect(payload.sections.size() == sent.size(), "as many sections as were sent");
  for (std::size_t i = 0; i < sent.size(); ++i) {
    if (const auto* dense = std::get_if<DenseSection>(&payload.sections[i])) {
      expect(sent[i].dense && dense->begin == sent[i].shape.begin && same(dense->values, sent[i].values),
             "a dense section comes back");
      continue;
    }
    const auto& got = std::get<SparseSection>(payload.sections[i]);
    const SparseSection& shape = sent[i].shape;
    expect(!sent[i].dense && got.begin == shape.begin && got.extent == shape.extent &&
               got.hashed_order == shape.hashed_order && got.hash_seed == shape.hash_seed,
           "a sparse section comes back");
    expect(std::ranges::equal(got.indices, sent[i].indices), "indices come back");
    const ValueCoding coding = shape.coding.value_or(codec.values);
    expect(same(got.values, rounded(coding, sent[i].values)), "values come back as they were rounded");
    expect(same(got.values, reference::received(coding, sent[i].values)), "and as the format says");
  }
}

}  // namespace
}  // namespace thinwire::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace thinwire;
  fuzz::Input input(data, size);
  const Codec codec{.indices = input.chance() ? IndexCoding::elias_fano : IndexCoding::raw_u32,
                    .values = fuzz::take_values(input)};
  PayloadHeader header;
  header.step = input.take<std::uint64_t>();
  header.job = input.take<std::uint32_t>();
  header.slices = input.below(80);
  header.options_hash = input.take<std::uint64_t>();
  header.layout_hash = input.take<std::uint64_t>();
  header.block_bytes = input.take<std::uint64_t>();
  std::vector<bool> has_gradient;
  for (std::uint32_t i = 0; i < header.slices; ++i) has_gradient.push_back(input.chance());

  std::vector<fuzz::Owned> sent;
  std::vector<SectionShape> shapes;
  std::uint32_t at = 0;  // dense and sparse sections may overlap
  for (bool dense = true; input.size() > 0 && sent.size() < 8;) {
    if (dense && input.chance()) {
      dense = false;
      at = 0;
    }
    at += input.below(300);
    const fuzz::Owned& section = sent.emplace_back(fuzz::take_section(input, codec, dense, at));
    at += dense ? static_cast<std::uint32_t>(section.values.size()) : section.shape.extent;
    shapes.push_back({.dense = dense,
                      .capacity = section.values.size() + (dense ? 0 : input.below(20)),
                      .extent = section.shape.extent,
                      .coding = section.shape.coding});
  }
  const std::size_t numel = 8 * (fuzz::kLargestExtent + 300);
  if (input.chance()) header.non_finite = input.below(1000);

  std::vector<Section> sections;
  for (const fuzz::Owned& section : sent) sections.push_back(section.section());
  std::vector<std::byte> block(payload_bound(codec, header.slices, shapes), std::byte{0xEE});
  const std::size_t used = encode(codec, header, has_gradient, sections, block);
  fuzz::expect(used <= block.size() && std::all_of(block.begin() + static_cast<std::ptrdiff_t>(used), block.end(),
                                                   [](std::byte b) { return b == std::byte{0}; }),
               "the rest of the block is zero");
  block.resize(used);
  const Payload payload = validate(block, numel);
  fuzz::expect(payload.header.step == header.step && payload.header.job == header.job &&
                   payload.header.options_hash == header.options_hash &&
                   payload.header.layout_hash == header.layout_hash &&
                   payload.header.block_bytes == header.block_bytes && payload.header.non_finite == header.non_finite,
               "the header comes back");
  fuzz::expect(payload.has_gradient == has_gradient, "gradient bits come back");
  fuzz::check(payload, codec, sent);
  return 0;
}
