// thinwire inspect: a payload file in words.
#pragma once

#include <cstddef>
#include <string>

namespace thinwire::tools {

struct InspectOptions {
  std::string path;
  std::size_t numel = 0xFFFFFFFFu;  ///< of the bucket; unless known, the most that a bucket may have
  bool json = false;
};

/// Errors: corrupt_payload naming the file and the first offending byte, or that the file is no payload at all.
void print_payload(const InspectOptions& options);

}  // namespace thinwire::tools
