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

void add_sparse(BucketPlan& plan, Unit unit, const std::string& name, const Residual::Segment& segment,
                std::size_t numel) {
  if (unit == Unit::parameter || plan.units.empty())
    plan.units.push_back({.name = name, .segments = {}, .numel = 0, .begin = segment.offset, .extent = 0});
  UnitPlan& last = plan.units.back();
  last.segments.push_back(segment);
  last.numel += numel;
  last.extent = static_cast<std::uint32_t>(segment.offset + numel - last.begin);
  plan.sparse_numel += numel;
}

std::size_t block_bytes(const BucketPlan& plan, const ReducerOptions& options) {
  std::vector<SectionShape> shapes;
  if (plan.dense_in_payload)
    for (const DenseRun& run : plan.dense_runs) shapes.push_back({.dense = true, .capacity = run.numel, .extent = 0});
  for (const UnitPlan& unit : plan.units)
    shapes.push_back({.dense = false, .capacity = capacity(options.selector, unit.numel), .extent = unit.extent});
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
  ParameterPolicy policy{
      .dense = parameter.numel < options.dense_below,
      .momentum = {
          .momentum = options.momentum, .nesterov = options.nesterov, .error_feedback = options.error_feedback}};
  for (const ParameterRule& rule : options.rules) {
    if (!matches(rule.pattern, parameter.name)) continue;
    policy.dense = rule.dense.value_or(policy.dense);
    policy.momentum.momentum = rule.momentum.value_or(policy.momentum.momentum);
    policy.momentum.nesterov = rule.nesterov.value_or(policy.momentum.nesterov);
  }
  return policy;
}

BucketPlan plan_bucket(const Bucket& bucket, const Residual& residual,
                       const std::unordered_map<std::string, ParameterPolicy>& policies, const ReducerOptions& options,
                       bool dense_step, int ranks) {
  BucketPlan plan;
  plan.layout = dense_step ? "a dense step\n" : "a sparse step\n";
  std::uint32_t offset = 0;
  for (std::size_t i = 0; i < bucket.slices.size(); ++i) {
    const BucketSlice& slice = bucket.slices[i];
    const Residual::Segment segment = residual.segment(slice.name, slice.numel, offset);
    plan.segments.push_back(segment);
    const bool dense = dense_step || policies.at(slice.name).dense;
    if (dense)
      add_dense(plan, i, offset, slice.numel);
    else
      add_sparse(plan, options.unit, slice.name, segment, slice.numel);
    plan.layout += quoted(slice.name) + " of " + std::to_string(slice.numel) + " elements\n";
    offset += static_cast<std::uint32_t>(slice.numel);
  }
  plan.dense_in_payload =
      !dense_step && ranks <= kDenseSectionMaxRanks && plan.dense_numel * sizeof(float) <= kDenseSectionMaxBytes;
  plan.block_bytes = block_bytes(plan, options);
  return plan;
}

}  // namespace thinwire
