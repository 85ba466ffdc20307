// Stage 4: what every transport shares: argument checks and the count of bytes.
#include "thinwire/communicator.h"

#include <algorithm>

#include "core/check.h"

namespace thinwire {
namespace {

void check_blocks(std::size_t block, std::size_t blocks, int size, const char* operation) {
  require(block > 0, std::string(operation) + ": a block has at least one byte");
  require(blocks == block * static_cast<std::size_t>(size),
          std::string(operation) + ": the buffer for " + std::to_string(size) + " blocks of " + std::to_string(block) +
              " bytes has " + std::to_string(blocks) + " bytes");
}

}  // namespace

void Communicator::all_gather(std::span<const std::byte> block, std::span<std::byte> blocks) {
  const int ranks = size();
  check_blocks(block.size(), blocks.size(), ranks, "all_gather");
  if (ranks == 1) {
    std::copy(block.begin(), block.end(), blocks.begin());
    return;
  }
  do_all_gather(block, blocks);
  const std::uint64_t others = static_cast<std::uint64_t>(ranks - 1) * block.size();
  traffic_.bytes_sent += others;
  traffic_.bytes_received += others;
  ++traffic_.calls;
}

void Communicator::all_to_all(std::span<const std::byte> sent, std::span<std::byte> received) {
  const int ranks = size();
  const std::size_t block = sent.size() / static_cast<std::size_t>(ranks);
  check_blocks(block, sent.size(), ranks, "all_to_all");
  check_blocks(block, received.size(), ranks, "all_to_all");
  if (ranks == 1) {
    std::copy(sent.begin(), sent.end(), received.begin());
    return;
  }
  do_all_to_all(sent, received);
  const std::uint64_t others = static_cast<std::uint64_t>(ranks - 1) * block;
  traffic_.bytes_sent += others;
  traffic_.bytes_received += others;
  ++traffic_.calls;
}

void Communicator::all_reduce(std::span<const float> mine, std::span<float> sum) {
  require(!mine.empty(), "all_reduce: there is at least one element");
  require(mine.size() == sum.size(), "all_reduce: " + std::to_string(mine.size()) + " elements cannot be summed into " +
                                         std::to_string(sum.size()));
  const int ranks = size();
  if (ranks == 1) {
    if (mine.data() != sum.data()) std::copy(mine.begin(), mine.end(), sum.begin());
    return;
  }
  do_all_reduce(mine, sum);
  const auto others = static_cast<std::uint64_t>(ranks - 1);
  const std::uint64_t bytes = 2 * others * mine.size_bytes() / static_cast<std::uint64_t>(ranks);
  traffic_.bytes_sent += bytes;
  traffic_.bytes_received += bytes;
  ++traffic_.calls;
}

void Communicator::barrier() {
  if (size() > 1) do_barrier();
}

}  // namespace thinwire
