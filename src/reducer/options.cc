// The options: presets, checks, and the words in which ranks compare them.
#include <cmath>
#include <sstream>

#include "core/check.h"
#include "thinwire/reducer.h"

namespace thinwire {

std::string to_string(const ReducerOptions& options) {
  std::ostringstream text;
  text.precision(9);
  text << std::boolalpha << "selector=" << to_string(options.selector)
       << "\nunit=" << (options.unit == Unit::parameter ? "parameter" : "bucket")
       << "\ncodec=" << to_string(options.codec) << "\nall_reduce=" << to_string(options.all_reduce)
       << "\nmomentum=" << options.momentum << "\nnesterov=" << options.nesterov
       << "\nmomentum_masking=" << options.momentum_masking << "\nerror_feedback=" << options.error_feedback
       << "\ndense_below=" << options.dense_below << "\nschedule.dense_steps=" << options.schedule.dense_steps
       << "\nseed=" << options.seed << "\n";
  for (const ParameterRule& rule : options.rules) {
    text << "rule " << quoted(rule.pattern) << ":";
    if (rule.dense) text << " dense=" << *rule.dense;
    if (rule.momentum) text << " momentum=" << *rule.momentum;
    if (rule.nesterov) text << " nesterov=" << *rule.nesterov;
    text << "\n";
  }
  return text.str();
}

void validate(const ReducerOptions& options) {
  validate(options.selector);
  const auto* hashed = std::get_if<HashedSlots>(&options.selector);
  require(
      options.codec.indices != IndexCoding::elias_fano || hashed == nullptr || hashed->layout != HashedSlots::Layout::a,
      "elias_fano needs ascending indices, but layout a of HashedSlots sends its table as it lies");
  const auto check_momentum = [](float momentum, const std::string& of) {
    require(momentum >= 0.0f && momentum < 1.0f,
            "momentum" + of + " is " + std::to_string(momentum) + ", not in [0, 1)");
  };
  check_momentum(options.momentum, "");
  for (const ParameterRule& rule : options.rules) {
    require(!rule.pattern.empty(), "the pattern of a parameter rule is empty");
    if (rule.momentum) check_momentum(*rule.momentum, " of rule " + quoted(rule.pattern));
  }
  require(!options.nesterov || options.momentum != 0.0f, "nesterov is set but momentum is 0");
  require(options.error_feedback || options.momentum == 0.0f, "error_feedback is off but momentum is " +
                                                                  std::to_string(options.momentum) +
                                                                  ": a local velocity would itself be a memory");
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

ReducerOptions redsync(double density) {
  ReducerOptions options;
  options.selector = TrimmedTopK{.density = density};
  validate(options);
  return options;
}

ReducerOptions dragonn(const DragonnOptions& from) {
  ReducerOptions options;
  options.selector = HashedSlots{.density = from.density, .layout = from.layout};
  validate(options);
  return options;
}

}  // namespace thinwire
