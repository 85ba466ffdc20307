// Selectors: small immutable things, so that a change to a copy cannot get lost in silence.
#include <nanobind/operators.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>

#include <cstdint>
#include <string>
#include <tuple>

#include "bindings.h"
#include "choices.h"
#include "thinwire/select.h"

namespace thinwire::python {

using namespace nb::literals;

namespace {

constexpr Names<Side, 3> kSides{{{"both", Side::both}, {"largest", Side::largest}, {"smallest", Side::smallest}}};

template <class S>
void construct_checked(S* self, S selector) {
  validate(Selector(selector));
  new (self) S(selector);
}

}  // namespace

void bind_selectors(nb::module_& m) {
  nb::class_<TopK>(m, "TopK", "The k entries of largest magnitude, exactly. density = k / numel, in (0, 1].")
      .def(
          "__init__", [](TopK* self, double density) { construct_checked(self, TopK{density}); }, "density"_a = 0.001)
      .def_ro("density", &TopK::density)
      .def(nb::self == nb::self, nb::sig("def __eq__(self, arg: object, /) -> bool"))
      .def("__repr__",
           [](const TopK& s) {
             return expression("TopK", {{"density", value(s.density)}});
           })
      .def("__getstate__", [](const TopK& s) { return std::tuple(s.density); })
      .def("__setstate__", [](TopK& s, const std::tuple<double>& t) { new (&s) TopK{std::get<0>(t)}; });

  nb::class_<TrimmedTopK>(m, "TrimmedTopK", R"(RedSync's trimmed top-k (arXiv 1808.04357).

Candidates above mean + r * (max - mean) of the magnitudes, r lowered from 1 by `epsilon` until k are found; then the
exact top-k of them. Returns the same entries as TopK.)")
      .def(
          "__init__",
          [](TrimmedTopK* self, double density, double epsilon) {
            construct_checked(self, TrimmedTopK{density, epsilon});
          },
          "density"_a = 0.001, "epsilon"_a = 0.2)
      .def_ro("density", &TrimmedTopK::density)
      .def_ro("epsilon", &TrimmedTopK::epsilon, "Step of r, in (0, 1).")
      .def(nb::self == nb::self, nb::sig("def __eq__(self, arg: object, /) -> bool"))
      .def("__repr__",
           [](const TrimmedTopK& s) {
             return expression("TrimmedTopK", {{"density", value(s.density)}, {"epsilon", value(s.epsilon)}});
           })
      .def("__getstate__", [](const TrimmedTopK& s) { return std::tuple(s.density, s.epsilon); })
      .def("__setstate__", [](TrimmedTopK& s, const std::tuple<double, double>& t) {
        new (&s) TrimmedTopK{std::get<0>(t), std::get<1>(t)};
      });

  nb::class_<HashedSlots>(m, "HashedSlots", R"(DRAGONN's randomized hashing (Wang et al., ICML 2022).

Entries above a sampled threshold go to slots of a hash table; in a slot the larger magnitude wins, losers stay in the
residual. layout "a": about 2k candidates into k slots, sent as they lie; "b": about k into 4k slots, compacted.
sample_fraction: share of a unit that is sampled for the threshold, in (0, 1].)")
      .def(
          "__init__",
          [](HashedSlots* self, double density, const std::string& layout, double sample_fraction) {
            construct_checked(self, HashedSlots{density, parse(kLayouts, "layout", layout), sample_fraction});
          },
          "density"_a = 0.001, "layout"_a = "b", "sample_fraction"_a = HashedSlots{}.sample_fraction,
          nb::sig("def __init__(self, density: float = 0.001, layout: typing.Literal['a', 'b'] = 'b', "
                  "sample_fraction: float = 0.01) -> None"))
      .def_ro("density", &HashedSlots::density)
      .def_prop_ro(
          "layout", [](const HashedSlots& s) { return name_of(kLayouts, s.layout); },
          nb::for_getter(nb::sig("def layout(self) -> typing.Literal['a', 'b']")))
      .def_ro("sample_fraction", &HashedSlots::sample_fraction)
      .def(nb::self == nb::self, nb::sig("def __eq__(self, arg: object, /) -> bool"))
      .def("__repr__",
           [](const HashedSlots& s) {
             return expression("HashedSlots", {{"density", value(s.density)},
                                               {"layout", value(name_of(kLayouts, s.layout))},
                                               {"sample_fraction", value(s.sample_fraction)}});
           })
      .def("__getstate__",
           [](const HashedSlots& s) { return std::tuple(s.density, name_of(kLayouts, s.layout), s.sample_fraction); })
      .def("__setstate__", [](HashedSlots& s, const std::tuple<double, std::string, double>& t) {
        new (&s) HashedSlots{std::get<0>(t), parse(kLayouts, "layout", std::get<1>(t)), std::get<2>(t)};
      });

  nb::class_<ThresholdSearch>(m, "ThresholdSearch", R"(RedSync's threshold binary search (arXiv 1808.04357).

Entries above mean + r * (max - mean) of the magnitudes, r being bisected until k to 1.25k of them are left; the largest,
whatever their number.)")
      .def(
          "__init__",
          [](ThresholdSearch* self, double density, std::uint32_t reuse_interval) {
            construct_checked(self, ThresholdSearch{density, reuse_interval});
          },
          "density"_a = 0.001, "reuse_interval"_a = ThresholdSearch{}.reuse_interval)
      .def_ro("density", &ThresholdSearch::density)
      .def_ro("reuse_interval", &ThresholdSearch::reuse_interval,
              "Selections that one search serves, itself included; 1: each searches.")
      .def(nb::self == nb::self, nb::sig("def __eq__(self, arg: object, /) -> bool"))
      .def("__repr__",
           [](const ThresholdSearch& s) {
             return expression("ThresholdSearch",
                               {{"density", value(s.density)}, {"reuse_interval", value(s.reuse_interval)}});
           })
      .def("__getstate__", [](const ThresholdSearch& s) { return std::tuple(s.density, s.reuse_interval); })
      .def("__setstate__", [](ThresholdSearch& s, const std::tuple<double, std::uint32_t>& t) {
        new (&s) ThresholdSearch{std::get<0>(t), std::get<1>(t)};
      });

  nb::class_<SampledTopK>(m, "SampledTopK", R"(DGC's sampled top-k (Lin et al., ICLR 2018).

Entries at or above a threshold taken from a strided sample; more than k are cut to the k largest, for fewer than 0.8k
the threshold is lowered. sample_fraction: share of a unit that is sampled, in (0, 1].)")
      .def(
          "__init__",
          [](SampledTopK* self, double density, double sample_fraction) {
            construct_checked(self, SampledTopK{density, sample_fraction});
          },
          "density"_a = 0.001, "sample_fraction"_a = SampledTopK{}.sample_fraction)
      .def_ro("density", &SampledTopK::density)
      .def_ro("sample_fraction", &SampledTopK::sample_fraction)
      .def(nb::self == nb::self, nb::sig("def __eq__(self, arg: object, /) -> bool"))
      .def("__repr__",
           [](const SampledTopK& s) {
             return expression("SampledTopK",
                               {{"density", value(s.density)}, {"sample_fraction", value(s.sample_fraction)}});
           })
      .def("__getstate__", [](const SampledTopK& s) { return std::tuple(s.density, s.sample_fraction); })
      .def("__setstate__", [](SampledTopK& s, const std::tuple<double, double>& t) {
        new (&s) SampledTopK{std::get<0>(t), std::get<1>(t)};
      });
}

Side parse_side(const std::string& name) { return parse(kSides, "side", name); }

}  // namespace thinwire::python
