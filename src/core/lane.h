// A thread that runs jobs strictly one after the other, in the order they were given.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace thinwire {

class Lane {
 public:
  Lane();
  /// Runs what is queued, then ends.
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  /// Jobs must not throw. False if the lane is closed: the job is not taken.
  bool submit(std::function<void()> job);
  /// Returns when every job submitted before has run. Not from a job.
  void wait_idle();
  /// Runs what is queued, then ends the thread. In a forked child, where the thread does not exist, only lets go of it.
  void close();

 private:
  // On the heap, since a forked child must leak it: its mutex may be held there for ever.
  struct Queue {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::function<void()>> jobs;
    bool running = false;
    bool closed = false;
  };
  static void run(Queue& queue);

  long owner_ = 0;  // process
  std::unique_ptr<Queue> queue_;
  std::thread thread_;
};

}  // namespace thinwire
