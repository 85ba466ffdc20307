// The stages of one job. src/reducer.cc calls them in order.
#include "reducer/job.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <limits>
#include <new>
#include <utility>

#include "codec/wire.h"
#include "core/check.h"
#include "core/float16.h"
#include "core/hash.h"
#include "core/magnitude.h"
#include "core/text.h"

namespace thinwire {
namespace {

std::string dense_reason(const ReducerOptions& options, std::uint64_t step, StepMode mode, int ranks) {
  if (mode == StepMode::dense) return "a dense step was asked for";
  if (mode == StepMode::flush) return "a flush was asked for";
  if (options.all_reduce == SparseAllReduce::dense) return "the options ask for dense steps";
  if (ranks == 1) return "with one rank there is nothing to compress";
  if (step < options.schedule.dense_steps)
    return "dense warm-up until step " + std::to_string(options.schedule.dense_steps);
  return {};
}

// Errors: invalid_argument for a gradient that cannot be read, or is not that of its bucket.
void check_gradient(const Job& job) {
  const GradientView& gradient = job.gradient;
  require(gradient.device.type == DeviceType::cpu, "the gradient lies on a CUDA device, which this build cannot read");
  require(gradient.dtype == DType::f32 || gradient.dtype == DType::f16 || gradient.dtype == DType::bf16,
          "the gradient's dtype is none of f32, f16, bf16");
  const std::size_t expected = numel(job.bucket);
  require(gradient.numel == expected, "the gradient has " + std::to_string(gradient.numel) +
                                          " elements, the slices of its bucket have " + std::to_string(expected));
  require(expected < kEmptySlot, "a bucket holds fewer than 4294967295 elements, not " + std::to_string(expected));
  require(gradient.data != nullptr || expected == 0, "the gradient has no memory");
  int exponent = 0;
  require(std::isnormal(gradient.loss_scale) && std::frexp(gradient.loss_scale, &exponent) == 0.5f,
          "the loss scale is " + text_of(gradient.loss_scale) + ", expected a power of two");
}

// Of the finite entries: the others do not get into the residual.
double gradient_squares(const GradientView& gradient) {
  double sum = 0;
  std::array<float, kBlock> block;
  for (std::size_t begin = 0; begin < gradient.numel; begin += kBlock) {
    const std::size_t count = std::min(kBlock, gradient.numel - begin);
    load_gradient(gradient, begin, count, block.data());
    for (std::size_t i = 0; i < count; ++i)
      if (!std::isfinite(block[i])) block[i] = 0.0f;
    sum += sum_of_squares(block.data(), count);
  }
  return sum;
}

// A NaN at bucket offset `offset`.
void write_nan(const GradientView& gradient, std::uint32_t offset) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  store_gradient(gradient, offset, 1, &nan);
}

}  // namespace

// Adds the life time of the object to a sum of seconds, and to the trace.
class Pipeline::Timer {
 public:
  using Clock = std::chrono::steady_clock;

  Timer(Pipeline& pipeline, const Job& job, const char* stage, double& seconds)
      : pipeline_(pipeline), job_(job), stage_(stage), seconds_(seconds), start_(Clock::now()) {}
  ~Timer() {
    const Clock::time_point end = Clock::now();
    seconds_ += std::chrono::duration<double>(end - start_).count();
    if (pipeline_.tracing) pipeline_.note(job_, stage_, start_, end);
  }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

 private:
  Pipeline& pipeline_;
  const Job& job_;
  const char* stage_;
  double& seconds_;
  Clock::time_point start_;
};

void Pipeline::note(const Job& job, const char* what, std::chrono::steady_clock::time_point begin,
                    std::chrono::steady_clock::time_point end) noexcept {
  const auto ns = [](auto time) {
    return std::int64_t{std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count()};
  };
  try {
    trace.push_back({.name = what,
                     .lane = "bucket " + std::to_string(job.number),
                     .step = step_.step,
                     .begin_ns = ns(begin),
                     .end_ns = ns(end)});
  } catch (const std::bad_alloc&) {  // a trace with a gap does no harm
  }
}

