// How a job's payloads travel in one collective: blocks of a size that all ranks agreed on before, each led by a header
// that says whether its sender has failed, needs another size, or means another job than the others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "thinwire/codec.h"
#include "thinwire/communicator.h"

namespace thinwire {

class BlockProtocol {
 public:
  explicit BlockProtocol(Communicator& communicator) : communicator_(communicator) {}

  /// What this rank brings to a job.
  struct Offer {
    PayloadHeader header;                  ///< block_bytes: the size that `block` has
    std::span<const std::byte> block;      ///< the encoded payload, padded; unused if `failure` is set
    std::exception_ptr failure;            ///< this rank cannot do its part
    const std::string* options = nullptr;  ///< options and parameters in words, line by line
    const std::string* layout = nullptr;   ///< the bucket in words, line by line
  };

  /// One collective when every rank needs the size agreed for this job before; one more when the size is new.
  /// Returns the payload blocks of all ranks, in rank order, each header.block_bytes long, valid until the next call.
  /// Throws on every rank the same sentence if one has failed or means another job; the failed rank throws it with its own
  /// code, the others with `remote`.
  std::span<const std::byte> exchange(const Offer& offer);
  /// Of the blocks that the last exchange returned, in rank order.
  const std::vector<PayloadHeader>& headers() const noexcept { return headers_; }

 private:
  void gather(std::span<const std::byte> block);
  void compare(const Offer& offer);
  std::vector<std::string> gather_texts(const std::string& mine);

  Communicator& communicator_;
  std::unordered_map<std::uint32_t, std::size_t> agreed_;  // by job; a header alone if absent
  std::vector<std::byte> sent_;
  std::vector<std::byte> blocks_;
  std::vector<PayloadHeader> headers_;
};

}  // namespace thinwire
