#include "inspect.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <vector>

#include "codec/bytes.h"
#include "codec/elias_fano.h"
#include "codec/values.h"
#include "codec/wire.h"
#include "thinwire/codec.h"
#include "thinwire/error.h"

namespace thinwire::tools {
namespace {

using Json = nlohmann::ordered_json;

std::vector<std::byte> read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  if (!file) throw Error(ErrorCode::system, "'" + path + "' cannot be read");
  if (text.starts_with("PK\x03\x04"))
    throw Error(ErrorCode::corrupt_payload,
                "'" + path +
                    "' is a zip archive, not a payload; if PyTorch wrote it as a checkpoint, "
                    "`python -m thinwire inspect " +
                    path + "` reads it",
                0);
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

std::string hex(std::uint64_t value) {
  char text[19];
  std::snprintf(text, sizeof text, "0x%016llx", static_cast<unsigned long long>(value));
  return text;
}

Json status_of(const PayloadHeader& header) {
  if (header.flags == 0) return "payload";
  std::string words;
  if ((header.flags & PayloadHeader::relayout) != 0) words = "relayout";
  if ((header.flags & PayloadHeader::failed) != 0) words += words.empty() ? "failed" : ", failed";
  return words;
}

Json describe_header(const PayloadHeader& header, const Payload& payload) {
  std::vector<std::size_t> absent;
  for (std::size_t i = 0; i < payload.has_gradient.size(); ++i)
    if (!payload.has_gradient[i]) absent.push_back(i);
  return {{"version", kWireVersion},
          {"status", status_of(header)},
          {"step", header.step},
          {"job", header.job},
          {"flags", header.flags},
          {"options_hash", hex(header.options_hash)},
          {"layout_hash", hex(header.layout_hash)},
          {"block_bytes", header.block_bytes},
          {"non_finite", header.non_finite ? Json(*header.non_finite) : Json()},
          {"slices", header.slices},
          {"slices_without_gradient", absent}};
}

// Of the finite values that count.
void describe_values(Json& row, std::span<const float> values, std::span<const std::uint32_t> indices) {
  std::optional<float> least, most;
  std::size_t entries = 0, not_finite = 0;
  for (std::size_t j = 0; j < values.size(); ++j) {
    if (!indices.empty() && indices[j] == kEmptySlot) continue;
    ++entries;
    if (!std::isfinite(values[j])) {
      ++not_finite;
      continue;
    }
    least = std::min(least.value_or(values[j]), values[j]);
    most = std::max(most.value_or(values[j]), values[j]);
  }
  row["entries"] = entries;
  const double data = row["bytes"].get<double>() - wire::kSectionHeader;
  row["bits_per_entry"] = entries == 0 ? Json() : Json(8 * data / static_cast<double>(entries));
  row["least"] = least ? Json(*least) : Json();
  row["most"] = most ? Json(*most) : Json();
  row["not_finite"] = not_finite;
}

// The section that stands at byte `at` of a sound payload; moves `at` behind it.
Json describe_section(const Section& section, std::span<const std::byte> bytes, std::size_t& at) {
  const std::size_t start = at;
  const auto count = get<std::uint32_t>(bytes, at + wire::kCount);
  const auto extent = get<std::uint32_t>(bytes, at + wire::kExtent);
  const Codec codec{.indices = get<IndexCoding>(bytes, at + wire::kIndexCoding),
                    .values = get<ValueCoding>(bytes, at + wire::kValueCoding)};
  const auto* sparse = std::get_if<SparseSection>(&section);
  at += wire::kSectionHeader + value_bytes(codec.values, count);
  if (sparse != nullptr)
    at += codec.indices == IndexCoding::elias_fano ? elias_fano_bytes(extent, count) : 4 * std::size_t{count};
  Json row = {{"kind", sparse == nullptr      ? "dense"
                       : sparse->hashed_order ? "hashed"
                                              : "sparse"},
              {"at", start},
              {"begin", get<std::uint32_t>(bytes, start + wire::kBegin)},
              {"extent", extent},
              {"coding", sparse == nullptr ? to_string(codec.values) : to_string(codec)},
              {"slots", count},
              {"bytes", at - start}};
  if (sparse == nullptr)
    describe_values(row, std::get<DenseSection>(section).values, {});
  else
    describe_values(row, sparse->values, sparse->indices);
  return row;
}

std::string text_of(const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_null()) return "-";
  if (!value.is_number_float()) return value.dump();
  char text[32];
  std::snprintf(text, sizeof text, "%.4g", value.get<double>());
  return text;
}

void print_text(const Json& payload) {
  for (const auto& [name, value] : payload.items())
    if (name != "sections") std::printf("%-24s %s\n", name.c_str(), text_of(value).c_str());
  const Json& sections = payload["sections"];
  if (sections.empty()) return;
  std::printf("\n%-7s %8s %10s %10s %-24s %9s %9s %10s %6s %10s %10s\n", "section", "at byte", "begin", "extent",
              "coding", "slots", "entries", "bytes", "bits", "least", "most");
  for (const Json& row : sections)
    std::printf("%-7s %8s %10s %10s %-24s %9s %9s %10s %6s %10s %10s\n", text_of(row["kind"]).c_str(),
                text_of(row["at"]).c_str(), text_of(row["begin"]).c_str(), text_of(row["extent"]).c_str(),
                text_of(row["coding"]).c_str(), text_of(row["slots"]).c_str(), text_of(row["entries"]).c_str(),
                text_of(row["bytes"]).c_str(), text_of(row["bits_per_entry"]).c_str(), text_of(row["least"]).c_str(),
                text_of(row["most"]).c_str());
}

Json describe(std::span<const std::byte> bytes, std::size_t numel) {
  const Payload payload = validate(bytes, numel);
  const auto used = get<std::uint64_t>(bytes, wire::kPayloadBytes);
  const auto padding = bytes.subspan(used);
  const auto stray = std::ranges::find_if(padding, [](std::byte b) { return b != std::byte{0}; });
  if (stray != padding.end())
    refuse(used + static_cast<std::size_t>(stray - padding.begin()), "bytes behind the payload are not zero");
  Json out = describe_header(payload.header, payload);
  out["payload_bytes"] = used;
  out["padding_bytes"] = padding.size();
  out["sections"] = Json::array();
  std::size_t at = kHeaderBytes + (payload.has_gradient.size() + 31) / 32 * 4;
  for (const Section& section : payload.sections) out["sections"].push_back(describe_section(section, bytes, at));
  return out;
}

}  // namespace

void print_payload(const InspectOptions& options) {
  const std::vector<std::byte> bytes = read_file(options.path);
  Json payload;
  try {
    payload = describe(bytes, options.numel);
  } catch (const Error& error) {
    throw Error(error.code(), "'" + options.path + "': " + error.what(), error.position());
  }
  if (options.json)
    std::puts(payload.dump(2).c_str());
  else
    print_text(payload);
}

}  // namespace thinwire::tools