Pipeline::Pipeline(ReducerOptions from, const std::vector<Parameter>& parameters, Communicator& to)
    : options(std::move(from)), communicator(to), protocol_(to) {
  validate(options);
  words_ = to_string(options);
  for (const Parameter& parameter : parameters) {
    require(!policies_.contains(parameter.name), "parameter " + quoted(parameter.name) + " is given twice");
    const ParameterPolicy policy = policy_of(parameter, options);
    residual.add(parameter, policy.momentum);
    policies_.emplace(parameter.name, policy);
    words_ += "parameter " + quoted(parameter.name) + " of " + std::to_string(parameter.numel) + " elements\n";
  }
  options_hash_ = text_hash(words_);
}

void Pipeline::begin_step(std::uint64_t step, StepMode mode) {
  settle_step();
  residual.commit();
  selections_before_ = selections;
  const double residual_norm = stats.residual_norm;
  const double gradient_norm = stats.gradient_norm;
  stats = {};
  stats.step = step;
  stats.residual_norm = residual_norm;
  stats.gradient_norm = gradient_norm;
  stats.reason = dense_reason(options, step, mode, communicator.size());
  reduced_.clear();
  step_ = {.step = step, .dense = !stats.reason.empty()};
  mode_ = mode;
  clip_squares_ = 0;
  if (!step_.dense) stats.reason = "no parameter is large enough to be compressed";
  norms_ = step % StepStats::kNormInterval == 0;
  residual_squares_ = gradient_squares_ = 0;
}

void Pipeline::address(Job& job) {
  if (tracing) note(job, "queued", job.given, std::chrono::steady_clock::now());
  job.header.step = step_.step;
  job.header.job = job.number;
  job.header.options_hash = options_hash_;
}

void Pipeline::undo_step() noexcept {
  residual.undo();
  for (auto& [unit, memory] : selections) {
    const auto before = selections_before_.find(unit);
    memory = before == selections_before_.end() ? SelectionMemory{} : before->second;
  }
}

void Pipeline::load(const ReducerState& state) {
  residual.load(state.parameters);
  selections = selections_before_ = state.selections;
}

std::set<std::string> Pipeline::names() const {
  std::set<std::string> names;
  for (const auto& [name, policy] : policies_) names.insert(name);
  return names;
}

void Pipeline::measure(Job& job) {
  if (job.failure) return;
  try {
    prepare(job);
    check_gradient(job);
  } catch (...) {
    job.failure = std::current_exception();
    return;
  }
  const Timer timer(*this, job, "measure", stats.select_seconds);
  clip_squares_ += gradient_squares(job.gradient);
}

void Pipeline::clip(double waited_seconds) {
  const double norm = std::sqrt(clip_squares_);
  const double limit = double{options.clip_norm} * std::sqrt(static_cast<double>(communicator.size()));
  if (norm > limit) stats.clip_factor = static_cast<float>(limit / norm);
  stats.clip_wait_seconds = waited_seconds;
}

void Pipeline::prepare(Job& job) {
  if (const Reducer::Prepare prepare = std::exchange(job.prepare, {})) prepare(job.gradient);
}

void Pipeline::plan(Job& job) {
  check_gradient(job);
  job.gradient.clip = static_cast<float>(stats.clip_factor);
  for (const BucketSlice& slice : job.bucket.slices) {
    require(policies_.contains(slice.name), "unknown parameter " + quoted(slice.name));
    require(reduced_.insert(slice.name).second, "parameter " + quoted(slice.name) + " is reduced twice in one step");
    job.has_gradient.push_back(slice.has_gradient || mode_ == StepMode::flush);
  }
  job.plan = plan_bucket(job.bucket, residual, policies_, options, step_, communicator.size());
  job.header.slices = static_cast<std::uint32_t>(job.bucket.slices.size());
  job.header.layout_hash = text_hash(job.plan.layout);
  job.header.block_bytes = job.plan.block_bytes;
}

