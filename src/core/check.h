// Refusals in one line each.
#pragma once

#include <string>
#include <string_view>

#include "thinwire/error.h"

namespace thinwire {

inline void require(bool condition, const std::string& sentence) {
  if (!condition) throw Error(ErrorCode::invalid_argument, sentence);
}

inline std::string quoted(std::string_view name) {
  std::string text(1, '\'');
  text.append(name).push_back('\'');
  return text;
}

}  // namespace thinwire
