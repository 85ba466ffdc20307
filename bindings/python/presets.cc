// Presets: functions that return plain options.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <string>
#include <vector>

#include "bindings.h"
#include "choices.h"
#include "thinwire/reducer.h"

namespace thinwire::python {

using namespace nb::literals;

namespace {

constexpr Names<RedsyncLimits, 2> kLimits{{{"elements", kRedsyncElements}, {"bytes", kRedsyncBytes}}};

}  // namespace

void bind_presets(nb::module_& m) {
  m.def("dense", &dense, "Dense all-reduce of f32 residuals with thinwire's momentum: the baseline, through one path.");
  m.def("top_k", &top_k, "density"_a = 0.001, "Exact top-k over whole buckets. density in (0, 1].");
  m.def(
      "redsync",
      [](double density, const std::string& limits) { return redsync(density, parse(kLimits, "limits", limits)); },
      "density"_a = 0.001, "limits"_a = "elements",
      nb::sig("def redsync(density: float = 0.001, limits: typing.Literal['elements', 'bytes'] = 'elements') "
              "-> ReducerOptions"),
      R"(RedSync (arXiv 1808.04357; JPDC 133, 2019).

Per parameter: exact, trimmed top-k or threshold search by its size, momentum correction and factor masking. density in
(0, 1]. limits: whether the sizes 131072 and 4194304, where the methods change, count elements or bytes.)");
  m.def(
      "redsync_quantized",
      [](double density, const std::vector<std::string>& output_layer, const std::string& limits) {
        return redsync_quantized(density, output_layer, parse(kLimits, "limits", limits));
      },
      "density"_a = 0.001, "output_layer"_a = std::vector<std::string>(), "limits"_a = "elements",
      nb::sig("def redsync_quantized(density: float = 0.001, output_layer: collections.abc.Sequence[str] = (), "
              "limits: typing.Literal['elements', 'bytes'] = 'elements') -> ReducerOptions"),
      R"(RedSync with same-sign, same-mean quantization: half the bytes.

The smallest and the largest values of a parameter travel in turn, as indices and one mean. output_layer: patterns of
parameters that keep their values. density, limits: as for redsync.)");
  m.def(
      "dragonn",
      [](double density, const std::string& layout, double small_density, std::size_t small) {
        return dragonn({.density = density,
                        .layout = parse(kLayouts, "layout", layout),
                        .small_density = small_density,
                        .small = small});
      },
      "density"_a = 0.001, "layout"_a = "b", "small_density"_a = DragonnOptions{}.small_density,
      "small"_a = DragonnOptions{}.small,
      nb::sig(
          "def dragonn(density: float = 0.001, layout: typing.Literal['a', 'b'] = 'b', small_density: float = 0.01, "
          "small: int = 131072) -> ReducerOptions"),
      R"(DRAGONN: randomized hashing (Wang, Xu, Wu, Shrivastava, Ng; ICML 2022, PMLR 162).

Per parameter. density in (0, 1]; layout as in HashedSlots. Parameters of at most `small` elements have small_density, if
that is higher.)");
  m.def("dgc", &dgc, "density"_a = 0.001, R"(DGC: deep gradient compression (Lin, Han, Mao, Wang, Dally; ICLR 2018).

Per parameter, sampled top-k with re-selection, momentum correction and factor masking. density in (0, 1]. Its warm-up is
Schedule.in_epochs(steps_per_epoch, ramp_epochs=4).)");
}

}  // namespace thinwire::python
