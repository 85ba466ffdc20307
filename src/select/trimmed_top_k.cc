#include "select/trimmed_top_k.h"

namespace thinwire {

void TrimmedTopKSelection::begin(const SampleSource& source, std::size_t k, double epsilon) {
  source_ = source;
  k_ = k;
  epsilon_ = epsilon;
  statistics_.begin(source.numel, source.side);
}

void TrimmedTopKSelection::finish(SparseGradient& out, TakenEntries& taken) {
  collect_trimmed(candidates_, source_, k_, statistics_, epsilon_);
  candidates_.finish(out, taken);
}

}  // namespace thinwire
