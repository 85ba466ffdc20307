#include "select/sample.h"

#include <algorithm>
#include <array>

#include "core/magnitude.h"

namespace thinwire {
namespace {

// The segment that holds a position of the unit; `position` becomes the one within it.
std::size_t locate(UnitView unit, std::size_t& position) {
  std::size_t segment = 0;
  while (position >= unit[segment].numel) position -= unit[segment++].numel;
  return segment;
}

}  // namespace

void SampleSource::prefetch(std::size_t position) const {
  const std::size_t segment = locate(unit, position);
  __builtin_prefetch(unit[segment].values + position);
}

void SampleSource::read(std::size_t position, std::size_t count, std::vector<std::uint32_t>& keys) const {
  const std::size_t segment = locate(unit, position);
  count = std::min(count, unit[segment].numel - position);
  std::array<float, 8> values;
  for (std::size_t done = 0; done < count; done += values.size()) {
    const std::size_t n = std::min(values.size(), count - done);
    const float* from = unit[segment].values + position + done;
    if (peek != nullptr && *peek) {
      (*peek)(segment, position + done, n, values.data());
      from = values.data();
    }
    for (std::size_t i = 0; i < n; ++i) keys.push_back(magnitude_key(from[i]));
  }
}

}  // namespace thinwire
