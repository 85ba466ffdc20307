#include "thinwire/trace.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <vector>

#include "core/text.h"

namespace thinwire {
namespace {

std::string json_string(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (static_cast<unsigned char>(c) < 0x20) {
      std::array<char, 8> escape{};
      std::snprintf(escape.data(), escape.size(), "\\u%04x", static_cast<unsigned>(c));
      quoted += escape.data();
    } else {
      if (c == '"' || c == '\\') quoted += '\\';
      quoted += c;
    }
  }
  return quoted + '"';
}

std::string name_row(const char* what, std::size_t row, const std::string& name) {
  return std::string(R"({"ph":"M","pid":0,"tid":)") + text_of(row) + R"(,"name":")" + what + R"(","args":{"name":)" +
         json_string(name) + "}}";
}

}  // namespace

std::string chrome_trace(std::span<const TraceEvent> events, const std::string& process) {
  std::vector<TraceEvent> sorted(events.begin(), events.end());
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const TraceEvent& a, const TraceEvent& b) { return a.begin_ns < b.begin_ns; });
  std::string json = R"({"displayTimeUnit":"ms","traceEvents":[)" + ("\n" + name_row("process_name", 0, process));
  std::map<std::string, std::size_t> rows;
  for (const TraceEvent& event : sorted) {
    const auto [row, is_new] = rows.emplace(event.lane, rows.size());
    if (is_new) json += ",\n" + name_row("thread_name", row->second, event.lane);
    const auto microseconds = [](std::int64_t ns) { return text_of(static_cast<double>(ns) / 1e3); };
    json += R"(,
{"ph":"X","pid":0,"tid":)" +
            text_of(row->second) + R"(,"name":)" + json_string(event.name) + R"(,"ts":)" +
            microseconds(event.begin_ns - sorted.front().begin_ns) + R"(,"dur":)" +
            microseconds(event.end_ns - event.begin_ns) + R"(,"args":{"step":)" + text_of(event.step) + "}}";
  }
  return json + "\n]}\n";
}

}  // namespace thinwire
