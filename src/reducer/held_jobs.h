// Jobs that wait for the rest of the gradient: local clipping needs the norm of all of it.
#pragma once

#include <chrono>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "reducer/job.h"

namespace thinwire {

class HeldJobs {
 public:
  using Jobs = std::vector<std::shared_ptr<Job>>;

  /// A step begins in which jobs are held until all of these parameters have come; none: nothing is held.
  void begin_step(std::set<std::string> parameters) {
    awaited_ = std::move(parameters);
    holding_ = !awaited_.empty();
    failed_ = false;
  }
  bool holding() const noexcept { return holding_; }

  void add(std::shared_ptr<Job> job) {
    if (jobs_.empty()) since_ = std::chrono::steady_clock::now();
    // A parameter that is unknown, or comes twice, fails its job later on.
    failed_ = failed_ || job->failure;
    for (const BucketSlice& slice : job->bucket.slices) failed_ = awaited_.erase(slice.name) == 0 || failed_;
    jobs_.push_back(std::move(job));
  }
  bool empty() const noexcept { return jobs_.empty(); }
  /// True if every parameter has come, or one job has failed and takes the step with it.
  bool complete() const noexcept { return awaited_.empty() || failed_; }
  /// A parameter that has not come. There is one, unless `complete`.
  const std::string& missing() const noexcept { return *awaited_.begin(); }
  /// Since the first one was added.
  double seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - since_).count(); }
  const Jobs& jobs() const noexcept { return jobs_; }

  /// Lets them go; whatever comes later in the step is not held any more.
  Jobs release() {
    holding_ = false;
    return std::exchange(jobs_, {});
  }

 private:
  Jobs jobs_;
  std::set<std::string> awaited_;
  std::chrono::steady_clock::time_point since_;
  bool holding_ = false;
  bool failed_ = false;
};

}  // namespace thinwire
