#include "select/candidates.h"

#include <algorithm>
#include <array>
#include <bit>
#include <functional>

#include "core/magnitude.h"
#include "select/blocks.h"
#include "select/select_kernels.h"

namespace thinwire {

Cut cut_after(std::span<const float> values, std::size_t k, std::vector<std::uint32_t>& keys) {
  constexpr int kBinBits = 12;
  std::uint32_t low = ~0u;
  std::uint32_t high = 0;
  for (const float value : values) {
    low = std::min(low, magnitude_key(value));
    high = std::max(high, magnitude_key(value));
  }
  const int shift = std::max(0, static_cast<int>(std::bit_width(high - low)) - kBinBits);
  std::array<std::uint32_t, 1u << kBinBits> histogram{};
  for (const float value : values) ++histogram[(magnitude_key(value) - low) >> shift];
  std::uint32_t bin = (high - low) >> shift;
  std::size_t above = 0;
  for (; above + histogram[bin] < k; --bin) above += histogram[bin];
  // The k-th lies in this bin. Its keys are gathered without a branch: every key is written, those of the bin stay.
  keys.resize(values.size() + 1);
  std::size_t inside = 0;
  for (const float value : values) {
    const std::uint32_t key = magnitude_key(value);
    keys[inside] = key;
    inside += (key - low) >> shift == bin;
  }
  const auto end = keys.begin() + static_cast<std::ptrdiff_t>(inside);
  const auto kth = keys.begin() + static_cast<std::ptrdiff_t>(k - above) - 1;
  std::nth_element(keys.begin(), kth, end, std::greater<>());
  Cut cut{.key = *kth, .ties = k - above};
  for (auto key = keys.begin(); key != end; ++key) cut.ties -= *key > cut.key;
  return cut;
}

void keep_largest(SparseGradient& entries, std::size_t k, std::vector<std::uint32_t>& keys) {
  if (k >= entries.nnz()) return;
  Cut cut = cut_after(entries.values, k, keys);
  std::size_t kept = 0;
  for (std::size_t i = 0; i < entries.nnz(); ++i) {
    const std::uint32_t key = magnitude_key(entries.values[i]);
    const bool tie = key == cut.key && cut.ties > 0;
    cut.ties -= tie;
    entries.indices[kept] = entries.indices[i];
    entries.values[kept] = entries.values[i];
    kept += key > cut.key || tie;
  }
  entries.indices.resize(k);
  entries.values.resize(k);
}

void Candidates::begin(std::size_t k, std::uint32_t bound, Side side, const PutBack* put_back) {
  k_ = k;
  side_ = side;
  bound_ = first_bound_ = std::max(bound, 1u);
  found_ = 0;
  put_back_ = put_back;
  held_.count = 0;
  held_.reserve(2 * k + kBlock);
}

void Candidates::collect_hits(const float* values, std::uint32_t offset, std::span<const std::uint32_t> hits) {
  std::uint32_t* const indices = held_.indices.data() + held_.count;
  float* const held = held_.values.data() + held_.count;
  for (std::size_t j = 0; j < hits.size(); ++j) {
    indices[j] = offset + hits[j];
    held[j] = values[hits[j]];
  }
  held_.count += hits.size();
  found_ += hits.size();
}

void Candidates::collect(const UnitBlock& block) {
  float* const velocities = held_.velocities.data() + held_.count;
  collect_hits(block.values, block.offset, block.hits);
  if (put_back_ != nullptr) {
    for (std::size_t j = 0; j < block.hits.size(); ++j) {
      velocities[j] = block.velocity != nullptr ? block.velocity[block.hits[j]] : 0.0f;
      block.values[block.hits[j]] = 0.0f;
      if (block.velocity != nullptr) block.velocity[block.hits[j]] = 0.0f;
    }
  }
  if (held_.count > 2 * k_) cut();
}

void Candidates::collect(UnitView unit) {
  std::array<std::uint32_t, kBlock + 1> hits;
  for_each_block(unit, [&](const float* values, std::size_t count, std::uint32_t offset) {
    collect_hits(values, offset, {hits.data(), find_at_least(values, count, bound_, side_, hits.data())});
    if (held_.count > 2 * k_) cut();
  });
}

// Keeps the k best. The entries are parted without a branch: each is written to both lists, and stays in one.
void Candidates::cut() {
  if (held_.count <= k_) return;
  Cut cut = cut_after({held_.values.data(), held_.count}, k_, keys_);
  const bool taken = put_back_ != nullptr;
  if (taken) lost_.reserve(held_.count + 1);
  std::size_t kept = 0;
  std::size_t lost = 0;
  for (std::size_t i = 0; i < held_.count; ++i) {
    const std::uint32_t index = held_.indices[i];
    const float value = held_.values[i];
    const std::uint32_t key = magnitude_key(value);
    const bool tie = (key == cut.key) & (cut.ties > 0);
    const bool keep = (key > cut.key) | tie;
    cut.ties -= tie;
    if (taken) {
      const float velocity = held_.velocities[i];
      lost_.indices[lost] = index;
      lost_.values[lost] = value;
      lost_.velocities[lost] = velocity;
      lost += !keep;
      held_.velocities[kept] = velocity;
    }
    held_.indices[kept] = index;
    held_.values[kept] = value;
    kept += keep;
  }
  held_.count = k_;
  bound_ = cut.key + 1;
  if (!taken) return;
  lost_.count = lost;
  (*put_back_)(lost_);
}

void Candidates::finish(SparseGradient& out, TakenEntries& taken) {
  cut();
  const auto count = static_cast<std::ptrdiff_t>(held_.count);
  out.indices.assign(held_.indices.begin(), held_.indices.begin() + count);
  out.values.assign(held_.values.begin(), held_.values.begin() + count);
  taken.count = 0;
  if (put_back_ != nullptr) std::swap(taken, held_);
  held_.count = 0;
  put_back_ = nullptr;
}

std::uint32_t Candidates::least_of_best() {
  return held_.count == 0 ? 1 : cut_after({held_.values.data(), held_.count}, std::min(k_, held_.count), keys_).key;
}

void Candidates::abandon() noexcept {
  if (put_back_ != nullptr) (*put_back_)(held_);
  held_.count = 0;
  put_back_ = nullptr;
}

}  // namespace thinwire
