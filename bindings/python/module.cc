// thinwire._thinwire: the Python module, and how errors cross between the languages.
#include <nanobind/stl/string.h>

#include <initializer_list>
#include <string>

#include "bindings.h"
#include "thinwire/version.h"

namespace thinwire::python {

namespace {

nb::object error_class() { return nb::module_::import_("thinwire._errors").attr("Error"); }

nb::object error_object(ErrorCode code, const char* sentence, std::optional<std::size_t> position) {
  nb::object at = nb::none();
  if (position) at = nb::int_(*position);
  return error_class()(to_string(code), to_text(sentence), at);
}

ErrorCode code_of(const std::string& name) {
  for (const ErrorCode code : {ErrorCode::invalid_argument, ErrorCode::unsupported, ErrorCode::timeout,
                               ErrorCode::remote, ErrorCode::corrupt_payload, ErrorCode::system}) {
    if (name == to_string(code)) return code;
  }
  return ErrorCode::system;
}

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Error& error) {
    const nb::object instance = error_object(error.code(), error.what(), error.position());
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(instance.ptr())), instance.ptr());
  }
}

}  // namespace

nb::object to_text(const std::string& bytes) {
  PyObject* const text = PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "replace");
  if (text == nullptr) throw nb::python_error();
  return nb::steal(text);
}

nb::object to_python(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const nb::python_error& e) {
    return nb::borrow(e.value());
  } catch (const Error& e) {
    return error_object(e.code(), e.what(), e.position());
  } catch (const std::exception& e) {
    return error_object(ErrorCode::system, e.what(), std::nullopt);
  }
}

Error from_python(nb::python_error& error, const std::string& doing) {
  const nb::handle value = error.value();
  const std::string text = nb::cast<std::string>(nb::str(value));
  if (nb::isinstance(value, error_class())) {
    return {code_of(nb::cast<std::string>(value.attr("code").attr("value"))), text};
  }
  const std::string type = nb::cast<std::string>(error.type().attr("__name__"));
  return {ErrorCode::system, doing + " failed: " + type + ": " + text};
}

}  // namespace thinwire::python

NB_MODULE(_thinwire, m) {
  namespace nb = nanobind;
  using namespace thinwire::python;
  m.doc() = "The C++ core of thinwire. Use it through the package thinwire, which says what each name is for.";
  // PyTorch keeps DDP models, and what they hold, alive past the end of the interpreter.
  nb::set_leak_warnings(false);
  nb::register_exception_translator(translate);
  m.attr("version") = std::to_string(THINWIRE_VERSION_MAJOR) + "." + std::to_string(THINWIRE_VERSION_MINOR) + "." +
                      std::to_string(THINWIRE_VERSION_PATCH);
  bind_selectors(m);
  bind_options(m);
  bind_presets(m);
  bind_communicator(m);
  bind_reducer(m);
  bind_plan(m);
  nb::module_::import_("atexit").attr("register")(nb::cpp_function(&close_reducers));
}
