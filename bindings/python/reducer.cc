// The Reducer in Python. Whatever waits releases the GIL; gradients are read and written in place, and kept alive until
// their job is done; callbacks run on the reducer's thread under the GIL.
#include "thinwire/reducer.h"

#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <cstdint>
#include <iterator>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"

namespace thinwire::python {

using namespace nb::literals;

namespace {

using Slices = std::vector<std::tuple<std::string, std::size_t, bool>>;
using NamedNumels = std::vector<std::pair<std::string, std::size_t>>;
using FloatArray = Array<const float>;

class OwnedReducer;
// Those of this process that may have a running thread. Guarded by the GIL.
std::set<OwnedReducer*>& live_reducers() {
  static std::set<OwnedReducer*> reducers;
  return reducers;
}

/// A Reducer and the process that its thread lives in. After a fork the child has the object but not the thread, so
/// there it is neither used nor destroyed.
class OwnedReducer {
 public:
  OwnedReducer(ReducerOptions options, NamedNumels parameters, Communicator& communicator) : process_(getpid()) {
    std::vector<Parameter> named;
    named.reserve(parameters.size());
    for (auto& [name, numel] : parameters) named.push_back({std::move(name), numel});
    {
      const nb::gil_scoped_release release;
      reducer_ = std::make_unique<Reducer>(std::move(options), std::move(named), communicator);
    }
    live_reducers().insert(this);
  }
  OwnedReducer(const OwnedReducer&) = delete;
  OwnedReducer& operator=(const OwnedReducer&) = delete;

  ~OwnedReducer() {
    live_reducers().erase(this);
    if (getpid() != process_) {
      static_cast<void>(reducer_.release());  // joining a thread that does not exist here would not return
      return;
    }
    const nb::gil_scoped_release release;
    reducer_.reset();
  }

  Reducer& operator*() const {
    if (getpid() != process_) {
      throw Error(ErrorCode::invalid_argument, "this reducer belongs to the process that made it, not to its fork");
    }
    return *reducer_;
  }

  void close() const {
    if (getpid() == process_) reducer_->close();
  }

