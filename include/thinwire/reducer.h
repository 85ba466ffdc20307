// thinwire: the façade. A Reducer takes one bucket's gradient after the other and gives back their means.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "thinwire/codec.h"
#include "thinwire/communicator.h"
#include "thinwire/error.h"
#include "thinwire/parameter.h"
#include "thinwire/residual.h"
#include "thinwire/select.h"
#include "thinwire/sparse_all_reduce.h"
#include "thinwire/trace.h"
#include "thinwire/types.h"

namespace thinwire {

/// What one selection covers.
enum class Unit : std::uint8_t {
  parameter,  ///< each parameter has its own k (the papers' way)
  bucket,     ///< all sparse parameters of a bucket compete for one k
};

/// When compression starts. Part of the state is only the step number, so a restart continues at the right point.
struct Schedule {
  /// Dense warm-up: steps 0 … dense_steps-1 average everything (RedSync's dense epochs, DRAGONN's start step).
  std::uint64_t dense_steps = 0;
  /// The ramp of DGC's warm-up (Lin et al., ICLR 2018) follows: ramp_steps steps in ramp_stages equal stages, stage i = 0,
  /// 1, … at density D^((i+1)/(ramp_stages+1)), D being what the selector asks for: 25, 6.3, 1.6, 0.4 % before 0.1 %.
  std::uint64_t ramp_steps = 0;
  std::uint32_t ramp_stages = 4;
  friend bool operator==(const Schedule&, const Schedule&) = default;
};
/// The same by epochs: dense ones, then a ramp of one stage an epoch. Fractions of epochs are rounded to steps.
/// Errors: invalid_argument for an epoch of no steps, a negative number of epochs, or 2^63 steps and more.
Schedule schedule_in_epochs(std::uint64_t steps_per_epoch, double dense_epochs, std::uint32_t ramp_epochs = 0);
/// The density of a step where the selector asks for `density`: 1 in dense steps, `density` after the ramp. On the ramp it
/// is rounded to f32, so that it is the same on every rank.
double density_at(const Schedule& schedule, std::uint64_t step, double density);

/// An exception to the options for the parameters whose name matches `pattern`: '*' is any run of characters, '?' any
/// one, a backslash takes the next character literally. Of several matching rules the last one that sets a field wins.
struct ParameterRule {
  std::string pattern;
  std::optional<bool> dense;      ///< true: always dense, false: sparse whatever its size
  std::optional<float> momentum;  ///< instead of ReducerOptions::momentum
  std::optional<bool> nesterov;
  std::optional<Selector> selector = {};   ///< instead of the one that the options have for its size
  std::optional<ValueCoding> values = {};  ///< instead of Codec::values
  friend bool operator==(const ParameterRule&, const ParameterRule&) = default;
};

/// The selector of units of more than `above` elements.
struct SizedSelector {
  std::size_t above = 0;
  Selector selector;
  friend bool operator==(const SizedSelector&, const SizedSelector&) = default;
};

struct ReducerOptions {
  Selector selector = TopK{};
  /// For larger units, `above` ascending: the last entry whose limit a unit exceeds.
  std::vector<SizedSelector> selector_by_size;
  /// In a bucket, parameters that rules treat otherwise than their neighbours are units of their own.
  Unit unit = Unit::parameter;
  /// With values = shared_mean only one sign is sent in a step (RedSync's same-sign quantization): the smallest values in
  /// even steps, the largest in odd ones.
  Codec codec;
  /// With `dense` every step is a dense step, whatever the selector.
  SparseAllReduce all_reduce = SparseAllReduce::all_gather;
  /// Momentum belongs to thinwire from step 0 on; the optimizer that takes the mean runs without.
  float momentum = 0.0f;
  bool nesterov = false;
  /// u <- 0 at sent entries, in sparse steps (momentum factor masking).
  bool momentum_masking = true;
  /// False drops what is not sent; for control experiments only, without momentum.
  bool error_feedback = true;
  /// False drops what the value coding takes away from sent entries, as RedSync's code does with shared_mean.
  bool rounding_feedback = true;
  /// v <- residual_decay·v + x, in (0, 1]: below 1 old entries fade (DRAGONN's memory: 0.9, without momentum). A step that
  /// is undone has faded them all the same.
  float residual_decay = 1.0f;
  /// Local clipping (RedSync, DGC): the norm that dense training would clip the mean gradient to; 0: none. A rank clips
  /// its own gradient, not yet divided by the P ranks, to clip_norm·sqrt(P): clip_norm/sqrt(P) for its part of the mean.
  /// The norm is of the whole gradient, its finite entries, so nothing is sent before all parameters were given to
  /// `reduce`.
  float clip_norm = 0.0f;
  /// Parameters with fewer elements are always dense.
  std::size_t dense_below = 10'240;
  std::vector<ParameterRule> rules;
  Schedule schedule;
  /// Of sampling and hashing. The same on every rank.
  std::uint64_t seed = 0;
  friend bool operator==(const ReducerOptions&, const ReducerOptions&) = default;
};

/// Every option as "name=value" lines, in a fixed order: what ranks compare before their first exchange.
std::string to_string(const ReducerOptions& options);
/// Errors: invalid_argument naming the option and its value.
void validate(const ReducerOptions& options);

// Presets. Each returns plain options that may be changed further.

/// Dense all-reduce of f32 residuals with thinwire's momentum: the baseline, through the same path.
ReducerOptions dense();
/// Exact top-k over whole buckets.
ReducerOptions top_k(double density = 0.001);
/// The largest units, in elements, that RedSync's exact and trimmed top-k select from; threshold search beyond. The digits
/// are those of its code, which counts elements; read as bytes of f32 they mean a quarter of it.
struct RedsyncLimits {
  std::size_t top_k = 131'072;
  std::size_t trimmed = 4'194'304;
};
inline constexpr RedsyncLimits kRedsyncElements{};
inline constexpr RedsyncLimits kRedsyncBytes{.top_k = 131'072 / 4, .trimmed = 4'194'304 / 4};
/// RedSync: residual gradient compression (arXiv 1808.04357; JPDC 133, 2019). Per parameter, the selector by size, momentum
/// correction and factor masking, density 0.1 %, all-gather.
ReducerOptions redsync(double density = 0.001, const RedsyncLimits& limits = kRedsyncElements);
/// RedSync with same-sign, same-mean quantization: half the bytes. The threshold is searched anew in each step. Parameters
/// that match a pattern of `output_layer` keep their values, as its code does with the decoder of a language model.
ReducerOptions redsync_quantized(double density = 0.001, const std::vector<std::string>& output_layer = {},
                                 const RedsyncLimits& limits = kRedsyncElements);
/// DRAGONN: randomized hashing (Wang, Xu, Wu, Shrivastava, Ng; ICML 2022, PMLR 162). Per parameter, layout B unless
/// asked otherwise. Its code leaves tensors below 102 400 to 2^20 elements dense, here the limit is `dense_below`; and it
/// starts after 200 steps: `schedule.dense_steps`.
struct DragonnOptions {
  double density = 0.001;
  HashedSlots::Layout layout = HashedSlots::Layout::b;
  /// Units of at most `small` elements have this density, if it is higher: few slots lose much.
  double small_density = 0.01;
  std::size_t small = 131'072;
};
ReducerOptions dragonn(const DragonnOptions& options = {});
/// DGC: deep gradient compression (Lin, Han, Mao, Wang, Dally; ICLR 2018). Per parameter, sampled top-k with re-selection,
/// momentum correction and factor masking. Its warm-up is schedule_in_epochs(steps, 0, 4).
ReducerOptions dgc(double density = 0.001);

/// A unit's way through the first two stages, in one pass over its memory: u and v take in the bucket's slices, and the
/// selected entries go to `selected`. With TopK they are taken out of u and v on the way and go to `taken` as well, for
/// Residual::settle; `masking` says whether u leaves with them. `scratch` is kept between units, `memory` from step to step.
/// Returns what Residual::accumulate returns. If it throws, nothing is taken out.
std::optional<std::uint32_t> accumulate_and_select(const Selector& selector, std::span<const Residual::Segment> unit,
                                                   const GradientView& bucket, std::uint32_t seed, bool masking,
                                                   Selection& scratch, SparseGradient& selected, TakenEntries& taken,
                                                   Side side = Side::both, SelectionMemory* memory = nullptr);

/// What the last finished step did, on this rank.
struct StepStats {
  std::uint64_t step = 0;
  bool dense = true;        ///< every unit was dense
  bool active = false;      ///< at least one unit was sent sparsely
  std::string reason;       ///< why active or why not, in words
  std::size_t jobs = 0;     ///< buckets
  std::uint64_t calls = 0;  ///< communicator calls
  std::uint64_t bytes_sent = 0;
  std::uint64_t bytes_received = 0;
  std::uint64_t dense_bytes = 0;       ///< what a dense f32 all-reduce of the same buckets would have sent
  std::uint64_t small_bytes_sent = 0;  ///< the part of bytes_sent that always-dense parameters caused
  std::uint64_t entries_sent = 0;      ///< of sparse units, free slots apart
  std::uint64_t sparse_numel = 0;      ///< elements of sparse units
  double density = 0.0;                ///< entries_sent / sparse_numel; 1 in a dense step
  std::uint64_t fallbacks = 0;         ///< those of the step's selections, see Selection::fallbacks
  /// Some rank's gradient was not finite and NaN was written, or a mean got too large for its type: the step is undone.
  bool non_finite = false;
  double residual_norm = 0.0;      ///< ‖v‖ after the step, refreshed every `StepStats::kNormInterval` steps
  double gradient_norm = 0.0;      ///< ‖g‖ of the local gradient of that step, clipped if it was
  double clip_factor = 1.0;        ///< what local clipping multiplied the gradient by
  double clip_wait_seconds = 0.0;  ///< from the first bucket to the last: overlap lost to local clipping
  double select_seconds = 0.0;     ///< accumulate and select, which are one pass
  double encode_seconds = 0.0;     ///< encode and settle
  double exchange_seconds = 0.0;   ///< inside communicator calls, waiting for slower ranks included
  double decode_seconds = 0.0;
  double exposed_wait_seconds = 0.0;  ///< that callers spent in Work::wait
  static constexpr std::uint64_t kNormInterval = 50;
};

/// The handle of one job. It may outlive the reducer, which leaves no job unfinished.
class Work {
 public:
  Work() = default;

  /// Waits until the mean is in the gradient's buffer. Throws the job's Error; the communicator's time-out bounds the wait.
  /// Under ReducerOptions::clip_norm the thread that calls `reduce` fails the step if it waits before it has given all
  /// parameters; others just wait.
  void wait();
  bool done() const noexcept;

  struct State;  // internal

 private:
  friend class Reducer;
  explicit Work(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;
};

enum class StepMode : std::uint8_t {
  scheduled,  ///< as the schedule says
  dense,      ///< a dense step on purpose: sends, and so flushes, every residual
  flush,      ///< as dense, but the buffers' contents are ignored: only what waits in the residuals is averaged
};

/// What a checkpoint of one rank holds.
struct ReducerState {
  std::uint64_t step = 0;  ///< number of the next step
  std::vector<ParameterState> parameters;
  std::map<std::string, SelectionMemory> selections;  ///< by the name of the unit's first parameter
};

/// Error-feedback compression of one model's gradients.
///
///     reducer.begin_step();
///     Work work = reducer.reduce(bucket, gradient);     // for each bucket, the same order on every rank
///     work.wait();                                      // gradient now holds the mean over the ranks
///
/// Jobs run one after the other, in call order, on a thread of the reducer's own. Call it from one thread at a time.
///
/// If a step fails on any rank, every rank's jobs of that step and all later ones throw one error that names the rank
/// and the reason; u and v are as before any of the step's entries left (the step's gradients stay accumulated), and the
/// communicator is dead. Nobody waits longer than the communicator's time-out.
class Reducer {
 public:
  /// `communicator` must outlive the reducer. Parameters start with zero state.
  /// Errors: those of `validate`; invalid_argument for a parameter named twice.
  Reducer(ReducerOptions options, const std::vector<Parameter>& parameters, Communicator& communicator);
  /// Finishes the jobs in the queue.
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  /// Ends the last step, waiting for its jobs, and starts the next one. All ranks give the same mode.
  /// Errors: the error the last step ended with.
  void begin_step(StepMode mode = StepMode::scheduled);

  /// gradient <- mean over ranks of what they send. The buffer [numel(bucket)] must stay valid and untouched until the
  /// job is done; then it holds f32, f16 or bf16 as before. `on_done`, where given, runs on the reducer's thread with the
  /// job's error or null, must not throw and must not call the reducer.
  /// Never throws for what is wrong with bucket or gradient (unknown parameter, wrong numel, dtype, device): the job
  /// fails, and every rank is told.
  /// `prepare`, where given, runs on the reducer's thread before the gradient is read, unless the job has failed before:
  /// it may wait for the buffer to be filled, and set what `gradient` said. What it throws fails the job.
  using OnDone = std::function<void(std::exception_ptr)>;
  using Prepare = std::function<void(GradientView&)>;
  Work reduce(Bucket bucket, GradientView gradient, OnDone on_done = {}, Prepare prepare = {});
  /// A job that failed before it could be given to `reduce`: every rank's job of this number throws `reason`.
  Work fail(const std::string& reason, OnDone on_done = {});

  /// Takes the sends of the last step back on this rank, bit for bit; its gradients stay accumulated. For a step whose
  /// mean was thrown away on every rank. Steps with a non-finite gradient are undone without being asked.
  void undo_step();

  /// Number of the current step, or of the next one before the first begin_step.
  std::uint64_t step() const noexcept;
  const ReducerOptions& options() const noexcept;
  /// Of the last step; waits for its jobs. Like all calls that wait, it fails a step under `clip_norm` whose gradient is
  /// not whole yet.
  StepStats stats();
  /// Whether to note what runs when, from the next job on. Costs a few hundred bytes per job until it is taken.
  void set_tracing(bool on);
  /// What was noted since it was last taken; waits for the jobs of the step.
  std::vector<TraceEvent> take_trace();
  /// Waits for the jobs of the step. The reference is good until the next call of the reducer.
  const Residual& residual();

  /// State as of the end of the last step, and back. Between steps only.
  /// Errors of load: those of Residual::load; then nothing is changed.
  ReducerState state();
  void load(const ReducerState& state);
  /// Replaces one parameter's velocity, for a momentum buffer that an optimizer brings along. Before the first step.
  void set_velocity(const std::string& name, std::span<const float> velocity);

  /// Waits for the jobs in the queue and stops the thread; further jobs throw. Idempotent.
  void close();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace thinwire
