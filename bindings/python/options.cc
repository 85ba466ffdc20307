// Options. Small things are immutable, so that a change to a copy cannot get lost in silence;
// closed choices are strings. repr() gives the expression that makes the object.
#include <nanobind/operators.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "bindings.h"
#include "choices.h"
#include "thinwire/reducer.h"
#include "thinwire/select.h"

namespace thinwire::python {

using namespace nb::literals;

namespace {

const char* const kRuleInit =
    "def __init__(self, pattern: str, dense: bool | None = None, momentum: float | None = None, "
    "nesterov: bool | None = None, selector: " THINWIRE_SELECTORS
    " | None = None, "
    "values: typing.Literal['f32', 'bf16', 'f16', 'shared_mean'] | None = None) -> None";

constexpr Names<Unit, 2> kUnits{{{"parameter", Unit::parameter}, {"bucket", Unit::bucket}}};
constexpr Names<SparseAllReduce, 2> kKinds{
    {{"all_gather", SparseAllReduce::all_gather}, {"dense", SparseAllReduce::dense}}};
constexpr Names<IndexCoding, 2> kIndexCodings{
    {{"raw_u32", IndexCoding::raw_u32}, {"elias_fano", IndexCoding::elias_fano}}};
constexpr Names<ValueCoding, 4> kValueCodings{{{"f32", ValueCoding::f32},
                                               {"bf16", ValueCoding::bf16},
                                               {"f16", ValueCoding::f16},
                                               {"shared_mean", ValueCoding::shared_mean}}};

using Sizes = std::vector<std::pair<std::size_t, Selector>>;

Sizes sizes_of(const ReducerOptions& options) {
  Sizes sizes;
  for (const SizedSelector& larger : options.selector_by_size) sizes.emplace_back(larger.above, larger.selector);
  return sizes;
}

void set_sizes(ReducerOptions& options, const Sizes& sizes) {
  options.selector_by_size.clear();
  for (const auto& [above, selector] : sizes) options.selector_by_size.push_back({above, selector});
}

nb::object sizes_tuple(const ReducerOptions& options) { return nb::tuple(nb::cast(sizes_of(options))); }

std::optional<ValueCoding> parse_values(const std::optional<std::string>& values) {
  if (!values) return std::nullopt;
  return parse(kValueCodings, "values", *values);
}

nb::object rules_tuple(const ReducerOptions& options) {
  nb::list rules;
  for (const ParameterRule& rule : options.rules) rules.append(value(rule));
  return nb::tuple(rules);
}

void bind_small_options(nb::module_& m) {
  nb::class_<Codec>(m, "Codec", R"(How entries are written.

indices: "raw_u32", or "elias_fano" for about 1.5 bytes an index instead of 4 (not with layout "a" of HashedSlots).
values: "f32", or "bf16" or "f16"; what rounding takes away stays in the residual. f16 has a scale for each unit, so
that it neither overflows nor loses small tensors. "shared_mean": one number for all entries of a unit, their mean; the
smallest and the largest values travel in turn (RedSync's same-sign quantization).)")
      .def(
          "__init__",
          [](Codec* self, const std::string& indices, const std::string& values) {
            new (self) Codec{parse(kIndexCodings, "indices", indices), parse(kValueCodings, "values", values)};
          },
          "indices"_a = "raw_u32", "values"_a = "f32",
          nb::sig("def __init__(self, indices: typing.Literal['raw_u32', 'elias_fano'] = 'raw_u32', "
                  "values: typing.Literal['f32', 'bf16', 'f16', 'shared_mean'] = 'f32') -> None"))
      .def_prop_ro(
          "indices", [](const Codec& c) { return name_of(kIndexCodings, c.indices); },
          nb::for_getter(nb::sig("def indices(self) -> typing.Literal['raw_u32', 'elias_fano']")))
      .def_prop_ro(
          "values", [](const Codec& c) { return name_of(kValueCodings, c.values); },
          nb::for_getter(nb::sig("def values(self) -> typing.Literal['f32', 'bf16', 'f16', 'shared_mean']")))
      .def(nb::self == nb::self, nb::sig("def __eq__(self, arg: object, /) -> bool"))
      .def("__repr__",
           [](const Codec& c) {
             return expression("Codec", {{"indices", value(name_of(kIndexCodings, c.indices))},
                                         {"values", value(name_of(kValueCodings, c.values))}});
           })
      .def("__getstate__",
           [](const Codec& c) {
             return std::tuple(name_of(kIndexCodings, c.indices), name_of(kValueCodings, c.values));
           })
      .def("__setstate__", [](Codec& c, const std::tuple<std::string, std::string>& t) {
        new (&c) Codec{parse(kIndexCodings, "indices", std::get<0>(t)), parse(kValueCodings, "values", std::get<1>(t))};
      });

  nb::class_<Schedule>(m, "Schedule", R"(When compression starts, by step number.

Steps 0 … dense_steps - 1 average everything. ramp_steps steps follow in ramp_stages equal stages, stage i at density
D ** ((i + 1) / (ramp_stages + 1)), D being what the selector asks for (DGC's warm-up).)")
      .def(
          "__init__",
          [](Schedule* self, std::uint64_t dense_steps, std::uint64_t ramp_steps, std::uint32_t ramp_stages) {
            new (self) Schedule{dense_steps, ramp_steps, ramp_stages};
          },
          "dense_steps"_a = 0, "ramp_steps"_a = 0, "ramp_stages"_a = Schedule{}.ramp_stages)
      .def_static("in_epochs", &schedule_in_epochs, "steps_per_epoch"_a, "dense_epochs"_a = 0.0, "ramp_epochs"_a = 0,
                  "By epochs: dense ones, then a ramp of one stage an epoch.")
      .def_ro("dense_steps", &Schedule::dense_steps)
      .def_ro("ramp_steps", &Schedule::ramp_steps)
      .def_ro("ramp_stages", &Schedule::ramp_stages)
      .def("density_at", &density_at, "step"_a, "density"_a,
           "The density of a step where the selector asks for `density`; 1 in dense steps.")
      .def(nb::self == nb::self, nb::sig("def __eq__(self, arg: object, /) -> bool"))
      .def("__repr__",
           [](const Schedule& s) {
             return expression("Schedule", {{"dense_steps", value(s.dense_steps)},
                                            {"ramp_steps", value(s.ramp_steps)},
                                            {"ramp_stages", value(s.ramp_stages)}});
           })
      .def("__getstate__", [](const Schedule& s) { return std::tuple(s.dense_steps, s.ramp_steps, s.ramp_stages); })
      .def("__setstate__", [](Schedule& s, const std::tuple<std::uint64_t, std::uint64_t, std::uint32_t>& t) {
        new (&s) Schedule{std::get<0>(t), std::get<1>(t), std::get<2>(t)};
      });

  using RuleState = std::tuple<std::string, std::optional<bool>, std::optional<float>, std::optional<bool>,
                               std::optional<Selector>, std::optional<std::string>>;
  const auto rule_values = [](const ParameterRule& r) {
    return r.values ? std::optional(name_of(kValueCodings, *r.values)) : std::nullopt;
  };
  nb::class_<ParameterRule>(m, "ParameterRule", R"(An exception to the options for parameters by name.

pattern: '*' is any run of characters, '?' any one, a backslash takes the next character literally. dense: True for
always dense, False for sparse whatever the size. momentum, nesterov, selector, and values of the codec: instead of the
options' own. None leaves a field as it is; of several matching rules the last one that sets a field wins.)")
      .def(
          "__init__",
          [](ParameterRule* self, std::string pattern, std::optional<bool> dense, std::optional<float> momentum,
             std::optional<bool> nesterov, std::optional<Selector> selector, const std::optional<std::string>& values) {
            new (self) ParameterRule{std::move(pattern), dense, momentum, nesterov, selector, parse_values(values)};
          },
          "pattern"_a, "dense"_a = nb::none(), "momentum"_a = nb::none(), "nesterov"_a = nb::none(),
          "selector"_a = nb::none(), "values"_a = nb::none(), nb::sig(kRuleInit))
      .def_ro("pattern", &ParameterRule::pattern)
      .def_ro("dense", &ParameterRule::dense)
      .def_ro("momentum", &ParameterRule::momentum)
      .def_ro("nesterov", &ParameterRule::nesterov)
      .def_prop_ro(
          "selector", [](const ParameterRule& r) { return r.selector; },
          nb::for_getter(nb::sig("def selector(self) -> " THINWIRE_SELECTORS " | None")))
      .def_prop_ro(
          "values", rule_values,
          nb::for_getter(nb::sig("def values(self) -> typing.Literal['f32', 'bf16', 'f16', 'shared_mean'] | None")))
      .def(nb::self == nb::self, nb::sig("def __eq__(self, arg: object, /) -> bool"))
      .def("__repr__",
           [rule_values](const ParameterRule& r) {
             return expression("ParameterRule", {{"pattern", value(r.pattern)},
                                                 {"dense", value(r.dense)},
                                                 {"momentum", value(r.momentum)},
                                                 {"nesterov", value(r.nesterov)},
                                                 {"selector", value(r.selector)},
                                                 {"values", value(rule_values(r))}});
           })
      .def("__getstate__",
           [rule_values](const ParameterRule& r) {
             return RuleState(r.pattern, r.dense, r.momentum, r.nesterov, r.selector, rule_values(r));
           })
      .def("__setstate__", [](ParameterRule& r, const RuleState& t) {
        new (&r) ParameterRule{std::get<0>(t), std::get<1>(t), std::get<2>(t),
                               std::get<3>(t), std::get<4>(t), parse_values(std::get<5>(t))};
      });
}

using OptionsState = std::tuple<Selector, Sizes, std::string, Codec, std::string, float, bool, bool, bool, bool, float,
                                float, std::size_t, std::vector<ParameterRule>, Schedule, std::uint64_t>;

OptionsState state_of(const ReducerOptions& o) {
  return {o.selector,
          sizes_of(o),
          name_of(kUnits, o.unit),
          o.codec,
          name_of(kKinds, o.all_reduce),
          o.momentum,
          o.nesterov,
          o.momentum_masking,
          o.error_feedback,
          o.rounding_feedback,
          o.residual_decay,
          o.clip_norm,
          o.dense_below,
          o.rules,
          o.schedule,
          o.seed};
}

ReducerOptions options_of(OptionsState t) {
  ReducerOptions o;
  Sizes sizes;
  std::string unit, all_reduce;
  std::tie(o.selector, sizes, unit, o.codec, all_reduce, o.momentum, o.nesterov, o.momentum_masking, o.error_feedback,
           o.rounding_feedback, o.residual_decay, o.clip_norm, o.dense_below, o.rules, o.schedule, o.seed) =
      std::move(t);
  set_sizes(o, sizes);
  o.unit = parse(kUnits, "unit", unit);
  o.all_reduce = parse(kKinds, "all_reduce", all_reduce);
  return o;
}

std::string repr(const ReducerOptions& o) {
  return expression("ReducerOptions", {{"selector", value(o.selector)},
                                       {"selector_by_size", sizes_tuple(o)},
                                       {"unit", value(name_of(kUnits, o.unit))},
                                       {"codec", value(o.codec)},
                                       {"all_reduce", value(name_of(kKinds, o.all_reduce))},
                                       {"momentum", value(o.momentum)},
                                       {"nesterov", value(o.nesterov)},
                                       {"momentum_masking", value(o.momentum_masking)},
                                       {"error_feedback", value(o.error_feedback)},
                                       {"rounding_feedback", value(o.rounding_feedback)},
                                       {"residual_decay", value(o.residual_decay)},
                                       {"clip_norm", value(o.clip_norm)},
                                       {"dense_below", value(o.dense_below)},
                                       {"rules", rules_tuple(o)},
                                       {"schedule", value(o.schedule)},
                                       {"seed", value(o.seed)}});
}

const char* const kOptionsInit =
    "def __init__(self, *, selector: " THINWIRE_SELECTORS
    " = ..., "
    "selector_by_size: collections.abc.Sequence[tuple[int, " THINWIRE_SELECTORS
    "]] = (), "
    "unit: typing.Literal['parameter', 'bucket'] = 'parameter', codec: Codec = ..., "
    "all_reduce: typing.Literal['all_gather', 'dense'] = 'all_gather', momentum: float = 0.0, nesterov: bool = False, "
    "momentum_masking: bool = True, error_feedback: bool = True, rounding_feedback: bool = True, "
    "residual_decay: float = 1.0, clip_norm: float = 0.0, dense_below: int = 10240, "
    "rules: collections.abc.Sequence[ParameterRule] = (), schedule: Schedule = ..., seed: int = 0) -> None";

void bind_reducer_options(nb::module_& m) {
  const ReducerOptions defaults;
  nb::class_<ReducerOptions>(m, "ReducerOptions", R"(How gradients are reduced. The same on every rank.

Values are checked together, when a reducer is made.)")
      .def(
          "__init__",
          [](ReducerOptions* self, Selector selector, Sizes selector_by_size, std::string unit, Codec codec,
             std::string all_reduce, float momentum, bool nesterov, bool momentum_masking, bool error_feedback,
             bool rounding_feedback, float residual_decay, float clip_norm, std::size_t dense_below,
             std::vector<ParameterRule> rules, Schedule schedule, std::uint64_t seed) {
            new (self) ReducerOptions(
                options_of({selector, std::move(selector_by_size), std::move(unit), codec, std::move(all_reduce),
                            momentum, nesterov, momentum_masking, error_feedback, rounding_feedback, residual_decay,
                            clip_norm, dense_below, std::move(rules), schedule, seed}));
          },
          nb::kw_only(), "selector"_a = defaults.selector, "selector_by_size"_a = Sizes(), "unit"_a = "parameter",
          "codec"_a = defaults.codec, "all_reduce"_a = "all_gather", "momentum"_a = defaults.momentum,
          "nesterov"_a = defaults.nesterov, "momentum_masking"_a = defaults.momentum_masking,
          "error_feedback"_a = defaults.error_feedback, "rounding_feedback"_a = defaults.rounding_feedback,
          "residual_decay"_a = defaults.residual_decay, "clip_norm"_a = defaults.clip_norm,
          "dense_below"_a = defaults.dense_below, "rules"_a = defaults.rules, "schedule"_a = defaults.schedule,
          "seed"_a = defaults.seed, nb::sig(kOptionsInit))
      .def_prop_rw(
          "selector", [](const ReducerOptions& o) { return o.selector; },
          [](ReducerOptions& o, Selector selector) { o.selector = selector; },
          nb::for_getter(nb::sig("def selector(self) -> " THINWIRE_SELECTORS)),
          nb::for_setter(nb::sig("def selector(self, selector: " THINWIRE_SELECTORS ", /) -> None")), "What travels.")
      .def_prop_rw(
          "selector_by_size", &sizes_tuple, &set_sizes,
          nb::for_getter(nb::sig("def selector_by_size(self) -> tuple[tuple[int, " THINWIRE_SELECTORS "], ...]")),
          nb::for_setter(
              nb::sig("def selector_by_size(self, sizes: collections.abc.Sequence[tuple[int, " THINWIRE_SELECTORS
                      "]], /) -> None")),
          "For units of more elements than each number, ascending; the last one that fits a unit counts.")
      .def_prop_rw(
          "unit", [](const ReducerOptions& o) { return name_of(kUnits, o.unit); },
          [](ReducerOptions& o, const std::string& unit) { o.unit = parse(kUnits, "unit", unit); },
          nb::for_getter(nb::sig("def unit(self) -> typing.Literal['parameter', 'bucket']")),
          nb::for_setter(nb::sig("def unit(self, unit: typing.Literal['parameter', 'bucket'], /) -> None")),
          "What one selection covers: each parameter, or all sparse parameters of a bucket.")
      .def_rw("codec", &ReducerOptions::codec, "How entries are written.")
      .def_prop_rw(
          "all_reduce", [](const ReducerOptions& o) { return name_of(kKinds, o.all_reduce); },
          [](ReducerOptions& o, const std::string& kind) { o.all_reduce = parse(kKinds, "all_reduce", kind); },
          nb::for_getter(nb::sig("def all_reduce(self) -> typing.Literal['all_gather', 'dense']")),
          nb::for_setter(nb::sig("def all_reduce(self, all_reduce: typing.Literal['all_gather', 'dense'], /) -> None")),
          "How payloads become the mean; with 'dense' every step is dense.")
      .def_prop_rw(
          "momentum", [](const ReducerOptions& o) { return value(o.momentum); },
          [](ReducerOptions& o, float momentum) { o.momentum = momentum; },
          nb::for_getter(nb::sig("def momentum(self) -> float")),
          "Momentum of the local velocity, in [0, 1). The optimizer that takes the mean must have none then.")
      .def_rw("nesterov", &ReducerOptions::nesterov)
      .def_rw("momentum_masking", &ReducerOptions::momentum_masking,
              "Zero the velocity of sent entries, in sparse steps (momentum factor masking).")
      .def_rw("error_feedback", &ReducerOptions::error_feedback,
              "False drops what is not sent; for control experiments only, without momentum.")
      .def_rw("rounding_feedback", &ReducerOptions::rounding_feedback,
              "False drops what the value coding takes away from sent entries, as RedSync's code does.")
      .def_prop_rw(
          "residual_decay", [](const ReducerOptions& o) { return value(o.residual_decay); },
          [](ReducerOptions& o, float decay) { o.residual_decay = decay; },
          nb::for_getter(nb::sig("def residual_decay(self) -> float")),
          "What the residual is multiplied by before a gradient is added, in (0, 1].")
      .def_prop_rw(
          "clip_norm", [](const ReducerOptions& o) { return value(o.clip_norm); },
          [](ReducerOptions& o, float norm) { o.clip_norm = norm; },
          nb::for_getter(nb::sig("def clip_norm(self) -> float")),
          R"(Local clipping, 0 for none: the norm that dense training would clip the mean gradient to.

Each of P ranks clips its own gradient to clip_norm * sqrt(P). Nothing is sent before the whole gradient is there.)")
      .def_rw("dense_below", &ReducerOptions::dense_below, "Parameters with fewer elements are always dense.")
      .def_prop_rw(
          "rules", &rules_tuple,
          [](ReducerOptions& o, std::vector<ParameterRule> rules) { o.rules = std::move(rules); },
          nb::for_getter(nb::sig("def rules(self) -> tuple[ParameterRule, ...]")),
          nb::for_setter(nb::sig("def rules(self, rules: collections.abc.Sequence[ParameterRule], /) -> None")),
          "Exceptions by parameter name.")
      .def_rw("schedule", &ReducerOptions::schedule)
      .def_rw("seed", &ReducerOptions::seed, "Of sampling and hashing.")
      .def(
          "validate", [](const ReducerOptions& o) { validate(o); }, "Errors: invalid_argument naming the option.")
      .def(nb::self == nb::self, nb::sig("def __eq__(self, arg: object, /) -> bool"))
      .def("__repr__", &repr)
      .def("__str__", [](const ReducerOptions& o) { return to_string(o); })
      .def("__getstate__", &state_of)
      .def("__setstate__",
           [](ReducerOptions& o, OptionsState t) { new (&o) ReducerOptions(options_of(std::move(t))); });
}

}  // namespace

void bind_options(nb::module_& m) {
  bind_small_options(m);
  bind_reducer_options(m);
}

}  // namespace thinwire::python