void Pipeline::accumulate_and_select(Job& job) {
  const Timer timer(*this, job, "accumulate and select", stats.select_seconds);
  const bool flush = mode_ == StepMode::flush;
  std::optional<std::uint32_t>& non_finite = job.header.non_finite;
  const auto note = [&non_finite](std::optional<std::uint32_t> offset) {
    if (offset && (!non_finite || *offset < *non_finite)) non_finite = offset;
  };
  for (std::size_t i = 0; i < job.plan.segments.size(); ++i)
    if (!job.has_gradient[i]) residual.remember(job.plan.segments[i]);
  for (const std::size_t slice : job.plan.dense_slices)
    if (!flush) note(Residual::accumulate({&job.plan.segments[slice], 1}, job.gradient));
  if (selected_.size() < job.plan.units.size()) selected_.resize(job.plan.units.size());
  if (taken_.size() < job.plan.units.size()) taken_.resize(job.plan.units.size());
  for (std::size_t i = 0; i < job.plan.units.size(); ++i) {
    const UnitPlan& unit = job.plan.units[i];
    note(thinwire::accumulate_and_select(unit.selector, unit.segments, job.gradient,
                                         unit_seed(options.seed, step_.step, unit.name), options.momentum_masking,
                                         selection_, selected_[i], taken_[i], unit.side, &selections[unit.name]));
    stats.fallbacks += selection_.fallbacks();
  }
  if (norms_ && !flush) gradient_squares_ += gradient_squares(job.gradient);
}

std::span<const std::byte> Pipeline::encode_and_settle(Job& job) {
  const Timer timer(*this, job, "encode", stats.encode_seconds);
  if (dense_values_.size() <= job.number) dense_values_.resize(job.number + 1);
  std::vector<float>& dense = dense_values_[job.number];
  dense.resize(job.plan.dense_numel);
  std::size_t at = 0;
  for (const std::size_t slice : job.plan.dense_slices) {
    const std::size_t count = job.bucket.slices[slice].numel;
    residual.settle_dense(job.plan.segments[slice], std::span(dense).subspan(at, count));
    at += count;
  }
  std::vector<Section> sections;
  at = 0;
  if (job.plan.dense_in_payload)
    for (const DenseRun& run : job.plan.dense_runs) {
      sections.emplace_back(DenseSection{.begin = run.begin, .values = std::span(dense).subspan(at, run.numel)});
      at += run.numel;
    }
  for (std::size_t i = 0; i < job.plan.units.size(); ++i) {
    const UnitPlan& unit = job.plan.units[i];
    SparseGradient& sent = selected_[i];
    round_values(unit.values, sent.values);
    sections.emplace_back(SparseSection{.begin = unit.begin,
                                        .extent = unit.extent,
                                        .hashed_order = sent.hashed_order,
                                        .hash_seed = sent.hash_seed,
                                        .indices = sent.indices,
                                        .values = sent.values,
                                        .coding = unit.values});
  }
  block_.resize(job.plan.block_bytes);
  encode(options.codec, job.header, job.has_gradient, sections, block_);
  for (std::size_t i = 0; i < job.plan.units.size(); ++i) {
    residual.settle(job.plan.units[i].segments, selected_[i], options.momentum_masking, std::move(taken_[i]),
                    options.rounding_feedback);
    stats.entries_sent += static_cast<std::uint64_t>(
        selected_[i].hashed_order ? std::count_if(selected_[i].indices.begin(), selected_[i].indices.end(),
                                                  [](std::uint32_t index) { return index != kEmptySlot; })
                                  : static_cast<std::ptrdiff_t>(selected_[i].nnz()));
  }
  return block_;
}

void Pipeline::give_back(const Job& job) noexcept {
  for (std::size_t i = 0; i < std::min(job.plan.units.size(), taken_.size()); ++i) {
    Residual::put_back(job.plan.units[i].segments, taken_[i], options.momentum_masking);
    taken_[i].count = 0;
  }
}

std::span<const std::byte> Pipeline::exchange(Job& job, std::span<const std::byte> block) {
  const Timer timer(*this, job, "exchange", stats.exchange_seconds);
  const Communicator::Traffic before = communicator.traffic();
  const std::span<const std::byte> blocks = protocol_.exchange(
      {.header = job.header, .block = block, .failure = job.failure, .options = &words_, .layout = &job.plan.layout});
  count_traffic(before, false);
  return blocks;
}

std::vector<Payload> Pipeline::validate_all(const Job& job, std::span<const std::byte> blocks) {
  const Timer timer(*this, job, "decode", stats.decode_seconds);
  std::vector<Payload> payloads;
  const std::size_t block = job.plan.block_bytes;
  for (std::size_t r = 0; r * block < blocks.size(); ++r) {
    try {
      payloads.push_back(validate(protocol_.headers()[r], blocks.subspan(r * block, block), job.gradient.numel));
      if (payloads.back().header.flags != 0)
        throw Error(ErrorCode::corrupt_payload, "a header alone where a payload was due", wire::kFlags);
    } catch (const Error& error) {
      throw Error(error.code(), "from rank " + std::to_string(r) + ": " + error.what(), error.position());
    }
  }
  return payloads;
}

