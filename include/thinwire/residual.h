// thinwire, stage 1: the error-feedback state. What was not sent yet stays here, by parameter name.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "thinwire/parameter.h"
#include "thinwire/sparse_gradient.h"
#include "thinwire/types.h"

namespace thinwire {

/// How a gradient g becomes the addend x of the residual (momentum correction; Lin et al., DGC, ICLR 2018):
///   u <- momentum·u + g;   x = u, or momentum·u + g of the new u with `nesterov`;   v <- residual_decay·v + x.
/// With momentum 0 there is no u and x = g. Each product and each sum is rounded to f32 on its own, on every target.
struct MomentumRule {
  float momentum = 0.0f;  ///< in [0, 1)
  bool nesterov = false;
  /// False: v <- g, so whatever is not sent is dropped. For control experiments only; needs momentum 0.
  bool error_feedback = true;
  float residual_decay = 1.0f;  ///< in (0, 1]; below 1 what waits fades from step to step
  friend bool operator==(const MomentumRule&, const MomentumRule&) = default;
};

/// One parameter's state, by value: what is written into checkpoints. velocity is empty without momentum.
struct ParameterState {
  std::string name;
  std::vector<float> residual;  ///< v [numel]
  std::vector<float> velocity;  ///< u [numel] or empty
};

/// Residual v and velocity u of every parameter, 4 B and (with momentum) 4 B more per element.
///
/// The states outlive buckets: a unit is a list of segments that point into them. Everything sent in a step is noted
/// in an undo list, O(entries sent), until `commit`. Not thread-safe: one thread at a time.
class Residual {
 public:
  Residual();
  ~Residual();
  Residual(Residual&&) noexcept;
  Residual& operator=(Residual&&) noexcept;

  /// Adds a parameter with zero state. Adding it again with the same numel and rule changes nothing.
  /// Errors: invalid_argument for a known name with another numel or rule, momentum outside [0, 1), residual_decay
  /// outside (0, 1], Nesterov without momentum, or a velocity or a decay without error feedback.
  void add(const Parameter& parameter, const MomentumRule& rule);

  bool contains(std::string_view name) const noexcept;
  /// v [numel] and u [numel] (empty without momentum). Errors: invalid_argument for an unknown name.
  std::span<const float> residual(std::string_view name) const;
  std::span<const float> velocity(std::string_view name) const;

  /// One parameter's state; its address stays the same for the life of the Residual.
  struct State;
  /// A parameter's place in a bucket buffer; a unit is one or several of them, ascending by offset.
  struct Segment {
    State* state = nullptr;
    std::uint32_t offset = 0;
  };
  /// Errors: invalid_argument for an unknown name or another numel.
  Segment segment(std::string_view name, std::size_t numel, std::uint32_t offset) const;
  /// The segment's v as the selectors read it.
  static UnitSegment view(const Segment& segment) noexcept;

  /// Writes v of the runs, one behind the other, as `accumulate` will leave it, without changing anything: what a
  /// sampled bound is taken from. A non-finite result reads as the old v, as in `accumulate`. Runs lie in the unit.
  static void peek(std::span<const Segment> unit, const GradientView& bucket, std::span<const UnitRun> runs,
                   float* out);

  /// Sees a block right after its update; returns the bound for the hits of the next one.
  using BlockVisitor = std::function<std::uint32_t(const UnitBlock&)>;

  /// u and v of the segments take in their slices of the bucket's buffer, block by block; `visit`, where given, sees
  /// each block with its hits: values of `side` at or above `bound`. An element whose new v would not be finite keeps
  /// its u and v. Returns the bucket offset of the first such element, if any. One pass: 20 B per element with momentum,
  /// 12 without. Does not touch the bucket's buffer.
  static std::optional<std::uint32_t> accumulate(std::span<const Segment> unit, const GradientView& bucket,
                                                 const BlockVisitor& visit = {}, std::uint32_t bound = kNoBound,
                                                 Side side = Side::both);

  /// Writes the entries back to v and, with `masking`, to u. They lie in the unit.
  static void put_back(std::span<const Segment> unit, const TakenEntries& taken, bool masking) noexcept;

  /// Takes what was sent out of the state: v <- fl(v - value), or 0 without `keep_rounding`; with `masking` also u <- 0
  /// there (momentum factor masking). Slots holding kEmptySlot are skipped. What was there goes to the undo list.
  /// `taken`: the same entries, if the pass has taken them out already; left empty, with other memory, or untouched on
  /// errors.
  /// Errors: invalid_argument for an index outside the unit, before anything is changed.
  void settle(std::span<const Segment> unit, const SparseGradient& sent, bool masking, TakenEntries&& taken = {},
              bool keep_rounding = true);
  /// The same for a whole segment at density 1, without masking: its v is moved to `sent` [numel] and becomes 0.
  /// `sent` is also the undo copy: it must stay valid and unchanged until `commit` or `undo`.
  void settle_dense(const Segment& segment, std::span<float> sent);

  /// Notes u and v of a segment whose gradient may be absent everywhere, before `accumulate`; `restore` puts them back
  /// and strikes the segment from the undo list. O(numel), only for slices without a local gradient.
  void remember(const Segment& segment);
  void restore(const Segment& segment);

  /// Ends a step: what was sent is gone for good.
  void commit() noexcept;
  /// Takes the step's sends back, bit for bit: u and v as they were before any entry left. Gradients stay accumulated.
  void undo() noexcept;

  /// All parameters in the order they were added.
  std::vector<ParameterState> state() const;
  /// Replaces the state of all parameters by name. Errors: invalid_argument for an unknown, missing or doubled name, a
  /// wrong size or a non-finite value; then nothing is changed.
  void load(std::span<const ParameterState> states);

  /// Replaces one parameter's u. Errors: invalid_argument for an unknown name, a wrong size, a non-finite value.
  void set_velocity(std::string_view name, std::span<const float> velocity);

  /// sqrt(Σ v²) over all parameters, summed in f64 in a fixed order.
  double norm() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace thinwire
