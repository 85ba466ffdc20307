// Ranks as threads of one process. A collective is: post what you have, wait for all, copy from the others, wait for all.
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <optional>

#include "core/check.h"
#include "thinwire/communicator.h"

namespace thinwire {
namespace {

enum class Operation { all_gather, all_to_all, all_reduce, barrier };

const char* to_string(Operation operation) {
  switch (operation) {
    case Operation::all_gather:
      return "all_gather";
    case Operation::all_to_all:
      return "all_to_all";
    case Operation::all_reduce:
      return "all_reduce";
    case Operation::barrier:
      return "barrier";
  }
  return "unknown";
}

struct Post {
  Operation operation = Operation::barrier;
  const std::byte* sent = nullptr;
  float* received = nullptr;  // of all_reduce
  std::size_t bytes = 0;      // of a block; of the whole array in all_reduce
};

// What the threads of one world share.
class World {
 public:
  World(int ranks, std::chrono::milliseconds timeout)
      : timeout_(timeout), posts_(static_cast<std::size_t>(ranks)), present_(static_cast<std::size_t>(ranks)) {}

  int size() const { return static_cast<int>(posts_.size()); }

  // Posts, and returns when everybody has posted the same operation. Throws what makes the world dead. Once it has
  // returned on one rank it returns on all, so what was posted stays readable until `leave`.
  void meet(int rank, const Post& post) {
    std::unique_lock lock(mutex_);
    throw_if_dead();
    posts_[static_cast<std::size_t>(rank)] = post;
    present_[static_cast<std::size_t>(rank)] = true;
    const std::uint64_t generation = generation_;
    if (arrive([this] { compare_posts(); })) {
      present_.assign(present_.size(), false);
    } else if (!changed_.wait_for(lock, timeout_, [&] { return generation_ != generation || error_.has_value(); })) {
      die(ErrorCode::timeout, std::string(to_string(post.operation)) + ": " + missing_ranks() +
                                  " did not come within " + std::to_string(timeout_.count()) + " ms");
    }
    if (generation_ == generation || mismatch_) throw_if_dead();
  }

  // Returns when everybody is done with what was posted. Needs no time-out: the others are copying memory.
  void leave() {
    std::unique_lock lock(mutex_);
    const std::uint64_t generation = generation_;
    if (!arrive([] {})) changed_.wait(lock, [&] { return generation_ != generation; });
  }

  const Post& post(int rank) const { return posts_[static_cast<std::size_t>(rank)]; }

  void abort(int rank, const std::string& reason) {
    const std::lock_guard lock(mutex_);
    die(ErrorCode::remote, "rank " + std::to_string(rank) + " aborted: " + reason);
  }

 private:
  // True for the last of the ranks; it has then run `complete` and let the others go.
  template <class F>
  bool arrive(const F& complete) {
    if (++arrived_ < posts_.size()) return false;
    complete();
    arrived_ = 0;
    ++generation_;
    changed_.notify_all();
    return true;
  }

  void compare_posts() {
    const Post& first = posts_.front();
    for (std::size_t r = 1; r < posts_.size() && !mismatch_; ++r) {
      mismatch_ = posts_[r].operation != first.operation || posts_[r].bytes != first.bytes;
      if (posts_[r].operation != first.operation)
        die(ErrorCode::remote, "rank " + std::to_string(r) + " calls " + to_string(posts_[r].operation) +
                                   " where rank 0 calls " + to_string(first.operation));
      else if (mismatch_)
        die(ErrorCode::remote, std::string(to_string(first.operation)) + ": rank " + std::to_string(r) +
                                   " comes with " + std::to_string(posts_[r].bytes) + " bytes, rank 0 with " +
                                   std::to_string(first.bytes));
    }
  }

  std::string missing_ranks() const {
    std::string missing;
    for (std::size_t r = 0; r < present_.size(); ++r)
      if (!present_[r]) missing += (missing.empty() ? "rank " : ", ") + std::to_string(r);
    return missing;
  }

  void die(ErrorCode code, const std::string& sentence) {
    if (!error_) error_.emplace(code, sentence);
    changed_.notify_all();
  }

  void throw_if_dead() const {
    if (error_) throw Error(*error_);
  }

  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Post> posts_;
  std::vector<bool> present_;
  std::size_t arrived_ = 0;
  std::uint64_t generation_ = 0;
  bool mismatch_ = false;
  std::optional<Error> error_;
};

class ThreadCommunicator final : public Communicator {
 public:
  ThreadCommunicator(std::shared_ptr<World> world, int rank) : world_(std::move(world)), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return world_->size(); }
  void abort(const std::string& reason) noexcept override { world_->abort(rank_, reason); }

 protected:
  void do_all_gather(std::span<const std::byte> block, std::span<std::byte> blocks) override {
    world_->meet(rank_, {.operation = Operation::all_gather, .sent = block.data(), .bytes = block.size()});
    for (int r = 0; r < size(); ++r)
      std::memcpy(blocks.data() + static_cast<std::size_t>(r) * block.size(), world_->post(r).sent, block.size());
    world_->leave();
  }

  void do_all_to_all(std::span<const std::byte> sent, std::span<std::byte> received) override {
    const std::size_t block = sent.size() / static_cast<std::size_t>(size());
    world_->meet(rank_, {.operation = Operation::all_to_all, .sent = sent.data(), .bytes = block});
    for (int r = 0; r < size(); ++r)
      std::memcpy(received.data() + static_cast<std::size_t>(r) * block,
                  world_->post(r).sent + static_cast<std::size_t>(rank_) * block, block);
    world_->leave();
  }

  // Each rank sums its share of the elements, in rank order, and writes it into everybody's result.
  void do_all_reduce(std::span<const float> mine, std::span<float> sum) override {
    world_->meet(rank_, {.operation = Operation::all_reduce,
                         .sent = reinterpret_cast<const std::byte*>(mine.data()),
                         .received = sum.data(),
                         .bytes = mine.size_bytes()});
    const auto ranks = static_cast<std::size_t>(size());
    const std::size_t begin = mine.size() * static_cast<std::size_t>(rank_) / ranks;
    const std::size_t end = mine.size() * (static_cast<std::size_t>(rank_) + 1) / ranks;
    for (std::size_t i = begin; i < end; ++i) {
      float total = 0.0f;
      for (int r = 0; r < size(); ++r) total += reinterpret_cast<const float*>(world_->post(r).sent)[i];
      for (int r = 0; r < size(); ++r) world_->post(r).received[i] = total;
    }
    world_->leave();
  }

  void do_barrier() override {
    world_->meet(rank_, {.operation = Operation::barrier});
    world_->leave();
  }

 private:
  std::shared_ptr<World> world_;
  int rank_;
};

}  // namespace

std::vector<std::unique_ptr<Communicator>> make_thread_communicators(int ranks, std::chrono::milliseconds timeout) {
  require(ranks >= 1, "a world has at least one rank, not " + std::to_string(ranks));
  require(timeout.count() > 0, "the time-out is " + std::to_string(timeout.count()) + " ms, not positive");
  const auto world = std::make_shared<World>(ranks, timeout);
  std::vector<std::unique_ptr<Communicator>> communicators;
  for (int rank = 0; rank < ranks; ++rank) communicators.push_back(std::make_unique<ThreadCommunicator>(world, rank));
  return communicators;
}

}  // namespace thinwire
