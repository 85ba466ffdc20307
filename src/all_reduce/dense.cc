// Stage 5, dense: an ordinary all-reduce. Enters: all values of this rank. Leaves: their mean over the ranks.
#include "all_reduce/divide.h"
#include "thinwire/sparse_all_reduce.h"

namespace thinwire {

void dense_mean(Communicator& communicator, std::span<const float> mine, std::span<float> mean) {
  communicator.all_reduce(mine, mean);
  divide(mean, static_cast<std::size_t>(communicator.size()));
}

}  // namespace thinwire