void Pipeline::decode(Job& job, const std::vector<Payload>& payloads) {
  // Without units and dense sections every element comes from the dense all-reduce.
  if (!job.plan.units.empty() || job.plan.dense_in_payload) {
    const Timer timer(*this, job, "decode", stats.decode_seconds);
    if (!decode_mean(payloads, job.gradient)) stats.non_finite = true;
  }
}

void Pipeline::reduce_dense(Job& job) {
  if (job.plan.dense_in_payload || job.plan.dense_numel == 0) return;
  const std::vector<float>& mine = dense_values_[job.number];
  const bool in_place = job.gradient.dtype == DType::f32 && job.plan.dense_numel == job.gradient.numel;
  if (!in_place) dense_mean_.resize(mine.size());
  const std::span<float> mean =
      in_place ? std::span(static_cast<float*>(job.gradient.data), job.gradient.numel) : std::span(dense_mean_);
  const Communicator::Traffic before = communicator.traffic();
  {
    const Timer timer(*this, job, "exchange", stats.exchange_seconds);
    dense_mean(communicator, mine, mean);
  }
  count_traffic(before, !step_.dense);
  const Timer timer(*this, job, "decode", stats.decode_seconds);
  std::size_t at = 0;
  for (const DenseRun& run : job.plan.dense_runs) {
    if (!store_gradient(job.gradient, run.begin, run.numel, mean.data() + at)) stats.non_finite = true;
    at += run.numel;
  }
}

void Pipeline::finish(Job& job, const std::vector<Payload>& payloads) {
  std::vector<float> zeros;
  for (std::size_t i = 0; i < job.plan.segments.size(); ++i) {
    const auto has = [i](const Payload& payload) { return payload.has_gradient[i]; };
    if (std::any_of(payloads.begin(), payloads.end(), has)) continue;
    residual.restore(job.plan.segments[i]);
    for (const UnitPlan& unit : job.plan.units)
      if (unit.segments.size() == 1 && unit.segments[0].state == job.plan.segments[i].state)
        selections[unit.name] = selections_before_[unit.name];
    zeros.assign(job.bucket.slices[i].numel, 0.0f);
    store_gradient(job.gradient, job.plan.segments[i].offset, zeros.size(), zeros.data());
  }
  for (const Payload& payload : payloads) {
    if (!payload.header.non_finite) continue;
    write_nan(job.gradient, *payload.header.non_finite);
    stats.non_finite = true;
  }
  const auto ranks = static_cast<std::uint64_t>(communicator.size());
  stats.dense_bytes += 2 * (ranks - 1) * 4 * job.gradient.numel / ranks;
  if (job.plan.dense_in_payload) stats.small_bytes_sent += (ranks - 1) * 4 * job.plan.dense_numel;
  ++stats.jobs;
  stats.sparse_numel += job.plan.sparse_numel;
  stats.dense = stats.sparse_numel == 0;
  stats.active = stats.sparse_numel != 0;
  stats.density = stats.dense ? 1.0 : static_cast<double>(stats.entries_sent) / static_cast<double>(stats.sparse_numel);
  if (stats.active)
    stats.reason = std::to_string(stats.entries_sent) + " of " + std::to_string(stats.sparse_numel) +
                   " elements of the compressed parameters were sent";
  if (norms_) add_norms(job);
}

void Pipeline::count_traffic(const Communicator::Traffic& before, bool small) {
  const Communicator::Traffic now = communicator.traffic();
  stats.calls += now.calls - before.calls;
  stats.bytes_sent += now.bytes_sent - before.bytes_sent;
  stats.bytes_received += now.bytes_received - before.bytes_received;
  if (small) stats.small_bytes_sent += now.bytes_sent - before.bytes_sent;
}

void Pipeline::add_norms(const Job& job) {
  for (const Residual::Segment& segment : job.plan.segments) {
    const UnitSegment v = Residual::view(segment);
    residual_squares_ += sum_of_squares(v.values, v.numel);
  }
  stats.residual_norm = std::sqrt(residual_squares_);
  stats.gradient_norm = std::sqrt(gradient_squares_);
}

}  // namespace thinwire
