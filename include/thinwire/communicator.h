// thinwire, stage 4: how bytes reach the other ranks. The only virtual class of the library.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace thinwire {

/// Blocking collectives over `size()` ranks. Every rank calls the same operations in the same order with the same block
/// size, never zero bytes. The public calls check their arguments, count the traffic and forward to the transport; with
/// one rank they only copy.
///
/// Errors of all collectives: invalid_argument for sizes that do not fit; timeout when the others did not come in time;
/// remote when one of them left or aborted; system for what the transport reports. After any of the last three the
/// communicator is dead and every further call throws the same error.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  /// blocks [size][block.size()] receives every rank's block in rank order. Sends (P-1)·block bytes.
  void all_gather(std::span<const std::byte> block, std::span<std::byte> blocks);
  /// Block r of `sent` [size][block] goes to rank r; block r of `received` came from rank r. Sends (P-1)·block bytes.
  void all_to_all(std::span<const std::byte> sent, std::span<std::byte> received);
  /// sum [n] receives the elementwise sum over the ranks, the same bits on all of them. `mine` may be `sum`.
  /// Sends 2·(P-1)/P·4·n bytes, as a ring all-reduce does.
  void all_reduce(std::span<const float> mine, std::span<float> sum);
  void barrier();
  /// Makes this communicator dead, and where the transport can, wakes the ranks that wait for this one.
  virtual void abort(const std::string& reason) noexcept = 0;

  /// What this rank has sent, received and called so far, barriers apart.
  struct Traffic {
    std::uint64_t bytes_sent = 0;
    std::uint64_t bytes_received = 0;
    std::uint64_t calls = 0;
  };
  Traffic traffic() const noexcept { return traffic_; }

 protected:
  virtual void do_all_gather(std::span<const std::byte> block, std::span<std::byte> blocks) = 0;
  virtual void do_all_to_all(std::span<const std::byte> sent, std::span<std::byte> received) = 0;
  virtual void do_all_reduce(std::span<const float> mine, std::span<float> sum) = 0;
  virtual void do_barrier() = 0;

 private:
  Traffic traffic_;
};

/// Ranks as threads of this process: one communicator per thread, index = rank. No wait is longer than `timeout`.
/// Errors: invalid_argument for ranks < 1 or a timeout that is not positive.
std::vector<std::unique_ptr<Communicator>> make_thread_communicators(
    int ranks, std::chrono::milliseconds timeout = std::chrono::seconds(60));

}  // namespace thinwire
