// One bucket on its way through the stages, and what the reducer keeps from job to job.
#pragma once

#include <chrono>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "all_reduce/block_protocol.h"
#include "reducer/bucket_plan.h"
#include "thinwire/reducer.h"

namespace thinwire {

struct Job {
  std::uint32_t number = 0;  // within the step
  Bucket bucket;
  GradientView gradient;
  std::exception_ptr failure;  // the job cannot be reduced
  Reducer::OnDone on_done;
  Reducer::Prepare prepare;
  std::chrono::steady_clock::time_point given;
  std::shared_ptr<Work::State> work;
  // Filled on the way:
  BucketPlan plan;
  PayloadHeader header;
  std::vector<bool> has_gradient;
};

/// The stages as the reducer's thread runs them, with the state they share. One step at a time.
class Pipeline {
 public:
  Pipeline(ReducerOptions options, const std::vector<Parameter>& parameters, Communicator& communicator);

  /// Steps, called while no job runs.
  void begin_step(std::uint64_t step, StepMode mode);
  void undo_step() noexcept;
  /// Errors: those of Residual::load; then nothing is changed. There is no step to undo afterwards.
  void load(const ReducerState& state);
  /// What a finished step leaves: the sends of a step with a non-finite gradient are taken back.
  void settle_step() noexcept {
    if (stats.non_finite) undo_step();
  }

  // Local clipping needs the whole gradient: each job's is measured when it comes, and the stages wait for the last.
  bool clips(StepMode mode) const noexcept { return options.clip_norm > 0 && mode != StepMode::flush; }
  std::set<std::string> names() const;  ///< of the parameters
  void measure(Job& job);
  void clip(double waited_seconds);  ///< all jobs of the step have been measured, or one fails and the step with it

  // The stages of one job, in order.
  void address(Job& job);  ///< what even a failed job must say: step, number, options
  void prepare(Job& job);
  void plan(Job& job);
  void accumulate_and_select(Job& job);
  std::span<const std::byte> encode_and_settle(Job& job);
  void give_back(const Job& job) noexcept;  ///< after a failure before `exchange`: what was taken out and not settled
  std::span<const std::byte> exchange(Job& job, std::span<const std::byte> block);
  std::vector<Payload> validate_all(const Job& job, std::span<const std::byte> blocks);
  void decode(Job& job, const std::vector<Payload>& payloads);
  void reduce_dense(Job& job);
  void finish(Job& job, const std::vector<Payload>& payloads);

  ReducerOptions options;
  Communicator& communicator;
  Residual residual;
  std::map<std::string, SelectionMemory> selections;  ///< what selections leave for the next of their unit, by its name
  StepStats stats;
  std::vector<TraceEvent> trace;
  bool tracing = false;

 private:
  class Timer;
  void note(const Job& job, const char* what, std::chrono::steady_clock::time_point begin,
            std::chrono::steady_clock::time_point end) noexcept;
  void count_traffic(const Communicator::Traffic& before, bool small);
  void add_norms(const Job& job);

  std::unordered_map<std::string, ParameterPolicy> policies_;
  std::unordered_set<std::string> reduced_;  // parameters, in this step
  std::string words_;                        // options and parameters, compared between ranks
  std::uint64_t options_hash_ = 0;
  BlockProtocol protocol_;
  Selection selection_;
  // Of the job that runs, one per unit at least; their memory is kept:
  std::vector<SparseGradient> selected_;
  std::vector<TakenEntries> taken_;
  std::vector<std::byte> block_;
  std::vector<std::vector<float>> dense_values_;  // by job of the step: sent whole; also the undo copy
  std::vector<float> dense_mean_;
  std::map<std::string, SelectionMemory> selections_before_;  // the step
  StepPlan step_;
  StepMode mode_ = StepMode::scheduled;
  double clip_squares_ = 0;
  bool norms_ = false;  // this step refreshes the norms
  double residual_squares_ = 0;
  double gradient_squares_ = 0;
};

}  // namespace thinwire
