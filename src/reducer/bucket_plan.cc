#include "reducer/bucket_plan.h"

#include "core/check.h"
#include "core/tuning.h"

namespace thinwire {
namespace {

void add_dense(BucketPlan& plan, std::size_t slice, std::uint32_t offset, std::size_t numel) {
  plan.dense_slices.push_back(slice);
  plan.dense_numel += numel;
  if (!plan.dense_runs.empty() && plan.dense_runs.back().begin + plan.dense_runs.back().numel == offset)
    plan.dense_runs.back().numel += numel;
  else
    plan.dense_runs.push_back({.begin = offset, .numel = numel});
}

// `before` is how the parameter added last is treated; null for the first one.
void add_sparse(BucketPlan& plan, Unit unit, const std::string& name, const Residual::Segment& segment,
                std::size_t numel, const ParameterPolicy& policy, const ParameterPolicy* before) {
  const bool joins = unit == Unit::bucket && before != nullptr && before->selector == policy.selector &&
                     before->values == policy.values;
  if (!joins) {
    plan.units.emplace_back();
    plan.units.back().name = name;
    plan.units.back().begin = segment.offset;
    plan.units.back().values = policy.values;
  }
  UnitPlan& last = plan.units.back();
  last.segments.push_back(segment);
  last.numel += numel;
  last.extent = static_cast<std::uint32_t>(segment.offset + numel - last.begin);
  plan.sparse_numel += numel;
}

// What a unit of `numel` elements selects with.
Selector selector_for(const ReducerOptions& options, const ParameterPolicy& policy, std::size_t numel,
                      std::uint64_t step) {
  Selector selector = options.selector;
  for (const SizedSelector& larger : options.selector_by_size)
    if (numel > larger.above) selector = larger.selector;
  if (policy.selector) selector = *policy.selector;
  std::visit([&](auto& s) { s.density = density_at(options.schedule, step, s.density); }, selector);
  return selector;
}

std::size_t block_bytes(const BucketPlan& plan, const ReducerOptions& options) {
  std::vector<SectionShape> shapes;
  if (plan.dense_in_payload)
    for (const DenseRun& run : plan.dense_runs) shapes.push_back({.dense = true, .capacity = run.numel, .extent = 0});
  for (const UnitPlan& unit : plan.units)
    shapes.push_back({.dense = false,
                      .capacity = capacity(unit.selector, unit.numel),
                      .extent = unit.extent,
                      .coding = unit.values});
  return payload_bound(options.codec, plan.segments.size(), shapes);
}

}  // namespace

bool matches(std::string_view pattern, std::string_view name) noexcept {
  if (pattern.empty()) return name.empty();
  if (pattern.front() == '*') {
    for (std::size_t skip = 0; skip <= name.size(); ++skip)
      if (matches(pattern.substr(1), name.substr(skip))) return true;
    return false;
  }
  if (name.empty()) return false;
  if (pattern.front() == '?') return matches(pattern.substr(1), name.substr(1));
  if (pattern.front() == '\\' && pattern.size() > 1) pattern.remove_prefix(1);
  return pattern.front() == name.front() && matches(pattern.substr(1), name.substr(1));
}

ParameterPolicy policy_of(const Parameter& parameter, const ReducerOptions& options) {
  ParameterPolicy policy{.dense = parameter.numel < options.dense_below,
                         .momentum = {.momentum = options.momentum,
                                      .nesterov = options.nesterov,
                                      .error_feedback = options.error_feedback,
                                      .residual_decay = options.residual_decay},
                         .selector = {},
                         .values = options.codec.values};
  for (const ParameterRule& rule : options.rules) {
    if (!matches(rule.pattern, parameter.name)) continue;
    policy.dense = rule.dense.value_or(policy.dense);
    policy.momentum.momentum = rule.momentum.value_or(policy.momentum.momentum);
    policy.momentum.nesterov = rule.nesterov.value_or(policy.momentum.nesterov);
    if (rule.selector) policy.selector = rule.selector;
    policy.values = rule.values.value_or(policy.values);
  }
  const Codec codec{.indices = options.codec.indices, .values = policy.values};
  if (!policy.dense)
    require_compatible(selector_for(options, policy, parameter.numel, ~std::uint64_t{0}), codec,
                       " (parameter " + quoted(parameter.name) + ")");
  return policy;
}

BucketPlan plan_bucket(const Bucket& bucket, const Residual& residual,
                       const std::unordered_map<std::string, ParameterPolicy>& policies, const ReducerOptions& options,
                       const StepPlan& step, int ranks) {
  BucketPlan plan;
  plan.layout = step.dense ? "a dense step\n" : "a sparse step\n";
  std::vector<const ParameterPolicy*> unit_policies;
  std::uint32_t offset = 0;
  for (std::size_t i = 0; i < bucket.slices.size(); ++i) {
    const BucketSlice& slice = bucket.slices[i];
    const Residual::Segment segment = residual.segment(slice.name, slice.numel, offset);
    plan.segments.push_back(segment);
    const ParameterPolicy& policy = policies.at(slice.name);
    if (step.dense || policy.dense) {
      add_dense(plan, i, offset, slice.numel);
    } else {
      add_sparse(plan, options.unit, slice.name, segment, slice.numel, policy,
                 unit_policies.empty() ? nullptr : unit_policies.back());
      unit_policies.resize(plan.units.size(), &policy);
    }
    plan.layout += quoted(slice.name) + " of " + std::to_string(slice.numel) + " elements\n";
    offset += static_cast<std::uint32_t>(slice.numel);
  }
  for (std::size_t i = 0; i < plan.units.size(); ++i) {
    UnitPlan& unit = plan.units[i];
    unit.selector = selector_for(options, *unit_policies[i], unit.numel, step.step);
    if (unit.values == ValueCoding::shared_mean) unit.side = step.step % 2 == 0 ? Side::smallest : Side::largest;
  }
  plan.dense_in_payload =
      !step.dense && ranks <= kDenseSectionMaxRanks && plan.dense_numel * sizeof(float) <= kDenseSectionMaxBytes;
  plan.block_bytes = block_bytes(plan, options);
  return plan;
}

}  // namespace thinwire