 private:
  pid_t process_;
  std::unique_ptr<Reducer> reducer_;
};

StepMode parse_mode(const std::string& mode) {
  if (mode == "scheduled") return StepMode::scheduled;
  if (mode == "dense") return StepMode::dense;
  if (mode == "flush") return StepMode::flush;
  throw Error(ErrorCode::invalid_argument, "mode is '" + mode + "', expected 'scheduled', 'dense' or 'flush'");
}

std::optional<DType> dtype_of(const nb::dlpack::dtype& type) {
  using Code = nb::dlpack::dtype_code;
  if (type.lanes != 1) return std::nullopt;
  if (type.code == static_cast<std::uint8_t>(Code::Float) && type.bits == 32) return DType::f32;
  if (type.code == static_cast<std::uint8_t>(Code::Float) && type.bits == 16) return DType::f16;
  if (type.code == static_cast<std::uint8_t>(Code::Bfloat) && type.bits == 16) return DType::bf16;
  return std::nullopt;
}

std::string name_of(const nb::dlpack::dtype& type) {
  constexpr const char* kKinds[] = {"int", "uint", "float", "opaque", "bfloat", "complex", "bool"};
  const std::string kind = type.code < std::size(kKinds) ? kKinds[type.code] : "an unknown type of ";
  return kind + std::to_string(type.bits);
}

/// The view of a gradient array, or why there is none.
std::variant<GradientView, std::string> view_of(const nb::ndarray<>& array) {
  if (array.device_type() != nb::device::cpu::value) return "the gradient is not in host memory";
  if (array.ndim() != 1) return "the gradient has " + std::to_string(array.ndim()) + " dimensions, expected 1";
  if (array.shape(0) > 1 && array.stride(0) != 1) return "the gradient is not contiguous";
  const std::optional<DType> dtype = dtype_of(array.dtype());
  if (!dtype) return "the gradient is " + name_of(array.dtype()) + ", expected float32, float16 or bfloat16";
  return GradientView{.data = array.data(), .numel = array.size(), .dtype = *dtype, .device = {}};
}

/// Calls back under the GIL with None or the error, then lets go of the gradient.
Reducer::OnDone on_done(nb::object callback, const nb::ndarray<>& gradient) {
  struct Held {
    nb::object callback;
    nb::ndarray<> gradient;
  };
  const std::shared_ptr<Held> held(new Held{std::move(callback), gradient}, [](Held* h) {
    const nb::gil_scoped_acquire gil;
    delete h;
  });
  return [held](const std::exception_ptr& error) {
    const nb::gil_scoped_acquire gil;
    if (held->callback.is_none()) return;
    try {
      held->callback(error ? to_python(error) : nb::none());
    } catch (nb::python_error& e) {
      e.discard_as_unraisable("thinwire: on_done of a reduction");
    }
  };
}

/// Calls `callback`, which returns the loss scale, on the reducer's thread.
Reducer::Prepare prepare_with(nb::object callback) {
  if (callback.is_none()) return {};
  return [held = share(std::move(callback))](GradientView& gradient) {
    const nb::gil_scoped_acquire gil;
    try {
      gradient.loss_scale = nb::cast<float>((*held)());
    } catch (nb::python_error& error) {
      throw from_python(error, "preparing a gradient");
    } catch (const nb::cast_error&) {
      throw Error(ErrorCode::invalid_argument, "preparing a gradient did not return the loss scale, a number");
    }
  };
}

Bucket bucket_of(Slices slices) {
  Bucket bucket;
  bucket.slices.reserve(slices.size());
  for (auto& [name, numel, has_gradient] : slices) bucket.slices.push_back({std::move(name), numel, has_gradient});
  return bucket;
}

Work reduce(const OwnedReducer& self, Bucket bucket, const nb::ndarray<>& gradient, nb::object callback,
            float loss_scale, nb::object prepare) {
  Reducer& reducer = *self;
  auto view = view_of(gradient);
  auto done = on_done(std::move(callback), gradient);
  auto first = prepare_with(std::move(prepare));
  const nb::gil_scoped_release release;
  if (const auto* reason = std::get_if<std::string>(&view)) return reducer.fail(*reason, std::move(done));
  std::get<GradientView>(view).loss_scale = loss_scale;
  return reducer.reduce(std::move(bucket), std::get<GradientView>(view), std::move(done), std::move(first));
}

Work fail(const OwnedReducer& self, const std::string& reason, nb::object callback) {
  Reducer& reducer = *self;
  auto done = on_done(std::move(callback), {});
  const nb::gil_scoped_release release;
  return reducer.fail(reason, std::move(done));
}

nb::dict state(const OwnedReducer& self) {
  ReducerState saved;
  {
    Reducer& reducer = *self;
    const nb::gil_scoped_release release;
    saved = reducer.state();
  }
  nb::dict residuals, velocities, result;
  for (ParameterState& parameter : saved.parameters) {
    const nb::str name(parameter.name.c_str());
    residuals[name] = to_array(std::move(parameter.residual));
    if (!parameter.velocity.empty()) velocities[name] = to_array(std::move(parameter.velocity));
  }
  result["step"] = saved.step;
  result["residual"] = residuals;
  result["velocity"] = velocities;
  nb::dict selections;
  for (const auto& [unit, memory] : saved.selections)
    if (memory.uses > 0) selections[nb::str(unit.c_str())] = nb::make_tuple(memory.ratio, memory.uses);
  result["selection"] = selections;
  return result;
}

std::vector<float> values(nb::handle array, const std::string& what) {
  FloatArray floats;
  if (!nb::try_cast(array, floats, false)) {
    throw Error(ErrorCode::invalid_argument,
                what + " is not a contiguous one-dimensional float32 array in host memory");
  }
  return {floats.data(), floats.data() + floats.size()};
}

void load(const OwnedReducer& self, std::uint64_t step, const nb::dict& residual, const nb::dict& velocity,
          const std::map<std::string, std::pair<double, std::uint32_t>>& selection) {
  Reducer& reducer = *self;
  ReducerState wanted;
  wanted.step = step;
  for (const auto& [unit, memory] : selection) wanted.selections[unit] = {memory.first, memory.second};
  for (const auto& [key, array] : residual) {
    const auto name = nb::cast<std::string>(key);
    ParameterState parameter{name, values(array, "residual of '" + name + "'"), {}};
    if (velocity.contains(key)) parameter.velocity = values(velocity[key], "velocity of '" + name + "'");
    wanted.parameters.push_back(std::move(parameter));
  }
  for (const auto& [key, array] : velocity) {
    if (!residual.contains(key)) {
      throw Error(ErrorCode::invalid_argument, "a velocity without a residual: '" + nb::cast<std::string>(key) + "'");
    }
  }
  const nb::gil_scoped_release release;
  reducer.load(wanted);
}

nb::object copy_of(const OwnedReducer& self, const std::string& name,
                   std::span<const float> (Residual::*which)(std::string_view) const) {
  std::vector<float> copy;
  {
    Reducer& reducer = *self;
    const nb::gil_scoped_release release;
    const std::span<const float> found = (reducer.residual().*which)(name);
    copy.assign(found.begin(), found.end());
  }
  return to_array(std::move(copy));
}

using Events = std::vector<std::tuple<std::string, std::string, std::uint64_t, std::int64_t, std::int64_t>>;

Events events_of(std::vector<TraceEvent> trace) {
  Events events;
  events.reserve(trace.size());
  for (TraceEvent& e : trace) events.emplace_back(std::move(e.name), std::move(e.lane), e.step, e.begin_ns, e.end_ns);
  return events;
}

}  // namespace

void close_reducers() {
  const std::vector<OwnedReducer*> all(live_reducers().begin(), live_reducers().end());
  const nb::gil_scoped_release release;
  for (const OwnedReducer* reducer : all) reducer->close();
}

void bind_reducer(nb::module_& m) {
  bind_stats(m);
  const auto released = nb::call_guard<nb::gil_scoped_release>();

  nb::class_<Work>(m, "Work", "The handle of one job.")
      .def("wait", &Work::wait, released,
           R"(Waits until the mean is in the gradient. Raises the job's Error.

With clip_norm the thread that reduces fails the step if it waits before it has given all parameters; others just wait.)")
      .def("done", &Work::done, released);

  nb::class_<Bucket>(m, "Bucket", "What travels together. Made once where a bucket is the same in every step.")
      .def(
          "__init__", [](Bucket* self, Slices slices) { new (self) Bucket(bucket_of(std::move(slices))); }, "slices"_a,
          nb::sig("def __init__(self, slices: collections.abc.Sequence[tuple[str, int, bool]]) -> None"),
          "slices: (name, numel, has_gradient) in buffer order.");
  nb::implicitly_convertible<Slices, Bucket>();

  nb::class_<OwnedReducer>(m, "Reducer", R"(Error-feedback compression of one model's gradients.

    reducer.begin_step()
    work = reducer.reduce([(name, numel, has_gradient), …], gradient)   # for each bucket, in one order on every rank
    work.wait()                                                         # gradient now holds the mean over the ranks

Jobs run in call order on a thread of the reducer's own. Call it from one thread at a time. If a step fails on any rank,
every rank's jobs of that step and all later ones raise one Error that names the rank and the reason.)")
      .def(nb::init<ReducerOptions, NamedNumels, Communicator&>(), "options"_a, "parameters"_a, "communicator"_a,
           nb::keep_alive<1, 4>(),
           nb::sig("def __init__(self, options: ReducerOptions, parameters: collections.abc.Sequence[tuple[str, int]], "
                   "communicator: Communicator) -> None"),
           "parameters: names and numels. Errors: invalid_argument for options out of range or a name given twice.")
      .def(
          "begin_step",
          [](const OwnedReducer& self, const std::string& mode) {
            const nb::gil_scoped_release release;
            (*self).begin_step(parse_mode(mode));
          },
          "mode"_a = "scheduled",
          nb::sig("def begin_step(self, mode: typing.Literal['scheduled', 'dense', 'flush'] = 'scheduled') -> None"),
          R"(Ends the last step, waiting for its jobs, and starts the next one. All ranks give the same mode.

"dense": send everything; "flush": average only what waits in the residuals, whatever the buffers hold.
Errors: the error the last step ended with.)")
      .def("reduce", &reduce, "bucket"_a, "gradient"_a.noconvert(), "on_done"_a = nb::none(), "loss_scale"_a = 1.0f,
           "prepare"_a = nb::none(),
           nb::sig("def reduce(self, bucket: Bucket | collections.abc.Sequence[tuple[str, int, bool]], gradient: "
                   "typing.Any, "
                   "on_done: collections.abc.Callable[[thinwire._errors.Error | None], None] | None = None, "
                   "loss_scale: float = 1.0, prepare: collections.abc.Callable[[], float] | None = None) -> Work"),
           R"(gradient <- mean over the ranks of what they send.

bucket: its slices (name, numel, has_gradient) in buffer order, or a Bucket made of them. gradient: contiguous array [n] of f32, f16 or bf16 in host memory,
used in place and kept alive until the job is done; not to be touched before. on_done runs on the reducer's thread.
What is wrong with bucket or gradient fails the job, on every rank.
loss_scale: a power of two; the gradient holds the true one times it, and is given the mean times it. prepare: runs on the
reducer's thread before the gradient is read, may wait for it to be filled, and returns the loss scale.)")
      .def("fail", &fail, "reason"_a, "on_done"_a = nb::none(),
           nb::sig("def fail(self, reason: str, on_done: collections.abc.Callable[[thinwire._errors.Error | None], "
                   "None] | None = None) -> Work"),
           "A job that failed before it could be given to `reduce`: every rank's job of this number raises `reason`.")
      .def(
          "undo_step", [](const OwnedReducer& self) { (*self).undo_step(); }, released,
          "Takes the sends of the last step back on this rank; its gradients stay accumulated.")
      .def_prop_ro(
          "step",
          [](const OwnedReducer& self) {
            const nb::gil_scoped_release release;
            return (*self).step();
          },
          "Number of the current step, or of the next one before the first begin_step.")
      .def_prop_ro(
          "options", [](const OwnedReducer& self) { return (*self).options(); }, "A copy.")
      .def(
          "stats", [](const OwnedReducer& self) { return (*self).stats(); }, released,
          "Of the last step; waits for its jobs.")
      .def(
          "set_tracing", [](const OwnedReducer& self, bool on) { (*self).set_tracing(on); }, "on"_a, released,
          "Whether to note what runs when, from the next job on.")
      .def(
          "take_trace", [](const OwnedReducer& self) { return events_of((*self).take_trace()); }, released,
          nb::sig("def take_trace(self) -> list[tuple[str, str, int, int, int]]"),
          "What was noted since it was last taken: (name, lane, step, begin, end), nanoseconds of time.monotonic_ns().")
      .def(
          "residual",
          [](const OwnedReducer& self, const std::string& name) { return copy_of(self, name, &Residual::residual); },
          "name"_a, nb::sig("def residual(self, name: str) -> typing.Any"),
          "A copy [numel] f32 of what waits; waits for the jobs of the step.")
      .def(
          "velocity",
          [](const OwnedReducer& self, const std::string& name) { return copy_of(self, name, &Residual::velocity); },
          "name"_a, nb::sig("def velocity(self, name: str) -> typing.Any"),
          "A copy [numel] f32, empty without momentum; waits for the jobs of the step.")
      .def("state", &state, nb::sig("def state(self) -> dict[str, typing.Any]"),
           R"(State as of the end of the last step: "step"; "residual" and "velocity" as f32 arrays by name.

"selection": what ThresholdSearch reuses, by unit: the ratio of its threshold and how often it has served.)")
      .def(
          "load", &load, "step"_a, "residual"_a, "velocity"_a,
          "selection"_a = std::map<std::string, std::pair<double, std::uint32_t>>(),
          nb::sig("def load(self, step: int, residual: dict[str, typing.Any], velocity: dict[str, typing.Any], "
                  "selection: dict[str, tuple[float, int]] = {}) -> None"),
          R"(Replaces the state of all parameters, between steps. Values are f32 arrays [numel]; selection as in `state`.

Errors: invalid_argument for an unknown, missing or doubled name, a wrong size or a non-finite value; then nothing is
changed.)")
      .def(
          "set_velocity",
          [](const OwnedReducer& self, const std::string& name, const FloatArray& velocity) {
            const nb::gil_scoped_release release;
            (*self).set_velocity(name, {velocity.data(), velocity.size()});
          },
          "name"_a, "velocity"_a.noconvert(),
          nb::sig("def set_velocity(self, name: str, velocity: typing.Any) -> None"),
          "Replaces one parameter's velocity [numel] f32. Before the first step.")
      .def(
          "close", [](const OwnedReducer& self) { self.close(); }, released,
          "Waits for the jobs in the queue and stops the thread; further jobs raise. Idempotent.");

  m.def(
      "chrome_trace",
      [](Events events, const std::string& process) {
        std::vector<TraceEvent> trace;
        trace.reserve(events.size());
        for (auto& [name, lane, step, begin, end] : events)
          trace.push_back(
              {.name = std::move(name), .lane = std::move(lane), .step = step, .begin_ns = begin, .end_ns = end});
        return chrome_trace(trace, process);
      },
      "events"_a, "process"_a,
      nb::sig(
          "def chrome_trace(events: collections.abc.Sequence[tuple[str, str, int, int, int]], process: str) -> str"),
      "Events as Reducer.take_trace gives them, as JSON in Chrome's trace-event format, which Perfetto opens.");
  m.def(
      "select",
      [](const Selector& selector, const FloatArray& values, std::uint32_t seed, const std::string& side_name) {
        const Side side = parse_side(side_name);
        SparseGradient selected;
        {
          const nb::gil_scoped_release release;
          const UnitSegment unit{values.data(), values.size(), 0};
          select(selector, {&unit, 1}, seed, selected, side);
        }
        return nb::make_tuple(to_array(std::move(selected.indices)), to_array(std::move(selected.values)));
      },
      "selector"_a, "values"_a.noconvert(), "seed"_a = 0, "side"_a = "both",
      nb::sig("def select(selector: " THINWIRE_SELECTORS
              ", values: typing.Any, seed: int = 0, side: typing.Literal['both', 'largest', 'smallest'] = 'both') "
              "-> tuple[typing.Any, typing.Any]"),
      R"(What a selector would send of values [n] f32: indices [nnz] u32 and values [nnz] f32.

side: 'largest' for positive values only, 'smallest' for negative ones only.
Free slots of HashedSlots(layout="a") have index 0xFFFFFFFF and value 0.)");
}

}  // namespace thinwire::python
