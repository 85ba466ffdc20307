// thinwire: parameters and buckets: what is trained, and what travels together.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace thinwire {

/// A named tensor, seen as numel elements in memory order. Residuals are keyed by this name: never by bucket,
/// pointer or position, so buckets may be regrouped at any step without moving any state.
struct Parameter {
  std::string name;
  std::size_t numel = 0;
  friend bool operator==(const Parameter&, const Parameter&) = default;
};

/// One parameter's place in a bucket. The slices of a bucket lie one behind the other in the bucket's buffer.
struct BucketSlice {
  std::string name;
  std::size_t numel = 0;
  /// False: this rank computed no gradient for the parameter in this step (its slice holds zeros). If that is so on
  /// every rank, the parameter's residual stays as it is and its slice of the mean is zero.
  bool has_gradient = true;
};

/// The parameters that are reduced in one exchange, in buffer order. Every rank gives the same slices for the same
/// job of a step; from step to step they may change.
struct Bucket {
  std::vector<BucketSlice> slices;
};

/// Elements of the bucket's buffer: the sum of its slices.
std::size_t numel(const Bucket& bucket) noexcept;

}  // namespace thinwire
