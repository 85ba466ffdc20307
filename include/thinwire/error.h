// thinwire: everything that can go wrong, as one exception type with a code.
#pragma once

#include <cstddef>
#include <optional>
#include <stdexcept>
#include <string>

namespace thinwire {

enum class ErrorCode {
  invalid_argument,  ///< the caller's fault; nothing was changed
  unsupported,       ///< a valid wish that this build or this version does not fulfil
  timeout,           ///< a wait for other ranks ran out
  remote,            ///< another rank failed or differs from this one
  corrupt_payload,   ///< received bytes were refused; `position` says where
  system,            ///< transport or operating system
};

/// "invalid_argument", "timeout", …
const char* to_string(ErrorCode code) noexcept;

/// The one exception that thinwire throws. `what()` is one sentence that names the offending thing.
class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& sentence, std::optional<std::size_t> position = std::nullopt)
      : std::runtime_error(sentence), code_(code), position_(position) {}

  ErrorCode code() const noexcept { return code_; }
  /// Byte offset of the first offending byte of a payload; set for `corrupt_payload` only.
  std::optional<std::size_t> position() const noexcept { return position_; }

 private:
  ErrorCode code_;
  std::optional<std::size_t> position_;
};

}  // namespace thinwire
