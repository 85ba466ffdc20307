// What the options' bindings share: closed choices as strings, and repr() as the expression that makes the object.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <array>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>

#include "bindings.h"
#include "thinwire/select.h"

namespace thinwire::python {

template <class E, std::size_t N>
using Names = std::array<std::pair<const char*, E>, N>;

inline constexpr Names<HashedSlots::Layout, 2> kLayouts{{{"a", HashedSlots::Layout::a}, {"b", HashedSlots::Layout::b}}};

template <class E, std::size_t N>
std::string name_of(const Names<E, N>& names, E value) {
  for (const auto& [name, known] : names) {
    if (known == value) return name;
  }
  return "?";
}

template <class E, std::size_t N>
E parse(const Names<E, N>& names, const char* what, const std::string& text) {
  std::string expected;
  for (const auto& [name, value] : names) {
    if (text == name) return value;
    expected += (expected.empty() ? "'" : " or '") + std::string(name) + "'";
  }
  throw Error(ErrorCode::invalid_argument, std::string(what) + " is '" + text + "', expected " + expected);
}

/// "Type(name=value, …)" from pairs of name and value.
inline std::string expression(const char* type, std::initializer_list<std::pair<const char*, nb::object>> fields) {
  std::string text = std::string(type) + "(";
  const char* separator = "";
  for (const auto& [name, value] : fields) {
    text += separator + std::string(name) + "=" + nb::cast<std::string>(nb::repr(value));
    separator = ", ";
  }
  return text + ")";
}

template <class T>
nb::object value(const T& v) {
  return nb::cast(v, nb::rv_policy::copy);
}
// A float shows the digits that were written, not those of its f64 image.
inline nb::object value(float v) {
  const std::string digits = nb::cast<std::string>(nb::str("{:.7g}").attr("format")(static_cast<double>(v)));
  return nb::float_(std::stod(digits));
}
inline nb::object value(const std::optional<float>& v) { return v ? value(*v) : nb::none(); }

}  // namespace thinwire::python
