#include "core/lane.h"

#include <unistd.h>

#include <utility>

namespace thinwire {

Lane::Lane()
    : owner_(::getpid()), queue_(std::make_unique<Queue>()), thread_([queue = queue_.get()] { run(*queue); }) {}

Lane::~Lane() { close(); }

bool Lane::submit(std::function<void()> job) {
  if (::getpid() != owner_) return false;
  const std::lock_guard lock(queue_->mutex);
  if (queue_->closed) return false;
  queue_->jobs.push_back(std::move(job));
  queue_->changed.notify_all();
  return true;
}

void Lane::wait_idle() {
  if (::getpid() != owner_) return;
  std::unique_lock lock(queue_->mutex);
  queue_->changed.wait(lock, [this] { return queue_->jobs.empty() && !queue_->running; });
}

void Lane::close() {
  if (::getpid() != owner_) {
    if (thread_.joinable()) thread_.detach();
    static_cast<void>(queue_.release());
    owner_ = ::getpid();
    queue_ = std::make_unique<Queue>();
    queue_->closed = true;
    return;
  }
  {
    const std::lock_guard lock(queue_->mutex);
    queue_->closed = true;
    queue_->changed.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void Lane::run(Queue& queue) {
  std::unique_lock lock(queue.mutex);
  for (;;) {
    queue.changed.wait(lock, [&] { return !queue.jobs.empty() || queue.closed; });
    if (queue.jobs.empty()) return;
    std::function<void()> job = std::move(queue.jobs.front());
    queue.jobs.pop_front();
    queue.running = true;
    lock.unlock();
    job();
    job = nullptr;  // what it holds is let go before the lane counts as idle
    lock.lock();
    queue.running = false;
    queue.changed.notify_all();
  }
}

}  // namespace thinwire
