// What the tests share: comparison of bits, buffers with sentinels around them, ranks as threads.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "reference/number.h"
#include "thinwire/communicator.h"
#include "thinwire/error.h"
#include "thinwire/types.h"

namespace thinwire::test {

inline std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }

/// Equal to the bit, NaN and the sign of zero included.
inline ::testing::AssertionResult same_bits(std::span<const float> actual, std::span<const float> expected) {
  if (actual.size() != expected.size())
    return ::testing::AssertionFailure() << actual.size() << " elements instead of " << expected.size();
  for (std::size_t i = 0; i < actual.size(); ++i)
    if (bits_of(actual[i]) != bits_of(expected[i]))
      return ::testing::AssertionFailure()
             << "element " << i << " of " << actual.size() << " is " << actual[i] << " (bits " << std::hex
             << bits_of(actual[i]) << ") instead of " << expected[i] << " (bits " << bits_of(expected[i]) << ")";
  return ::testing::AssertionSuccess();
}

/// Bytes with sentinels on both sides; the data may be moved off its alignment by whole elements.
class GuardedBytes {
 public:
  explicit GuardedBytes(std::size_t size, std::size_t shift = 0)
      : size_(size), begin_(kGuard + shift), storage_(size + 2 * kGuard + shift, std::byte{0xA5}) {}
  std::span<std::byte> bytes() { return std::span(storage_).subspan(begin_, size_); }
  std::span<const std::byte> bytes() const { return std::span(storage_).subspan(begin_, size_); }
  bool intact() const {
    for (std::size_t i = 0; i < storage_.size(); ++i)
      if ((i < begin_ || i >= begin_ + size_) && storage_[i] != std::byte{0xA5}) return false;
    return true;
  }

 private:
  static constexpr std::size_t kGuard = 64;
  std::size_t size_;
  std::size_t begin_;
  std::vector<std::byte> storage_;
};

/// A gradient buffer of some type, filled from f32 by rounding, with sentinels around it.
class GradientBuffer {
 public:
  GradientBuffer(std::span<const float> values, DType dtype = DType::f32, std::size_t shift = 0)
      : dtype_(dtype), numel_(values.size()), memory_(values.size() * width(dtype), shift * width(dtype)) {
    for (std::size_t i = 0; i < numel_; ++i)
      reference::store(dtype, values[i], memory_.bytes().data() + i * width(dtype));
  }
  GradientView view() { return {memory_.bytes().data(), numel_, dtype_, {}}; }
  std::vector<float> floats() const {
    std::vector<float> values(numel_);
    for (std::size_t i = 0; i < numel_; ++i)
      values[i] = reference::load(dtype_, memory_.bytes().data() + i * width(dtype_));
    return values;
  }
  bool intact() const { return memory_.intact(); }

 private:
  static std::size_t width(DType dtype) { return dtype == DType::f32 ? 4 : 2; }
  DType dtype_;
  std::size_t numel_;
  GuardedBytes memory_;
};

/// The error that `body` throws; a failure of the test if it throws none.
template <class Body>
Error error_of(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    return error;
  } catch (const std::exception& other) {
    ADD_FAILURE() << "threw something else than thinwire::Error: " << other.what();
    return {ErrorCode::system, other.what()};
  }
  ADD_FAILURE() << "nothing was thrown";
  return {ErrorCode::system, "nothing was thrown"};
}

/// `error` has this code, and its sentence names all of these.
inline ::testing::AssertionResult says(const Error& error, ErrorCode code, const std::vector<std::string>& words) {
  const std::string sentence = error.what();
  if (error.code() != code)
    return ::testing::AssertionFailure() << "code " << to_string(error.code()) << " instead of " << to_string(code)
                                         << ": " << sentence;
  for (const std::string& word : words)
    if (sentence.find(word) == std::string::npos)
      return ::testing::AssertionFailure() << "the sentence does not name \"" << word << "\": " << sentence;
  if (sentence.find('\n') != std::string::npos)
    return ::testing::AssertionFailure() << "more than one line: " << sentence;
  return ::testing::AssertionSuccess();
}

/// Runs `body` on as many threads as ranks. An exception on one rank aborts its communicator and fails the test.
inline void run_ranks(int ranks, const std::function<void(Communicator&)>& body,
                      std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
  auto communicators = make_thread_communicators(ranks, timeout);
  std::vector<std::string> failures(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] {
      Communicator& communicator = *communicators[static_cast<std::size_t>(rank)];
      try {
        body(communicator);
      } catch (const std::exception& error) {
        failures[static_cast<std::size_t>(rank)] = error.what();
        communicator.abort("the test's body threw");
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (int rank = 0; rank < ranks; ++rank)
    EXPECT_EQ(failures[static_cast<std::size_t>(rank)], "") << "thrown by rank " << rank << " of " << ranks;
}

}  // namespace thinwire::test
