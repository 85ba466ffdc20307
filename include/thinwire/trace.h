// thinwire: what ran when, for a timeline.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace thinwire {

/// Something that took time in a step. Nanoseconds of std::chrono::steady_clock.
struct TraceEvent {
  std::string name;  ///< of a stage: "queued", "accumulate and select", "encode", "exchange", "decode"
  std::string lane;  ///< the row it is drawn in, such as "bucket 3"
  std::uint64_t step = 0;
  std::int64_t begin_ns = 0;
  std::int64_t end_ns = 0;
};

/// The events in Chrome's trace-event format (JSON), which Perfetto (ui.perfetto.dev) and chrome://tracing open: one
/// process named `process`, one row per lane, rows in the order of their first event. Times count from the first event.
std::string chrome_trace(std::span<const TraceEvent> events, const std::string& process);

}  // namespace thinwire
