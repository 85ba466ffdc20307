// codec.h: bytes -> validate -> decode_mean. They are refused with a position, or what they hold lies in the bucket and
// is what the oracle reads.
//
// A case: size of the bucket (3 bytes), how to treat the payload (1), the payload.
#include "fuzz.h"
#include "reference/wire.h"
#include "thinwire/error.h"
#include "thinwire/sparse_all_reduce.h"

namespace thinwire::fuzz {
namespace {

/// Corrects the size and the checksum, which mutations would never hit.
void seal(reference::Bytes& bytes) {
  if (bytes.size() < kHeaderBytes) return;
  bytes.resize(bytes.size() / 4 * 4);
  bytes.shrink_to_fit();  // so that a sanitizer sees any read past the end
  reference::overwrite(bytes, reference::kPayloadBytesAt, bytes.size(), 8);
  reference::seal(bytes);
}

void check_sections(const Payload& payload, std::size_t bytes, std::size_t numel) {
  std::size_t entries = 0;
  for (const Section& section : payload.sections) {
    if (const auto* dense = std::get_if<DenseSection>(&section)) {
      expect(dense->begin + dense->values.size() <= numel, "a dense section lies in the bucket");
      entries += dense->values.size();
      continue;
    }
    const auto& sparse = std::get<SparseSection>(section);
    expect(std::uint64_t{sparse.begin} + sparse.extent <= numel, "a sparse section lies in the bucket");
    expect(sparse.indices.size() == sparse.values.size(), "as many indices as values");
    entries += sparse.indices.size();
    std::vector<std::uint32_t> indices;
    for (const std::uint32_t index : sparse.indices)
      if (!sparse.hashed_order || index != kEmptySlot) indices.push_back(index);
    if (sparse.hashed_order) std::ranges::sort(indices);
    for (std::size_t j = 0; j < indices.size(); ++j) {
      expect(indices[j] >= sparse.begin && indices[j] - sparse.begin < sparse.extent, "an index lies in its unit");
      expect(j == 0 || indices[j] > indices[j - 1], "no index stands twice");
    }
  }
  expect(entries <= 8 * bytes, "an entry takes at least a bit, so memory is bounded by what has arrived");
}

void check_against_oracle(const Payload& payload, const reference::Bytes& bytes) {
  const std::vector<reference::ReadSection> expected = reference::read_sections(bytes);
  expect(payload.sections.size() == expected.size(), "as many sections as the oracle reads");
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (const auto* dense = std::get_if<DenseSection>(&payload.sections[i])) {
      expect(expected[i].kind == 0 && expected[i].begin == dense->begin, "a dense section is what the oracle reads");
      expect(same(dense->values, expected[i].values), "dense values are what the oracle reads");
      continue;
    }
    const auto& sparse = std::get<SparseSection>(payload.sections[i]);
    expect(expected[i].begin == sparse.begin && expected[i].extent == sparse.extent, "so is a sparse section");
    expect(std::ranges::equal(sparse.indices, expected[i].indices), "indices are what the oracle reads");
    expect(same(sparse.values, expected[i].values), "values are what the oracle reads");
  }
}

/// The mean of `ranks` such payloads, entry by entry.
std::vector<float> slow_mean(const Payload& payload, std::size_t numel, std::size_t ranks) {
  std::vector<float> sum(numel, 0.0f);
  for (std::size_t r = 0; r < ranks; ++r)
    for (const Section& section : payload.sections)
      if (const auto* dense = std::get_if<DenseSection>(&section)) {
        for (std::size_t i = 0; i < dense->values.size(); ++i) sum[dense->begin + i] += dense->values[i];
      } else {
        const auto& sparse = std::get<SparseSection>(section);
        for (std::size_t j = 0; j < sparse.indices.size(); ++j)
          if (sparse.indices[j] != kEmptySlot) sum[sparse.indices[j]] += sparse.values[j];
      }
  for (float& value : sum) value /= static_cast<float>(ranks);
  return sum;
}

void check_mean(const Payload& payload, std::size_t numel) {
  for (const std::size_t ranks : {std::size_t{1}, std::size_t{3}}) {
    const std::vector<Payload> payloads(ranks, payload);
    std::vector<float> mean(numel + 1, 7.0f);
    decode_mean(payloads, {mean.data(), numel});
    expect(mean[numel] == 7.0f, "nothing is written behind the bucket");
    mean.pop_back();
    expect(same(mean, slow_mean(payload, numel, ranks)), "the mean is that of the entries");
  }
  for (const DType dtype : {DType::f16, DType::bf16}) {
    std::vector<std::uint16_t> mean(numel);
    decode_mean({&payload, 1}, {mean.data(), numel, dtype});
  }
}

}  // namespace
}  // namespace thinwire::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace thinwire;
  fuzz::Input input(data, size);
  const std::size_t numel = input.take<std::uint16_t>() + (input.take<std::uint8_t>() % 2) * 65536u;
  const bool sealed = input.take<std::uint8_t>() % 2 == 1;
  reference::Bytes bytes = input.rest();
  if (sealed) fuzz::seal(bytes);
  try {
    const Payload payload = validate(bytes, numel);
    if (payload.header.flags != 0) {
      fuzz::expect(payload.sections.empty() && payload.has_gradient.empty(), "a flagged payload is a header alone");
      return 0;
    }
    fuzz::expect(payload.has_gradient.size() == payload.header.slices, "one gradient bit per slice");
    fuzz::expect(!payload.header.non_finite || *payload.header.non_finite < numel, "the flagged entry exists");
    fuzz::check_sections(payload, bytes.size(), numel);
    fuzz::check_against_oracle(payload, bytes);
    fuzz::check_mean(payload, numel);
  } catch (const Error& error) {
    fuzz::expect(error.code() == ErrorCode::corrupt_payload, error.what());
    fuzz::expect(error.position() && *error.position() <= bytes.size(), "the position lies in the payload");
  }
  return 0;
}
