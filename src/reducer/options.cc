// The options: presets, checks, and the words in which ranks compare them.
#include <algorithm>
#include <cmath>
#include <sstream>

#include "core/check.h"
#include "core/text.h"
#include "reducer/bucket_plan.h"
#include "thinwire/reducer.h"

namespace thinwire {
namespace {

// Every selector that a unit may get from the options, rules apart.
std::vector<Selector> selectors_of(const ReducerOptions& options) {
  std::vector<Selector> all = {options.selector};
  for (const SizedSelector& larger : options.selector_by_size) all.push_back(larger.selector);
  return all;
}

void check_momentum(float momentum, const std::string& of) {
  require(momentum >= 0.0f && momentum < 1.0f, "momentum" + of + " is " + std::to_string(momentum) + ", not in [0, 1)");
}

void check_rules(const ReducerOptions& options) {
  for (const ParameterRule& rule : options.rules) {
    require(!rule.pattern.empty(), "the pattern of a parameter rule is empty");
    if (rule.momentum) check_momentum(*rule.momentum, " of rule " + quoted(rule.pattern));
    if (rule.selector) validate(*rule.selector);
    // What a rule leaves open, other rules may decide: `policy_of` sees it all.
    if (rule.selector && rule.values)
      require_compatible(*rule.selector, {.indices = options.codec.indices, .values = *rule.values},
                         " (rule " + quoted(rule.pattern) + ")");
  }
}

void check_schedule(const ReducerOptions& options) {
  const Schedule& schedule = options.schedule;
  require(schedule.ramp_stages > 0 || schedule.ramp_steps == 0,
          "schedule.ramp_stages is 0 but schedule.ramp_steps is " + std::to_string(schedule.ramp_steps));
  require(schedule.ramp_steps == 0 || options.all_reduce != SparseAllReduce::dense,
          "schedule.ramp_steps is " + std::to_string(schedule.ramp_steps) + " but all_reduce is dense");
  const std::vector<SizedSelector>& sizes = options.selector_by_size;
  for (std::size_t i = 1; i < sizes.size(); ++i)
    require(sizes[i - 1].above < sizes[i].above, "selector_by_size is not in ascending order: above " +
                                                     std::to_string(sizes[i].above) + " follows above " +
                                                     std::to_string(sizes[i - 1].above));
}

// Whether any entry may be rounded.
bool rounds(const ReducerOptions& options) {
  return options.codec.values != ValueCoding::f32 ||
         std::any_of(options.rules.begin(), options.rules.end(), [](const ParameterRule& rule) {
           return rule.values.value_or(ValueCoding::f32) != ValueCoding::f32;
         });
}

void check_feedback(const ReducerOptions& options) {
  require(options.error_feedback || options.momentum == 0.0f, "error_feedback is off but momentum is " +
                                                                  std::to_string(options.momentum) +
                                                                  ": a local velocity would itself be a memory");
  require(options.residual_decay > 0.0f && options.residual_decay <= 1.0f,
          "residual_decay is " + text_of(options.residual_decay) + ", not in (0, 1]");
  require(options.error_feedback || options.residual_decay == 1.0f, "error_feedback is off but residual_decay is " +
                                                                        text_of(options.residual_decay) +
                                                                        ": there is no residual to decay");
  require(options.rounding_feedback || options.error_feedback,
          "rounding_feedback and error_feedback are both off, but the first is part of the second");
  require(options.rounding_feedback || rounds(options),
          "rounding_feedback is off but codec.values is f32, which rounds nothing");
  require(options.clip_norm == 0.0f || (options.clip_norm > 0.0f && std::isnormal(options.clip_norm)),
          "clip_norm is " + text_of(options.clip_norm) + ", neither 0 nor a finite norm above 1.2e-38");
}

}  // namespace

Schedule schedule_in_epochs(std::uint64_t steps_per_epoch, double dense_epochs, std::uint32_t ramp_epochs) {
  require(steps_per_epoch > 0, "steps_per_epoch is 0");
  require(dense_epochs >= 0 && std::isfinite(dense_epochs),
          "dense_epochs is " + text_of(dense_epochs) + ", not a finite number of at least 0");
  const double dense_steps = std::floor(dense_epochs * static_cast<double>(steps_per_epoch) + 0.5);
  constexpr double kTooMany = 0x1p63;
  require(dense_steps < kTooMany && static_cast<double>(ramp_epochs) * static_cast<double>(steps_per_epoch) < kTooMany,
          text_of(dense_epochs) + " dense epochs and " + std::to_string(ramp_epochs) + " of the ramp, of " +
              std::to_string(steps_per_epoch) + " steps each, are more steps than can be counted");
  Schedule schedule;
  schedule.dense_steps = static_cast<std::uint64_t>(dense_steps);
  schedule.ramp_steps = ramp_epochs * steps_per_epoch;
  if (ramp_epochs > 0) schedule.ramp_stages = ramp_epochs;
  return schedule;
}

double density_at(const Schedule& schedule, std::uint64_t step, double density) {
  if (step < schedule.dense_steps) return 1.0;
  const std::uint64_t since = step - schedule.dense_steps;
  if (since >= schedule.ramp_steps) return density;
  // In f64, whose quotient of two integers below 2^53 never rounds up to the next stage; 64 bits may not hold the product.
  const double stages = schedule.ramp_stages;
  const double stage = std::floor(static_cast<double>(since) * stages / static_cast<double>(schedule.ramp_steps));
  // To f32, so that libraries whose pow differs in the last bit agree.
  return static_cast<float>(std::pow(density, (stage + 1) / (stages + 1)));
}

void require_compatible(const Selector& selector, const Codec& codec, const std::string& of) {
  const auto* hashed = std::get_if<HashedSlots>(&selector);
  const bool layout_a = hashed != nullptr && hashed->layout == HashedSlots::Layout::a;
  require(codec.indices != IndexCoding::elias_fano || !layout_a,
          "elias_fano needs ascending indices, but layout a of HashedSlots sends its table as it lies" + of);
  require(codec.values != ValueCoding::shared_mean || !layout_a,
          "shared_mean is the mean of all entries sent, but layout a of HashedSlots sends free slots too" + of);
  const auto* search = std::get_if<ThresholdSearch>(&selector);
  require(
      codec.values != ValueCoding::shared_mean || search == nullptr || search->reuse_interval == 1,
      "shared_mean takes the largest and the smallest values in turn, so reuse_interval of ThresholdSearch must be 1, "
      "not " +
          std::to_string(search == nullptr ? 1 : search->reuse_interval) + of);
}

std::string to_string(const ReducerOptions& options) {
  std::ostringstream text;
  text << std::boolalpha << "selector=" << to_string(options.selector);
  for (const SizedSelector& larger : options.selector_by_size)
    text << "\nabove " << larger.above << " elements=" << to_string(larger.selector);
  text << "\nunit=" << (options.unit == Unit::parameter ? "parameter" : "bucket")
       << "\ncodec=" << to_string(options.codec) << "\nall_reduce=" << to_string(options.all_reduce)
       << "\nmomentum=" << text_of(options.momentum) << "\nnesterov=" << options.nesterov
       << "\nmomentum_masking=" << options.momentum_masking << "\nerror_feedback=" << options.error_feedback
       << "\nrounding_feedback=" << options.rounding_feedback << "\nresidual_decay=" << text_of(options.residual_decay)
       << "\nclip_norm=" << text_of(options.clip_norm) << "\ndense_below=" << options.dense_below
       << "\nschedule.dense_steps=" << options.schedule.dense_steps
       << "\nschedule.ramp_steps=" << options.schedule.ramp_steps
       << "\nschedule.ramp_stages=" << options.schedule.ramp_stages << "\nseed=" << options.seed << "\n";
  for (const ParameterRule& rule : options.rules) {
    text << "rule " << quoted(rule.pattern) << ":";
    if (rule.dense) text << " dense=" << *rule.dense;
    if (rule.momentum) text << " momentum=" << text_of(*rule.momentum);
    if (rule.nesterov) text << " nesterov=" << *rule.nesterov;
    if (rule.selector) text << " selector=" << to_string(*rule.selector);
    if (rule.values) text << " values=" << to_string(*rule.values);
    text << "\n";
  }
  return text.str();
}

void validate(const ReducerOptions& options) {
  for (const Selector& selector : selectors_of(options)) {
    validate(selector);
    require_compatible(selector, options.codec);
  }
  check_momentum(options.momentum, "");
  require(!options.nesterov || options.momentum != 0.0f, "nesterov is set but momentum is 0");
  check_rules(options);
  check_schedule(options);
  check_feedback(options);
}

ReducerOptions dense() {
  ReducerOptions options;
  options.all_reduce = SparseAllReduce::dense;
  return options;
}

ReducerOptions top_k(double density) {
  ReducerOptions options;
  options.selector = TopK{.density = density};
  options.unit = Unit::bucket;
  validate(options);
  return options;
}

ReducerOptions redsync(double density, const RedsyncLimits& limits) {
  ReducerOptions options;
  options.selector = TopK{.density = density};
  options.selector_by_size = {{.above = limits.top_k, .selector = TrimmedTopK{.density = density}},
                              {.above = limits.trimmed, .selector = ThresholdSearch{.density = density}}};
  validate(options);
  return options;
}

ReducerOptions redsync_quantized(double density, const std::vector<std::string>& output_layer,
                                 const RedsyncLimits& limits) {
  ReducerOptions options = redsync(density, limits);
  options.selector_by_size.back().selector = ThresholdSearch{.density = density, .reuse_interval = 1};
  options.codec.values = ValueCoding::shared_mean;
  for (const std::string& pattern : output_layer) {
    ParameterRule& exempt = options.rules.emplace_back();
    exempt.pattern = pattern;
    exempt.values = ValueCoding::f32;
  }
  validate(options);
  return options;
}

ReducerOptions dragonn(const DragonnOptions& from) {
  require(from.small_density > 0 && from.small_density <= 1,
          "small_density is " + text_of(from.small_density) + ", not in (0, 1]");
  const HashedSlots slots{.density = from.density, .layout = from.layout};
  HashedSlots small = slots;
  small.density = std::max(from.density, from.small_density);
  ReducerOptions options;
  options.selector = small;
  options.selector_by_size = {{.above = from.small, .selector = slots}};
  validate(options);
  return options;
}

ReducerOptions dgc(double density) {
  ReducerOptions options;
  options.selector = SampledTopK{.density = density};
  validate(options);
  return options;
}

}  // namespace thinwire
