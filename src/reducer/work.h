// What a caller's Work handle and the reducer's thread share about one job.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "thinwire/reducer.h"

namespace thinwire {

struct Work::State {
  explicit State(std::shared_ptr<std::atomic<std::int64_t>> waited) : waited_ns(std::move(waited)) {}

  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  std::exception_ptr error;
  std::shared_ptr<std::atomic<std::int64_t>> waited_ns;  // of the step
  std::function<void()> before_wait;                     // of a job that is held back: lets it go

  void finish(std::exception_ptr with) {
    const std::lock_guard lock(mutex);
    error = std::move(with);
    done = true;
    changed.notify_all();
  }
};

}  // namespace thinwire
