// Constants that measurements set, each with the measurement.
#pragma once

#include <cstddef>
#include <cstdint>

namespace thinwire {

// TopK's sampled bound: 4 096 groups of 8 neighbours, 32 Ki elements in all. Single positions cost about ten times the
// time of a group; groups of 16 sit too close together on convolution layers and miss the bound more often. Four standard
// deviations below the expected rank leave about 1.7k candidates at 0.1 % and 1.2k at 1 %.
inline constexpr std::size_t kTopKSampleGroups = 4096;
inline constexpr std::size_t kTopKGroup = 8;
inline constexpr double kTopKSigmas = 4.0;
inline constexpr double kTopKRetrySigmas = 12.0;

// HashedSlots: candidates that the threshold's sample should hold; the threshold's rank is then off by about 1/sqrt(64).
inline constexpr double kHashedSampleSurvivors = 64.0;

// ThresholdSearch: 8 to 11 halvings land on a count in practice, 30 leave no two magnitudes apart that f32 can tell. The
// sweeps before them lower r as the authors' trimmed top-k does.
inline constexpr int kThresholdSearchProbes = 30;
inline constexpr double kThresholdSearchTrim = 0.2;

// SampledTopK, as in DGC's code: expected survivors in the sample, the share of k that is enough, by how much and how often
// the threshold is lowered.
inline constexpr double kSampledTopKSurvivors = 2.0;
inline constexpr double kSampledTopKEnough = 0.8;
inline constexpr double kSampledTopKLower = 0.8;
inline constexpr int kSampledTopKRounds = 10;

// Samples lie apart: the one this many ahead is asked for while one is read.
inline constexpr std::size_t kSamplePrefetch = 16;

// So many elements ahead a sweep asks for its memory: 15 to 20 % of a selection from 16 Mi elements. The update, which
// writes as much as it reads, gains nothing from it.
inline constexpr std::size_t kSweepPrefetch = 1024;

// Up to this many ranks always-dense parameters ride in the payload: (P-1) copies of them cost less there than the
// latency of an all-reduce of their own (docs/decisions/0008). Beyond this many bytes they never do.
inline constexpr int kDenseSectionMaxRanks = 8;
inline constexpr std::size_t kDenseSectionMaxBytes = 256 * 1024;

// decode_mean adds the payloads of all ranks tile by tile, so that a tile stays in the L2 cache.
inline constexpr std::size_t kDecodeTile = 64 * 1024;

}  // namespace thinwire
