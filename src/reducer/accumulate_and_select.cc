// Where the residual's pass and the selection meet.
#include "thinwire/reducer.h"

namespace thinwire {

std::optional<std::uint32_t> accumulate_and_select(const Selector& selector, std::span<const Residual::Segment> unit,
                                                   const GradientView& bucket, std::uint32_t seed, bool masking,
                                                   Selection& scratch, SparseGradient& selected, TakenEntries& taken,
                                                   Side side, SelectionMemory* memory) {
  std::vector<UnitSegment> view;
  for (const Residual::Segment& segment : unit) view.push_back(Residual::view(segment));
  const auto peek = [&](std::span<const UnitRun> runs, float* out) { Residual::peek(unit, bucket, runs, out); };
  const auto put_back = [&](const TakenEntries& entries) { Residual::put_back(unit, entries, masking); };
  const auto collect = [&](UnitBlock block) {
    if (!masking) block.velocity = nullptr;
    scratch.collect(block);
    return scratch.bound();
  };
  try {
    scratch.begin(selector, view, seed, {.side = side, .memory = memory, .pass = {.peek = peek, .put_back = put_back}});
    const std::optional<std::uint32_t> non_finite = Residual::accumulate(unit, bucket, collect, scratch.bound(), side);
    scratch.finish(selected, taken);
    return non_finite;
  } catch (...) {
    scratch.abandon();
    throw;
  }
}

}  // namespace thinwire
