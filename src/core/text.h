// Numbers in words that ranks compare: the shortest text that reads back as the same number.
#pragma once

#include <array>
#include <charconv>
#include <string>

namespace thinwire {

template <class Number>
std::string text_of(Number number) {
  std::array<char, 32> text{};
  return {text.data(), std::to_chars(text.data(), text.data() + text.size(), number).ptr};
}

}  // namespace thinwire
