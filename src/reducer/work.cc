#include "reducer/work.h"

#include <chrono>

#include "core/check.h"

namespace thinwire {

void Work::wait() {
  require(state_ != nullptr, "this Work belongs to no job");
  const auto start = std::chrono::steady_clock::now();
  if (state_->before_wait && !done()) state_->before_wait();
  std::unique_lock lock(state_->mutex);
  state_->changed.wait(lock, [this] { return state_->done; });
  *state_->waited_ns +=
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start).count();
  if (state_->error) std::rethrow_exception(state_->error);
}

bool Work::done() const noexcept {
  if (state_ == nullptr) return false;
  const std::lock_guard lock(state_->mutex);
  return state_->done;
}

}  // namespace thinwire
