// What one bucket's job consists of: which slices travel whole, which units are selected from, how large the block is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "thinwire/reducer.h"

namespace thinwire {

/// How the options treat one parameter.
struct ParameterPolicy {
  bool dense = true;
  MomentumRule momentum;
  std::optional<Selector> selector;  ///< instead of the one for the unit's size
  ValueCoding values = ValueCoding::f32;
};
/// Errors: invalid_argument for rules that contradict each other.
ParameterPolicy policy_of(const Parameter& parameter, const ReducerOptions& options);

/// Errors: invalid_argument, naming both and ending with `of`, for a selector whose entries the codec cannot hold.
void require_compatible(const Selector& selector, const Codec& codec, const std::string& of = "");

/// True if `name` matches `pattern` ('*', '?', backslash).
bool matches(std::string_view pattern, std::string_view name) noexcept;

/// One selection.
struct UnitPlan {
  std::string name;  ///< of the parameter, or of a bucket's first one
  std::vector<Residual::Segment> segments;
  std::size_t numel = 0;
  std::uint32_t begin = 0;
  std::uint32_t extent = 0;
  Selector selector;  ///< with the density of the step
  ValueCoding values = ValueCoding::f32;
  Side side = Side::both;
};

/// Slices that lie next to each other and travel whole.
struct DenseRun {
  std::uint32_t begin = 0;
  std::size_t numel = 0;
};

struct BucketPlan {
  std::vector<Residual::Segment> segments;  ///< [slices]
  std::vector<std::size_t> dense_slices;    ///< ascending
  std::vector<DenseRun> dense_runs;         ///< the same elements, joined
  std::size_t dense_numel = 0;
  bool dense_in_payload = false;
  std::vector<UnitPlan> units;
  std::size_t sparse_numel = 0;
  std::size_t block_bytes = 0;
  std::string layout;  ///< in words, line by line; equal on all ranks
};

/// What the step asks of all buckets.
struct StepPlan {
  std::uint64_t step = 0;
  bool dense = true;
};

/// Errors: invalid_argument for an unknown parameter or a wrong numel.
BucketPlan plan_bucket(const Bucket& bucket, const Residual& residual,
                       const std::unordered_map<std::string, ParameterPolicy>& policies, const ReducerOptions& options,
                       const StepPlan& step, int ranks);

}  // namespace thinwire
