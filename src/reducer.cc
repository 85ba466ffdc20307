// The spine: a gradient's way from backward to the mean. Everything here happens in the order in which it stands.
#include "thinwire/reducer.h"

#include <set>
#include <thread>
#include <utility>

#include "core/check.h"
#include "core/lane.h"
#include "reducer/held_jobs.h"
#include "reducer/job.h"
#include "reducer/work.h"

namespace thinwire {

struct Reducer::Impl {
  Impl(ReducerOptions options, const std::vector<Parameter>& parameters, Communicator& communicator)
      : pipeline(std::move(options), parameters, communicator) {}

  // One bucket, on the lane.
  void run(Job& job) {
    pipeline.address(job);
    if (unannounced && !job.failure) job.failure = unannounced;
    std::span<const std::byte> block;
    if (!job.failure) {
      try {
        pipeline.prepare(job);
        pipeline.plan(job);
        pipeline.accumulate_and_select(job);
        block = pipeline.encode_and_settle(job);
      } catch (...) {
        job.failure = std::current_exception();
        pipeline.give_back(job);
      }
    }
    const std::span<const std::byte> blocks = pipeline.exchange(job, block);
    const std::vector<Payload> payloads = pipeline.validate_all(job, blocks);
    pipeline.decode(job, payloads);
    pipeline.reduce_dense(job);
    pipeline.finish(job, payloads);
  }

  // The same, with what becomes of errors.
  void run_or_fail(Job& job) {
    std::exception_ptr error = dead;
    if (!error) {
      try {
        run(job);
      } catch (const Error& e) {
        error = std::current_exception();
        // A payload refused here is known here alone: the others learn it from this rank's next block.
        if (e.code() == ErrorCode::corrupt_payload && !unannounced)
          fail_step(error, unannounced);
        else
          die(error, e.what());
      } catch (const std::exception& e) {
        error = std::current_exception();
        die(error, e.what());
      }
    }
    job.work->finish(error);
    if (job.on_done) job.on_done(error);
  }

  void fail_step(const std::exception_ptr& error, std::exception_ptr& kept) {
    kept = error;
    pipeline.undo_step();
  }

  void die(const std::exception_ptr& error, const char* reason) {
    fail_step(error, dead);
    pipeline.communicator.abort(reason);
  }

  std::shared_ptr<Work::State> submit(Job from) {
    const auto job = std::make_shared<Job>(std::move(from));
    job->work = std::make_shared<Work::State>(waited_ns);
    job->number = jobs++;
    job->given = std::chrono::steady_clock::now();
    if (!in_step && !job->failure)
      job->failure = std::make_exception_ptr(Error(ErrorCode::invalid_argument, "reduce was called before begin_step"));
    if (held.holding())
      hold(job);
    else
      enqueue(job);
    return job->work;
  }

  void enqueue(const std::shared_ptr<Job>& job) {
    if (lane.submit([this, job] { run_or_fail(*job); })) return;
    const auto closed = std::make_exception_ptr(Error(ErrorCode::invalid_argument, "the reducer is closed"));
    job->work->finish(closed);
    if (job->on_done) job->on_done(closed);
  }

  // Under local clipping: measures the job's gradient, and keeps the job until the whole gradient is there.
  void hold(const std::shared_ptr<Job>& job) {
    held.add(job);
    // The thread that gives the jobs will give no more while it waits. Another one that waits says nothing.
    job->work->before_wait = [this, caller = std::this_thread::get_id()] {
      if (std::this_thread::get_id() == caller) end_holding();
    };
    const std::exception_ptr failure = job->failure;  // from here on it is the lane's
    lane.submit([this, job] { pipeline.measure(*job); });
    if (failure) fail_held(failure);
    if (held.complete()) release_held();
  }

  void release_held() {
    lane.submit([this, seconds = held.seconds()] { pipeline.clip(seconds); });
    for (const std::shared_ptr<Job>& job : held.release()) enqueue(job);
  }

  // What has come is a part of the gradient, whose norm says nothing.
  void fail_held(const std::exception_ptr& failure) {
    lane.submit([jobs = held.jobs(), failure] {
      for (const std::shared_ptr<Job>& job : jobs) job->failure = failure;
    });
  }

  // Somebody waits, and the rest of the gradient has not come.
  void end_holding() {
    if (held.empty()) return;
    fail_held(std::make_exception_ptr(Error(
        ErrorCode::invalid_argument, "clip_norm needs the gradients of all parameters before the first is sent, but " +
                                         quoted(held.missing()) + " was not reduced in this step")));
    release_held();
  }

