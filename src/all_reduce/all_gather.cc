// Stage 5, all_gather: every rank has every payload. Enters: valid payloads in rank order. Leaves: their mean.
#include <algorithm>
#include <vector>

#include "all_reduce/divide.h"
#include "core/float16.h"
#include "core/tuning.h"
#include "thinwire/sparse_all_reduce.h"

namespace thinwire {

const char* to_string(SparseAllReduce kind) noexcept {
  switch (kind) {
    case SparseAllReduce::all_gather:
      return "all_gather";
    case SparseAllReduce::dense:
      return "dense";
  }
  return "unknown";
}

bool decode_mean(std::span<const Payload> payloads, const GradientView& mean) {
  std::vector<DecodeCursor> cursors(payloads.size());
  std::vector<float> scratch(mean.dtype == DType::f32 ? 0 : std::min(mean.numel, kDecodeTile));
  bool finite = true;
  for (std::size_t begin = 0; begin < mean.numel; begin += kDecodeTile) {
    const std::size_t count = std::min(kDecodeTile, mean.numel - begin);
    float* const data = mean.dtype == DType::f32 ? static_cast<float*>(mean.data) + begin : scratch.data();
    const std::span<float> tile(data, count);
    std::fill(tile.begin(), tile.end(), 0.0f);
    for (std::size_t r = 0; r < payloads.size(); ++r)
      decode_add(payloads[r], static_cast<std::uint32_t>(begin), tile, cursors[r]);
    divide(tile, payloads.size());
    finite = store_gradient(mean, begin, count, data) && finite;
  }
  return finite;
}

}  // namespace thinwire
