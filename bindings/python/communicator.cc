// Communicators in Python: those of C++ as objects, and subclasses written in Python for the reducer's lane to call.
// The GIL is held for one call at a time; buffers are seen in place.
#include "thinwire/communicator.h"

#include <nanobind/stl/string.h>
#include <nanobind/trampoline.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <span>
#include <string>

#include "bindings.h"

namespace thinwire::python {

using namespace nb::literals;

namespace {

std::span<const std::byte> bytes(const Array<const std::uint8_t>& array) {
  return std::as_bytes(std::span(array.data(), array.size()));
}
std::span<std::byte> writable_bytes(const Array<std::uint8_t>& array) {
  return std::as_writable_bytes(std::span(array.data(), array.size()));
}

/// The memory as a Python array, without a copy and without an owner: good during the call only. DLPack knows no
/// read-only arrays that PyTorch would take, so const is cast away.
template <class T>
nb::object view(const T* data, std::size_t count) {
  using View = nb::ndarray<nb::array_api, T, nb::ndim<1>, nb::device::cpu>;
  return nb::cast(View(const_cast<T*>(data), {count}, nb::handle()), nb::rv_policy::reference);
}
nb::object view(std::span<const std::byte> block) {
  return view(reinterpret_cast<const std::uint8_t*>(block.data()), block.size());
}

/// What C++ calls when the communicator is an object of a Python subclass.
class PythonCommunicator final : public Communicator {
 public:
  NB_TRAMPOLINE(Communicator);

  int rank() const override { return asked_once(rank_, "rank"); }
  int size() const override { return asked_once(size_, "size"); }

  void abort(const std::string& reason) noexcept override {
    const nb::gil_scoped_acquire gil;
    try {
      method("abort")(to_text(reason));
    } catch (nb::python_error& error) {
      error.discard_as_unraisable("thinwire: Communicator.abort");
    } catch (...) {  // a class without abort: the other ranks wait until their time-out
    }
  }

 protected:
  void do_all_gather(std::span<const std::byte> block, std::span<std::byte> blocks) override {
    call("all_gather", [&](const nb::object& f) { f(view(block), view(blocks)); });
  }
  void do_all_to_all(std::span<const std::byte> sent, std::span<std::byte> received) override {
    call("all_to_all", [&](const nb::object& f) { f(view(sent), view(received)); });
  }
  void do_all_reduce(std::span<const float> mine, std::span<float> sum) override {
    call("all_reduce", [&](const nb::object& f) { f(view(mine.data(), mine.size()), view(sum.data(), sum.size())); });
  }
  void do_barrier() override {
    call("barrier", [](const nb::object& f) { f(); });
  }

 private:
  nb::object method(const char* name) const {
    const nb::handle self = nb_trampoline.base();
    if (self.type().attr(name).is(nb::type<Communicator>().attr(name))) {
      throw Error(ErrorCode::unsupported, nb::cast<std::string>(self.type().attr("__name__")) +
                                              ", a subclass of thinwire.Communicator, does not implement " + name);
    }
    return self.attr(name);
  }

  template <class Call>
  void call(const char* name, Call&& with) const {
    const nb::gil_scoped_acquire gil;
    try {
      with(method(name));
    } catch (nb::python_error& error) {
      throw from_python(error, std::string("the communicator's ") + name);
    }
  }

  /// Rank and size never change; asked for once, so that the lane does not need the GIL for them.
  int asked_once(std::atomic<int>& known, const char* name) const {
    if (known.load() < 0) {
      call(name, [&](const nb::object& f) { known = nb::cast<int>(f()); });
    }
    return known.load();
  }

  mutable std::atomic<int> rank_ = -1;
  mutable std::atomic<int> size_ = -1;
};

nb::list thread_communicators(int ranks, double timeout) {
  if (!(timeout > 0)) {
    throw Error(ErrorCode::invalid_argument, "timeout is " + std::to_string(timeout) + " s, must be positive");
  }
  const double longest = 1e9;  // seconds; about 30 years
  const std::chrono::milliseconds limit(std::max(1LL, std::llround(std::min(timeout, longest) * 1e3)));
  nb::list result;
  for (auto& communicator : make_thread_communicators(ranks, limit)) {
    result.append(nb::cast(communicator.release(), nb::rv_policy::take_ownership));
  }
  return result;
}

}  // namespace

void bind_communicator(nb::module_& m) {
  using Traffic = Communicator::Traffic;
  nb::class_<Traffic>(m, "Traffic", "What a communicator has sent, received and called so far, barriers apart.")
      .def_ro("bytes_sent", &Traffic::bytes_sent)
      .def_ro("bytes_received", &Traffic::bytes_received)
      .def_ro("calls", &Traffic::calls);

  const auto released = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<Communicator, PythonCommunicator>(m, "Communicator", R"(Blocking collectives over `size()` ranks.

A subclass implements all methods but `traffic`. They are called from a reducer's thread, one at a time, with arrays
(`torch.from_dlpack` and `numpy.from_dlpack` take them) that are valid during the call only. An exception that is not a
thinwire.Error reaches the caller as a thinwire.Error with code "system".)")
      .def(nb::init<>())
      .def("rank", &Communicator::rank, "This rank, 0 … size() - 1.")
      .def("size", &Communicator::size, "Number of ranks.")
      .def(
          "all_gather",
          [](Communicator& self, const Array<const std::uint8_t>& block, const Array<std::uint8_t>& blocks) {
            const nb::gil_scoped_release release;
            self.all_gather(bytes(block), writable_bytes(blocks));
          },
          "block"_a.noconvert(), "blocks"_a.noconvert(),
          nb::sig("def all_gather(self, block: typing.Any, blocks: typing.Any) -> None"),
          "blocks [size * n] u8 receives every rank's block [n] u8 in rank order; n is the same on all ranks.")
      .def(
          "all_to_all",
          [](Communicator& self, const Array<const std::uint8_t>& sent, const Array<std::uint8_t>& received) {
            const nb::gil_scoped_release release;
            self.all_to_all(bytes(sent), writable_bytes(received));
          },
          "sent"_a.noconvert(), "received"_a.noconvert(),
          nb::sig("def all_to_all(self, sent: typing.Any, received: typing.Any) -> None"),
          "Block r of `sent` [size * n] u8 goes to rank r; block r of `received` came from rank r.")
      .def(
          "all_reduce",
          [](Communicator& self, const Array<const float>& mine, const Array<float>& sum) {
            const nb::gil_scoped_release release;
            self.all_reduce({mine.data(), mine.size()}, {sum.data(), sum.size()});
          },
          "mine"_a.noconvert(), "sum"_a.noconvert(),
          nb::sig("def all_reduce(self, mine: typing.Any, sum: typing.Any) -> None"),
          "sum [n] f32 receives the elementwise sum of all ranks' mine [n] f32; `mine` may be `sum`.")
      .def("barrier", &Communicator::barrier, released, "Returns when every rank has come here.")
      .def("abort", &Communicator::abort, "reason"_a, released,
           "Makes this communicator dead, and where the transport can, wakes the ranks that wait for this one.")
      .def_prop_ro("traffic", &Communicator::traffic, "Counted where C++ calls this communicator.");

  m.def("make_thread_communicators", &thread_communicators, "ranks"_a, "timeout"_a = 60.0,
        nb::sig("def make_thread_communicators(ranks: int, timeout: float = 60.0) -> list[Communicator]"),
        R"(Ranks as threads of this process: one communicator per thread, index = rank. No wait is longer than `timeout`
seconds. Errors: invalid_argument for ranks < 1 or a timeout that is not positive.)");
}

}  // namespace thinwire::python
