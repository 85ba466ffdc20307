// Payload bytes: written, read, refused.
#pragma once

#include <cstddef>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>

#include "thinwire/error.h"

namespace thinwire {

template <class T>
void put(std::span<std::byte> out, std::size_t at, T value) {
  static_assert(std::is_trivially_copyable_v<T>);
  std::memcpy(out.data() + at, &value, sizeof value);
}

template <class T>
T get(std::span<const std::byte> in, std::size_t at) {
  T value;
  std::memcpy(&value, in.data() + at, sizeof value);
  return value;
}

[[noreturn]] inline void refuse(std::size_t position, const std::string& why) {
  throw Error(ErrorCode::corrupt_payload, "payload refused at byte " + std::to_string(position) + ": " + why, position);
}

inline void check(bool sound, std::size_t position, const char* why) {
  if (!sound) refuse(position, why);
}

}  // namespace thinwire
