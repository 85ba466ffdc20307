// StepStats in Python.
#include <nanobind/stl/string.h>

#include <string>

#include "bindings.h"
#include "thinwire/reducer.h"

namespace thinwire::python {

using namespace nb::literals;

namespace {

std::string describe(const StepStats& s) {
  const nb::str format(
      "StepStats(step={}, active={}, jobs={}, calls={}, bytes_sent={}, bytes_received={}, dense_bytes={}, "
      "density={:.3g}, reason={!r})");
  return nb::cast<std::string>(format.attr("format")(s.step, s.active, s.jobs, s.calls, s.bytes_sent, s.bytes_received,
                                                     s.dense_bytes, s.density, s.reason));
}

}  // namespace

void bind_stats(nb::module_& m) {
  nb::class_<StepStats>(m, "StepStats", "What the last finished step did, on this rank. Bytes, seconds, elements.")
      .def(
          "__init__",
          [](StepStats* self, std::uint64_t step, std::string reason) {
            new (self) StepStats();
            self->step = step;
            self->reason = std::move(reason);
          },
          "step"_a, "reason"_a, "Of a step that reduced nothing, and why.")
      .def_ro("step", &StepStats::step)
      .def_ro("dense", &StepStats::dense, "Every unit was dense.")
      .def_ro("active", &StepStats::active, "At least one unit was sent sparsely.")
      .def_ro("reason", &StepStats::reason, "Why active or why not, in words.")
      .def_ro("jobs", &StepStats::jobs, "Buckets.")
      .def_ro("calls", &StepStats::calls, "Communicator calls.")
      .def_ro("bytes_sent", &StepStats::bytes_sent)
      .def_ro("bytes_received", &StepStats::bytes_received)
      .def_ro("dense_bytes", &StepStats::dense_bytes,
              "What a dense f32 all-reduce of the same buckets would have sent.")
      .def_ro("small_bytes_sent", &StepStats::small_bytes_sent,
              "The part of bytes_sent due to always-dense parameters.")
      .def_ro("entries_sent", &StepStats::entries_sent, "Of sparse units, free slots apart.")
      .def_ro("sparse_numel", &StepStats::sparse_numel, "Elements of sparse units.")
      .def_ro("density", &StepStats::density, "entries_sent / sparse_numel; 1 in a dense step.")
      .def_ro("fallbacks", &StepStats::fallbacks,
              "Extra sweeps because a sampled or reused bound was too high, and searches that found no threshold.")
      .def_ro("non_finite", &StepStats::non_finite,
              "Some rank's gradient was not finite, or a mean got too large for its type: the step is undone.")
      .def_ro("residual_norm", &StepStats::residual_norm, "Norm of the residual, refreshed now and then.")
      .def_ro("gradient_norm", &StepStats::gradient_norm, "Norm of the local gradient of the step residual_norm is of.")
      .def_ro("clip_factor", &StepStats::clip_factor, "What local clipping multiplied the gradient by.")
      .def_ro("clip_wait_seconds", &StepStats::clip_wait_seconds,
              "From the first bucket to the last: overlap lost to local clipping.")
      .def_ro("select_seconds", &StepStats::select_seconds, "Accumulate and select, which are one pass.")
      .def_ro("encode_seconds", &StepStats::encode_seconds, "Encode and settle.")
      .def_ro("exchange_seconds", &StepStats::exchange_seconds, "In communicator calls, waiting for others included.")
      .def_ro("decode_seconds", &StepStats::decode_seconds)
      .def_ro_static("norm_interval", &StepStats::kNormInterval, "Steps from one refreshed norm to the next.")
      .def_ro("exposed_wait_seconds", &StepStats::exposed_wait_seconds, "That callers spent in Work.wait.")
      .def("__repr__", &describe);
}

}  // namespace thinwire::python
