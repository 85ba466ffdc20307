// What every communicator must do, as functions that each rank runs on its own communicator: any number of ranks, and no
// test framework, so that they serve ranks as threads, as MPI processes or under another language alike. A check throws
// std::logic_error with a sentence where the communicator is wrong.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "thinwire/communicator.h"
#include "thinwire/error.h"

namespace thinwire::test {

struct ConformanceCheck {
  std::string name;
  std::function<void(Communicator&)> run;
};

namespace conformance {

[[noreturn]] inline void fail(const std::string& sentence) { throw std::logic_error(sentence); }
inline void expect(bool holds, const std::string& sentence) {
  if (!holds) fail(sentence);
}

/// Byte i of what rank `from` has for rank `to`: another one for each.
inline std::byte pattern(int from, int to, std::size_t i) {
  return std::byte((37 * from + 101 * to + 7 * i + i / 256) & 0xff);
}

inline const std::vector<std::size_t> kBlockSizes = {1, 3, 64, 1000, 70'001};

inline Error refusal_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  throw std::logic_error("nothing was thrown");
}
inline void expect_refusal(const std::function<void()>& call, ErrorCode code) {
  const Error error = refusal_of(call);
  expect(error.code() == code,
         std::string("code ") + to_string(error.code()) + " instead of " + to_string(code) + ": " + error.what());
  expect(!std::string(error.what()).empty(), "an error without a sentence");
}

inline void all_gather(Communicator& c) {
  const auto ranks = std::size_t(c.size());
  for (const std::size_t size : kBlockSizes) {
    std::vector<std::byte> block(size), blocks(ranks * size, std::byte{0xEE});
    for (std::size_t i = 0; i < size; ++i) block[i] = pattern(c.rank(), 0, i);
    c.all_gather(block, blocks);
    for (int from = 0; from < c.size(); ++from)
      for (std::size_t i = 0; i < size; ++i)
        if (blocks[std::size_t(from) * size + i] != pattern(from, 0, i))
          fail("byte " + std::to_string(i) + " of the block of rank " + std::to_string(from) + " is wrong");
  }
}

inline void all_to_all(Communicator& c) {
  const auto ranks = std::size_t(c.size());
  for (const std::size_t size : kBlockSizes) {
    std::vector<std::byte> sent(ranks * size), received(ranks * size, std::byte{0xEE});
    for (int to = 0; to < c.size(); ++to)
      for (std::size_t i = 0; i < size; ++i) sent[std::size_t(to) * size + i] = pattern(c.rank(), to, i);
    c.all_to_all(sent, received);
    for (int from = 0; from < c.size(); ++from)
      for (std::size_t i = 0; i < size; ++i)
        if (received[std::size_t(from) * size + i] != pattern(from, c.rank(), i))
          fail("byte " + std::to_string(i) + " from rank " + std::to_string(from) + " is wrong");
  }
}

/// Integers, whose sums are exact in any order.
inline void all_reduce(Communicator& c) {
  for (const std::size_t numel :
       {std::size_t{1}, std::size_t{2}, std::size_t{7}, std::size_t{1000}, std::size_t{70'001}})
    for (const bool in_place : {false, true}) {
      std::vector<float> mine(numel), sum(numel, -1.0f);
      for (std::size_t i = 0; i < numel; ++i) mine[i] = float(int(i % 1000) * (c.rank() + 1) - 300);
      const std::vector<float> before = mine;
      c.all_reduce(mine, in_place ? mine : sum);
      const std::vector<float>& result = in_place ? mine : sum;
      if (!in_place) expect(mine == before, "all_reduce wrote to its input");
      const int ranks = c.size();
      for (std::size_t i = 0; i < numel; ++i)
        if (result[i] != float(int(i % 1000) * ranks * (ranks + 1) / 2 - 300 * ranks))
          fail("element " + std::to_string(i) + " of the sum is " + std::to_string(result[i]));
    }
}

/// Values whose sum depends on the order: all ranks hold the same bits.
inline void all_reduce_same_bits(Communicator& c) {
  const std::size_t numel = 5003;
  std::vector<float> values(numel);
  for (std::size_t i = 0; i < numel; ++i)
    values[i] = 1.0f / float(1 + (i * 7 + std::size_t(c.rank()) * 13) % 97) * (i % 2 == 0 ? 1e4f : -1.0f);
  c.all_reduce(values, values);
  const std::span<const std::byte> bytes = std::as_bytes(std::span(std::as_const(values)));
  std::vector<std::byte> all(bytes.size() * std::size_t(c.size()));
  c.all_gather(bytes, all);
  for (std::size_t i = 0; i < all.size(); ++i)
    if (all[i] != all[i % bytes.size()]) fail("ranks hold different sums");
}

/// Nobody leaves before the last has come.
inline void barrier(Communicator& c) {
  const auto now = [] { return std::chrono::steady_clock::now().time_since_epoch().count(); };
  for (int last = 0; last < c.size(); ++last) {
    if (c.rank() == last) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    const std::int64_t came = now();
    c.barrier();
    const std::int64_t left = now();
    std::vector<std::int64_t> times(std::size_t(c.size()));
    c.all_gather(std::as_bytes(std::span(&came, 1)), std::as_writable_bytes(std::span(times)));
    for (const std::int64_t other : times) expect(left >= other, "left the barrier before all had come");
  }
}

inline void traffic(Communicator& c) {
  const auto others = std::uint64_t(c.size() - 1), ranks = std::uint64_t(c.size());
  const bool alone = others == 0;
  const auto expect_traffic = [&](std::uint64_t bytes, std::uint64_t calls) {
    expect(c.traffic().bytes_sent == bytes,
           "bytes sent are " + std::to_string(c.traffic().bytes_sent) + ", not " + std::to_string(bytes));
    expect(c.traffic().bytes_received == bytes, "bytes received are " + std::to_string(c.traffic().bytes_received));
    expect(alone || c.traffic().calls == calls, "calls are " + std::to_string(c.traffic().calls));
  };
  expect_traffic(0, 0);
  std::vector<std::byte> block(100), blocks(100 * ranks), received(100 * ranks);
  c.all_gather(block, blocks);
  expect_traffic(others * 100, 1);
  c.all_to_all(blocks, received);
  expect_traffic(others * 200, 2);
  std::vector<float> values(30 * ranks);
  c.all_reduce(values, values);
  expect_traffic(others * 200 + 2 * others * 4 * 30, 3);
  c.barrier();
  expect_traffic(others * 200 + 2 * others * 4 * 30, 3);
}

/// Sizes that do not fit are refused before anything is sent, and do no harm.
inline void bad_sizes(Communicator& c) {
  const auto ranks = std::size_t(c.size());
  std::vector<std::byte> block(8), blocks(8 * ranks), wrong(8 * ranks + 1);
  std::vector<float> some(4), more(5);
  expect_refusal([&] { c.all_gather(block, wrong); }, ErrorCode::invalid_argument);
  expect_refusal([&] { c.all_gather({}, {}); }, ErrorCode::invalid_argument);
  expect_refusal([&] { c.all_to_all({}, {}); }, ErrorCode::invalid_argument);
  expect_refusal([&] { c.all_to_all(blocks, wrong); }, ErrorCode::invalid_argument);
  if (ranks > 1) expect_refusal([&] { c.all_to_all(wrong, wrong); }, ErrorCode::invalid_argument);
  expect_refusal([&] { c.all_reduce(some, more); }, ErrorCode::invalid_argument);
  expect_refusal([&] { c.all_reduce({}, {}); }, ErrorCode::invalid_argument);
  expect(c.traffic().calls == 0 && c.traffic().bytes_sent == 0, "refused calls were counted");
  all_gather(c);
}

/// A hundred small calls of all kinds with a delay on another rank each time.
inline void many_calls(Communicator& c) {
  for (int round = 0; round < 100; ++round) {
    if (round % c.size() == c.rank() && round % 7 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const std::int32_t mine = 1000 * round + c.rank();
    std::vector<std::int32_t> all(std::size_t(c.size()));
    c.all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
    for (int r = 0; r < c.size(); ++r)
      expect(all[std::size_t(r)] == 1000 * round + r, "round " + std::to_string(round) + " is mixed up");
    float sum = float(c.rank() + round);
    c.all_reduce({&sum, 1}, {&sum, 1});
    expect(sum == float(c.size() * (c.size() - 1) / 2 + c.size() * round),
           "the sum of round " + std::to_string(round) + " is wrong");
  }
}

/// After an error that is not the caller's fault every call throws it again.
inline void expect_dead(Communicator& c, const Error& first) {
  std::vector<std::byte> block(8), blocks(8 * std::size_t(c.size()));
  float value = 1;
  const std::vector<std::function<void()>> calls = {[&] { c.all_gather(block, blocks); },
                                                    [&] { c.all_to_all(blocks, blocks); },
                                                    [&] {
                                                      c.all_reduce({&value, 1}, {&value, 1});
                                                    },
                                                    [&] { c.barrier(); }};
  for (const auto& call : calls) {
    const Error error = refusal_of(call);
    expect(error.code() == first.code() && std::string(error.what()) == first.what(),
           std::string("a dead communicator says ") + error.what() + " instead of " + first.what());
  }
}

/// Rank 0 leaves; those who wait for it are told who and why, long before their time-out.
inline void abort_wakes_the_others(Communicator& c) {
  if (c.size() == 1) return;
  const auto start = std::chrono::steady_clock::now();
  if (c.rank() == 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    c.abort("the disk is full");
    expect_dead(c, refusal_of([&] { c.barrier(); }));
    return;
  }
  std::vector<std::byte> block(8), blocks(8 * std::size_t(c.size()));
  const Error error = refusal_of([&] { c.all_gather(block, blocks); });
  const std::string sentence = error.what();
  expect(error.code() == ErrorCode::remote, "code " + std::string(to_string(error.code())));
  expect(sentence.find("rank 0") != std::string::npos, "the sentence does not name rank 0: " + sentence);
  expect(sentence.find("the disk is full") != std::string::npos, "the sentence does not give the reason: " + sentence);
  expect(std::chrono::steady_clock::now() - start < std::chrono::seconds(10), "the wait was not ended");
  expect_dead(c, error);
}

/// The last rank never comes: the others time out and say so. Needs a communicator with this time-out.
inline void missing_rank(Communicator& c, std::chrono::milliseconds timeout) {
  if (c.size() == 1 || c.rank() == c.size() - 1) return;
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::byte> block(8), blocks(8 * std::size_t(c.size()));
  const Error error = refusal_of([&] { c.all_gather(block, blocks); });
  const auto waited = std::chrono::steady_clock::now() - start;
  expect(error.code() == ErrorCode::timeout, std::string("code ") + to_string(error.code()) + ": " + error.what());
  expect(waited < timeout + std::chrono::seconds(5), "waited longer than the time-out");
  expect_dead(c, error);
}

}  // namespace conformance

/// Everything that any transport must pass.
inline std::vector<ConformanceCheck> conformance_checks() {
  return {{"all_gather", conformance::all_gather}, {"all_to_all", conformance::all_to_all},
          {"all_reduce", conformance::all_reduce}, {"all_reduce_same_bits", conformance::all_reduce_same_bits},
          {"barrier", conformance::barrier},       {"traffic", conformance::traffic},
          {"bad_sizes", conformance::bad_sizes},   {"many_calls", conformance::many_calls}};
}

}  // namespace thinwire::test
