// What one bucket's job consists of: which slices travel whole, which units are selected from, how large the block is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "thinwire/reducer.h"

namespace thinwire {

/// How the options treat one parameter.
struct ParameterPolicy {
  bool dense = true;
  MomentumRule momentum;
};
ParameterPolicy policy_of(const Parameter& parameter, const ReducerOptions& options);

/// True if `name` matches `pattern` ('*', '?', backslash).
bool matches(std::string_view pattern, std::string_view name) noexcept;

/// One selection.
struct UnitPlan {
  std::string name;  ///< of the parameter, or of a bucket's first one
  std::vector<Residual::Segment> segments;
  std::size_t numel = 0;
  std::uint32_t begin = 0;
  std::uint32_t extent = 0;
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

/// Errors: invalid_argument for an unknown parameter or a wrong numel.
BucketPlan plan_bucket(const Bucket& bucket, const Residual& residual,
                       const std::unordered_map<std::string, ParameterPolicy>& policies, const ReducerOptions& options,
                       bool dense_step, int ranks);

}  // namespace thinwire
