// The one list of cases: sizes, distributions, densities, selectors, codecs, ranks, and every SIMD target of this machine.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "core/simd_target.h"
#include "thinwire/codec.h"
#include "thinwire/select.h"

namespace thinwire::test {

inline constexpr std::array<std::size_t, 10> kSizes = {0, 1, 2, 31, 32, 33, 1000, 4095, 4096, 4097};
#ifdef THINWIRE_SMALL_TESTS
inline const std::vector<std::size_t> kLargeSizes = {};
#else
inline const std::vector<std::size_t> kLargeSizes = {100'003, (std::size_t{1} << 20) + 7};
#endif
inline constexpr std::array<double, 4> kDensities = {0.001, 0.01, 0.1, 1.0};
inline constexpr std::array<int, 5> kRanks = {1, 2, 3, 5, 8};

enum class Distribution { normal, laplace, student_t3, all_zero, all_equal, one_hot, alternating, denormal };
inline constexpr std::array<Distribution, 8> kDistributions = {
    Distribution::normal,    Distribution::laplace, Distribution::student_t3,  Distribution::all_zero,
    Distribution::all_equal, Distribution::one_hot, Distribution::alternating, Distribution::denormal};
inline constexpr std::array<Distribution, 3> kLargeDistributions = {Distribution::normal, Distribution::student_t3,
                                                                    Distribution::alternating};

inline const char* to_string(Distribution distribution) {
  constexpr std::array<const char*, 8> kNames = {"normal",    "laplace", "student_t3",  "all_zero",
                                                 "all_equal", "one_hot", "alternating", "denormal"};
  return kNames[static_cast<std::size_t>(distribution)];
}

inline std::vector<float> make_values(Distribution distribution, std::size_t numel, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> values(numel, 0.0f);
  switch (distribution) {
    case Distribution::normal: {
      std::normal_distribution<float> normal;
      for (float& value : values) value = normal(random);
      break;
    }
    case Distribution::laplace: {
      std::exponential_distribution<float> exponential;
      for (float& value : values) value = random() % 2 == 0 ? exponential(random) : -exponential(random);
      break;
    }
    case Distribution::student_t3: {
      std::student_t_distribution<float> student(3.0f);
      for (float& value : values) value = student(random);
      break;
    }
    case Distribution::all_zero:
      break;
    case Distribution::all_equal:
      for (float& value : values) value = 0.375f;
      break;
    case Distribution::one_hot: {
      const std::array<std::size_t, 3> places = {0, numel == 0 ? 0 : numel - 1, numel / 2};
      if (numel > 0) values[places[seed % 3]] = -2.5f;
      break;
    }
    case Distribution::alternating:  // magnitudes in groups of five, so that ties have both signs
      for (std::size_t i = 0; i < numel; ++i)
        values[i] = std::ldexp(1.0f + float(i / 5), -8) * (i % 2 == 0 ? 1.0f : -1.0f);
      break;
    case Distribution::denormal:
      for (float& value : values) {
        const float magnitude = std::ldexp(float(1 + random() % 0x7ffffeu), -149);
        value = random() % 2 == 0 ? magnitude : -magnitude;
      }
      break;
  }
  return values;
}

/// Multiples of `unit`, at most 1000 of them, another one for each element: all sums of a few hundred are exact.
inline std::vector<float> dyadic_values(std::size_t numel, std::uint32_t seed, float unit = 1.0f / 1024) {
  std::mt19937 random(seed);
  std::vector<float> values(numel);
  for (float& value : values) value = float(int(random() % 2001) - 1000) * unit;
  return values;
}

inline constexpr std::array<Side, 3> kSides = {Side::both, Side::largest, Side::smallest};
inline const char* to_string(Side side) {
  constexpr std::array<const char*, 3> kNames = {"both", "largest", "smallest"};
  return kNames[static_cast<std::size_t>(side)];
}

inline std::vector<Selector> selectors(double density) {
  return {TopK{density}, TrimmedTopK{density, 0.2}, HashedSlots{density, HashedSlots::Layout::a, 0.01},
          HashedSlots{density, HashedSlots::Layout::b, 0.01}};
}
inline constexpr std::array<Codec, 8> kCodecs = {{{IndexCoding::raw_u32, ValueCoding::f32},
                                                  {IndexCoding::raw_u32, ValueCoding::bf16},
                                                  {IndexCoding::raw_u32, ValueCoding::f16},
                                                  {IndexCoding::raw_u32, ValueCoding::shared_mean},
                                                  {IndexCoding::elias_fano, ValueCoding::f32},
                                                  {IndexCoding::elias_fano, ValueCoding::bf16},
                                                  {IndexCoding::elias_fano, ValueCoding::f16},
                                                  {IndexCoding::elias_fano, ValueCoding::shared_mean}}};

/// Those that a selector's order of entries allows.
inline std::vector<Codec> codecs_for(const Selector& selector) {
  const auto* hashed = std::get_if<HashedSlots>(&selector);
  const bool ascending = hashed == nullptr || hashed->layout != HashedSlots::Layout::a;
  return {kCodecs.begin(), ascending ? kCodecs.end() : kCodecs.begin() + 3};
}
inline bool is_exact(const Selector& selector) { return !std::holds_alternative<HashedSlots>(selector); }

struct Case {
  std::size_t numel = 0;
  Distribution distribution = Distribution::normal;
  std::uint32_t seed = 0;
  std::vector<float> values() const { return make_values(distribution, numel, seed); }
};
inline std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.numel << " x " << to_string(c.distribution) << ", seed " << c.seed;
}

/// The full cross of sizes and distributions.
inline std::vector<Case> small_cases() {
  std::vector<Case> cases;
  std::uint32_t seed = 1;
  for (const std::size_t numel : kSizes)
    for (const Distribution distribution : kDistributions) cases.push_back({numel, distribution, seed++});
  return cases;
}
inline std::vector<Case> large_cases() {
  std::vector<Case> cases;
  std::uint32_t seed = 1001;
  for (const std::size_t numel : kLargeSizes)
    for (const Distribution distribution : kLargeDistributions) cases.push_back({numel, distribution, seed++});
  return cases;
}

/// Runs `body` once on each SIMD target, and leaves the best one in force.
template <class Body>
void on_every_target(const Body& body) {
  const std::vector<std::int64_t> targets = simd_targets();
  ASSERT_FALSE(targets.empty());
  for (const std::int64_t target : targets) {
    SCOPED_TRACE("on SIMD target " + simd_target_name(target));
    force_simd_target(target);
    EXPECT_EQ(current_simd_target(), target);
    body();
  }
  force_simd_target(0);
}

}  // namespace thinwire::test
