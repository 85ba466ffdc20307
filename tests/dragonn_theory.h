// What the tests of DRAGONN's theory share. l candidates in S slots, i.e. HashedSlots of k = 1 % of a unit: A has l = 2k,
// S = k; B has l = k, S = 4k. Seeds are fixed; tolerances are multiples of the standard deviation of what is averaged,
// kSigmas unless said. What is measured goes to the report that --gtest_output=xml:FILE writes.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iomanip>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "helpers.h"
#include "reference/murmur3.h"
#include "thinwire/select.h"

namespace thinwire::test {

using Layout = HashedSlots::Layout;

inline constexpr double kSigmas = 4.0;
#ifdef THINWIRE_SMALL_TESTS
inline constexpr int kShrink = 8;
#else
inline constexpr int kShrink = 1;
#endif

inline std::uint32_t seed_of(int trial) { return reference::hash_counter(std::uint32_t(trial), 2022); }

inline std::size_t kept(const SparseGradient& out) {
  return out.nnz() - std::size_t(std::count(out.indices.begin(), out.indices.end(), kEmptySlot));
}

/// How many of `slots` hold something after `candidates` have been hashed into them, and how much that varies.
inline double expected_kept(double slots, double candidates) {
  return slots * (1 - std::pow(1 - 1 / slots, candidates));
}
inline double kept_deviation(double slots, double candidates) {
  const double one_free = std::pow(1 - 1 / slots, candidates);
  const double two_free = std::pow(1 - 2 / slots, candidates);
  return std::sqrt(slots * (slots - 1) * two_free + slots * one_free - slots * slots * one_free * one_free);
}
/// What a layout does with a unit of which k elements are to travel.
inline double slots_of(Layout layout, double k) { return layout == Layout::a ? k : 4 * k; }
inline double candidates_of(Layout layout, double k) { return layout == Layout::a ? 2 * k : k; }
/// The share of ‖v‖² that hashing sends at least, on the average: (S/d)(1-(1-1/S)^l).
inline double delta_of(Layout layout, double k, double numel) {
  return expected_kept(slots_of(layout, k), candidates_of(layout, k)) / numel;
}

/// The whole unit is read for the threshold, so that l is exact.
inline HashedSlots exact(double density, Layout layout) { return {density, layout, 1.0}; }

/// Zeros but for `count` random places, which hold distinct magnitudes in random order, or equal ones.
inline std::vector<float> scattered(std::size_t numel, std::size_t count, std::uint32_t seed, bool equal = false) {
  std::mt19937 random(seed);
  std::vector<float> values(numel, 0.0f);
  for (std::size_t i = 0; i < count; ++i) values[i] = equal ? 1.0f : 1.0f + float(i) / float(numel);
  for (std::size_t i = 0; i < count; ++i) values[i] *= random() % 2 == 0 ? 1.0f : -1.0f;
  std::shuffle(values.begin(), values.end(), random);
  return values;
}

inline std::string name(Layout layout) { return layout == Layout::a ? "a" : "b"; }

/// Three decimals, for the report.
inline void record(const std::string& what, double value) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(3) << value;
  ::testing::Test::RecordProperty(what, text.str());
}

struct Average {
  double sum = 0, squares = 0, count = 0;
  void add(double value) {
    sum += value;
    squares += value * value;
    ++count;
  }
  double mean() const { return sum / count; }
  double deviation() const { return std::sqrt(std::max(0.0, (squares - sum * sum / count) / (count - 1))); }
  double error() const { return deviation() / std::sqrt(count); }
};

}  // namespace thinwire::test
