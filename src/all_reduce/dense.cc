// Stage 5, dense: an ordinary all-reduce. Enters: all values of this rank. Leaves: their mean over the ranks.
#include "thinwire/sparse_all_reduce.h"

namespace thinwire {

void dense_mean(Communicator& communicator, std::span<const float> mine, std::span<float> mean) {
  communicator.all_reduce(mine, mean);
  const auto ranks = static_cast<float>(communicator.size());
  for (float& value : mean) value /= ranks;
}

}  // namespace thinwire
