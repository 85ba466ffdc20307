// thinwire, stage 5: how the payloads of all ranks become the mean gradient. Written on Communicator alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "thinwire/codec.h"
#include "thinwire/communicator.h"
#include "thinwire/types.h"

namespace thinwire {

enum class SparseAllReduce : std::uint8_t {
  all_gather,  ///< every rank receives every payload: one collective, (P-1)·block bytes sent (RedSync, DRAGONN)
  dense,       ///< an ordinary all-reduce of the whole residual: 2·(P-1)/P·4·n bytes sent
};

/// "all_gather", "dense".
const char* to_string(SparseAllReduce kind) noexcept;

/// mean [numel] <- (Σ over ranks, in rank order, of their payloads' entries) / P, in f32, times the buffer's loss scale,
/// rounded once to its type (to nearest, ties to even). Elements that no payload holds become 0. Every payload must be
/// valid for numel. The same bits on every rank. Scratch: one tile of 64 Ki elements.
/// Returns false if an element got too large for a half-precision type, or for f32 under a loss scale.
bool decode_mean(std::span<const Payload> payloads, const GradientView& mean);

/// sum <- Σ over ranks of mine, and then ÷ P. `mine` may be `mean`. One all-reduce.
void dense_mean(Communicator& communicator, std::span<const float> mine, std::span<float> mean);

}  // namespace thinwire