  // Until no job is left.
  void wait_idle() {
    end_holding();
    lane.wait_idle();
  }

  // Of the finished step, before its results are looked at.
  void settle() {
    wait_idle();
    if (dead) std::rethrow_exception(dead);
    pipeline.settle_step();
  }

  Pipeline pipeline;
  std::exception_ptr unannounced;  // this rank has failed and the others do not know yet
  std::exception_ptr dead;         // every rank knows, or cannot be told
  // Of the calling thread:
  std::uint64_t step = 0;
  bool in_step = false;
  std::uint32_t jobs = 0;
  HeldJobs held;
  std::shared_ptr<std::atomic<std::int64_t>> waited_ns = std::make_shared<std::atomic<std::int64_t>>(0);
  Lane lane;  // last: its thread ends first
};

Reducer::Reducer(ReducerOptions options, const std::vector<Parameter>& parameters, Communicator& communicator)
    : impl_(std::make_unique<Impl>(std::move(options), parameters, communicator)) {}

Reducer::~Reducer() { close(); }

void Reducer::begin_step(StepMode mode) {
  impl_->settle();
  if (impl_->in_step) ++impl_->step;
  impl_->in_step = true;
  impl_->jobs = 0;
  impl_->waited_ns = std::make_shared<std::atomic<std::int64_t>>(0);
  impl_->held.begin_step(impl_->pipeline.clips(mode) ? impl_->pipeline.names() : std::set<std::string>{});
  impl_->pipeline.begin_step(impl_->step, mode);
}

Work Reducer::reduce(Bucket bucket, GradientView gradient, OnDone on_done, Prepare prepare) {
  Job job;
  job.bucket = std::move(bucket);
  job.gradient = gradient;
  job.on_done = std::move(on_done);
  job.prepare = std::move(prepare);
  return Work(impl_->submit(std::move(job)));
}

Work Reducer::fail(const std::string& reason, OnDone on_done) {
  Job job;
  job.failure = std::make_exception_ptr(Error(ErrorCode::invalid_argument, reason));
  job.on_done = std::move(on_done);
  return Work(impl_->submit(std::move(job)));
}

void Reducer::undo_step() {
  impl_->settle();
  impl_->pipeline.undo_step();
}

std::uint64_t Reducer::step() const noexcept { return impl_->step; }

const ReducerOptions& Reducer::options() const noexcept { return impl_->pipeline.options; }

StepStats Reducer::stats() {
  impl_->wait_idle();
  StepStats stats = impl_->pipeline.stats;
  stats.exposed_wait_seconds = static_cast<double>(impl_->waited_ns->load()) * 1e-9;
  return stats;
}

void Reducer::set_tracing(bool on) {
  impl_->wait_idle();
  impl_->pipeline.tracing = on;
}

std::vector<TraceEvent> Reducer::take_trace() {
  impl_->wait_idle();
  return std::exchange(impl_->pipeline.trace, {});
}

const Residual& Reducer::residual() {
  impl_->wait_idle();
  impl_->pipeline.settle_step();
  return impl_->pipeline.residual;
}

ReducerState Reducer::state() {
  impl_->wait_idle();
  impl_->pipeline.settle_step();
  ReducerState state{.step = impl_->step + (impl_->in_step ? 1 : 0),
                     .parameters = impl_->pipeline.residual.state(),
                     .selections = impl_->pipeline.selections};
  std::erase_if(state.selections, [](const auto& unit) { return unit.second.uses == 0; });
  return state;
}

void Reducer::load(const ReducerState& state) {
  impl_->settle();
  for (const auto& [unit, memory] : state.selections)
    require(memory.ratio >= 0 && memory.ratio <= 1,
            "the ratio of unit " + quoted(unit) + " is " + std::to_string(memory.ratio) + ", not in [0, 1]");
  impl_->pipeline.load(state);
  impl_->step = state.step;
  impl_->in_step = false;
}

void Reducer::set_velocity(const std::string& name, std::span<const float> velocity) {
  impl_->settle();
  impl_->pipeline.residual.set_velocity(name, velocity);
}

void Reducer::close() {
  impl_->end_holding();
  impl_->lane.close();
  if (impl_->unannounced && !impl_->dead) impl_->pipeline.communicator.abort("it refused a payload");
}

}  // namespace thinwire
