#include "all_reduce/block_protocol.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <sstream>

#include "core/check.h"

namespace thinwire {
namespace {

std::string rank_name(std::size_t rank) { return "rank " + std::to_string(rank); }

std::string job_name(const PayloadHeader& header) {
  return "step " + std::to_string(header.step) + ", bucket " + std::to_string(header.job);
}

// The first line that differs, of both texts.
std::optional<std::pair<std::string, std::string>> first_difference(const std::string& a, const std::string& b) {
  std::istringstream lines_a(a);
  std::istringstream lines_b(b);
  for (;;) {
    std::string line_a;
    std::string line_b;
    const bool more_a = static_cast<bool>(std::getline(lines_a, line_a));
    const bool more_b = static_cast<bool>(std::getline(lines_b, line_b));
    if (!more_a && !more_b) return std::nullopt;
    if (line_a != line_b || more_a != more_b)
      return std::pair(more_a ? line_a : "nothing more", more_b ? line_b : "nothing more");
  }
}

// What a peer says goes into a sentence: one line, not too long, whatever bytes it sent.
std::string printable(std::string text) {
  constexpr std::size_t kLongest = 1000;
  if (text.size() > kLongest) text.replace(kLongest, std::string::npos, " [...]");
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return c < ' ' || c == 0x7f; }, ' ');
  return text;
}

std::string describe_difference(const std::vector<std::string>& texts, const std::string& what) {
  for (std::size_t r = 1; r < texts.size(); ++r)
    if (const auto lines = first_difference(texts[0], texts[r]))
      return what + " differ between ranks: rank 0 has " + printable(lines->first) + ", " + rank_name(r) + " has " +
             printable(lines->second);
  return what + " differ between ranks";
}

}  // namespace

std::span<const std::byte> BlockProtocol::exchange(const Offer& offer) {
  const auto known = agreed_.find(offer.header.job);
  const std::size_t agreed = known != agreed_.end() ? known->second : kHeaderBytes;
  const bool ready = !offer.failure && offer.header.block_bytes == agreed;
  std::span<const std::byte> block = offer.block;
  if (!ready) {
    PayloadHeader header = offer.header;
    header.flags = offer.failure ? PayloadHeader::failed : PayloadHeader::relayout;
    sent_.resize(agreed);
    encode({}, header, {}, {}, sent_);
    block = sent_;
  }
  try {
    gather(block);
  } catch (const Error& error) {
    // The others go on to a round of sizes that this rank does not know: its next call would meet theirs.
    if (!ready) communicator_.abort(error.what());
    throw;
  }
  compare(offer);
  // All need the same size now; if it is a new one, nobody has sent a payload yet.
  if (!ready) {
    agreed_[offer.header.job] = offer.block.size();
    gather(offer.block);
    compare(offer);
  }
  return blocks_;
}

void BlockProtocol::gather(std::span<const std::byte> block) {
  const auto ranks = static_cast<std::size_t>(communicator_.size());
  blocks_.resize(ranks * block.size());
  communicator_.all_gather(block, blocks_);
  headers_.clear();
  for (std::size_t r = 0; r < ranks; ++r) {
    try {
      headers_.push_back(read_header(std::span(blocks_).subspan(r * block.size(), block.size())));
    } catch (const Error& error) {
      throw Error(error.code(), "from " + rank_name(r) + ": " + error.what(), error.position());
    }
  }
}

// Every rank sees the same headers, so every rank takes the same branch.
void BlockProtocol::compare(const Offer& offer) {
  const PayloadHeader& first = headers_[0];
  const auto differs = [&](auto field) {
    return std::any_of(headers_.begin(), headers_.end(),
                       [&](const PayloadHeader& h) { return h.*field != first.*field; });
  };
  const auto failed = std::find_if(headers_.begin(), headers_.end(),
                                   [](const PayloadHeader& h) { return (h.flags & PayloadHeader::failed) != 0; });
  if (failed != headers_.end()) {
    std::string reason;
    ErrorCode code = ErrorCode::remote;
    if (offer.failure) {
      try {
        std::rethrow_exception(offer.failure);
      } catch (const Error& error) {
        reason = error.what();
        code = error.code();
      } catch (const std::exception& error) {
        reason = error.what();
        code = ErrorCode::system;
      }
    }
    const auto rank = static_cast<std::size_t>(failed - headers_.begin());
    const std::vector<std::string> reasons = gather_texts(reason);
    throw Error(code, rank_name(rank) + " failed in " + job_name(*failed) + ": " + printable(reasons[rank]));
  }
  if (differs(&PayloadHeader::options_hash))
    throw Error(ErrorCode::remote, describe_difference(gather_texts(*offer.options), "options or parameters"));
  for (std::size_t r = 1; r < headers_.size(); ++r)
    if (headers_[r].step != first.step || headers_[r].job != first.job)
      throw Error(ErrorCode::remote, "ranks are out of step: rank 0 is in " + job_name(first) + ", " + rank_name(r) +
                                         " in " + job_name(headers_[r]));
  if (differs(&PayloadHeader::layout_hash) || differs(&PayloadHeader::block_bytes) || differs(&PayloadHeader::slices))
    throw Error(ErrorCode::remote,
                describe_difference(gather_texts(*offer.layout), "the slices of " + job_name(first)));
}

// Every rank sees the same sizes, so every rank refuses the same ones.
std::vector<std::string> BlockProtocol::gather_texts(const std::string& mine) {
  constexpr std::size_t kLongest = std::size_t{1} << 24;
  const auto ranks = static_cast<std::size_t>(communicator_.size());
  std::vector<std::uint64_t> sizes(ranks);
  const std::uint64_t size = std::min(mine.size(), kLongest);
  communicator_.all_gather(std::as_bytes(std::span(&size, 1)), std::as_writable_bytes(std::span(sizes)));
  for (std::size_t r = 0; r < ranks; ++r)
    if (sizes[r] > kLongest)
      throw Error(ErrorCode::remote, rank_name(r) + " differs from the others or has failed, and announces " +
                                         std::to_string(sizes[r]) + " bytes to say why");
  const std::size_t longest = std::max<std::uint64_t>(1, *std::max_element(sizes.begin(), sizes.end()));
  std::vector<std::byte> sent(longest);
  std::memcpy(sent.data(), mine.data(), size);
  std::vector<std::byte> received(ranks * longest);
  communicator_.all_gather(sent, received);
  std::vector<std::string> texts;
  for (std::size_t r = 0; r < ranks; ++r)
    texts.emplace_back(reinterpret_cast<const char*>(received.data() + r * longest), sizes[r]);
  return texts;
}

}  // namespace thinwire
