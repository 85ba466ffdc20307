// The Python module's parts, and what they share: errors in both languages, and Python objects that are let go of on
// threads that do not hold the GIL.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "thinwire/error.h"
#include "thinwire/sparse_gradient.h"

/// The type of any selector, in signatures.
#define THINWIRE_SELECTORS "TopK | TrimmedTopK | HashedSlots | ThresholdSearch | SampledTopK"

namespace thinwire::python {

namespace nb = nanobind;

void bind_selectors(nb::module_& m);
void bind_options(nb::module_& m);
void bind_presets(nb::module_& m);
void bind_communicator(nb::module_& m);
void bind_reducer(nb::module_& m);
void bind_stats(nb::module_& m);
void bind_plan(nb::module_& m);
/// Closes all reducers of this process; for interpreter exit, while their threads can still take the GIL.
void close_reducers();

/// 'both', 'largest' or 'smallest'. Errors: invalid_argument for anything else.
Side parse_side(const std::string& name);

/// Flat host arrays as arguments. Bind each with nb::arg().noconvert(): a conversion would be a silent copy.
template <class T>
using Array = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

/// A str. What is not UTF-8 shows as U+FFFD: sentences may quote what another rank has sent. Needs the GIL.
nb::object to_text(const std::string& bytes);
/// The instance of thinwire.Error for an exception of C++; a Python exception is returned as it is. Needs the GIL.
nb::object to_python(const std::exception_ptr& error);
/// The other way: a Python exception as Error. What is not a thinwire.Error becomes `system`, with `doing` (what was
/// tried) before its text. Needs the GIL.
Error from_python(nb::python_error& error, const std::string& doing);

/// A new one-dimensional array that owns its values. Python sees an object with __dlpack__.
template <class T>
nb::object to_array(std::vector<T> values) {
  auto owned = std::make_unique<std::vector<T>>(std::move(values));
  T* data = owned->data();
  const std::size_t count = owned->size();
  nb::capsule owner(owned.release(), [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::cast(nb::ndarray<nb::array_api, T, nb::ndim<1>, nb::device::cpu>(data, {count}, owner));
}

/// A Python object that may be dropped on any thread.
using Shared = std::shared_ptr<nb::object>;
inline Shared share(nb::object object) {
  return Shared(new nb::object(std::move(object)), [](nb::object* held) {
    const nb::gil_scoped_acquire gil;
    delete held;
  });
}

}  // namespace thinwire::python
