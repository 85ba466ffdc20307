// The stages as `thinwire bench` runs them: each with its data, its oracle and what it is compared to.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "thinwire/thinwire.h"

namespace thinwire::tools {

/// What one row is about.
struct Cell {
  std::string stage;
  std::string selector;  // or codec
  std::string distribution;
  std::size_t numel = 0;
  double density = 0;
  int threads = 1;
};

/// One stage on one thread's data.
class Trial {
 public:
  virtual ~Trial() = default;
  /// Runs the stage once and compares with the oracle.
  virtual bool verify() = 0;
  /// Runs the stage; only this is timed.
  virtual void run(std::size_t repetition) = 0;
  /// The least that has to be done with the same memory, timed next to `run`.
  virtual void bare() {}
  virtual bool has_bare() const { return false; }

  std::size_t bytes = 0;      // that the stage passes over
  std::size_t entries = 0;    // that come out of it
  double bits_per_entry = 0;  // of a payload
  std::size_t fallbacks = 0;  // in all runs so far
};

/// "top_k", "trimmed_top_k", "hashed_slots_a", "hashed_slots_b", "threshold_search", "sampled_top_k".
Selector selector_of(const std::string& name, double density);

/// Every codec by its name, "raw_u32 x f32" first.
const std::vector<std::pair<std::string, Codec>>& codecs();

/// The trial of a cell. `values(numel)` makes its data.
std::unique_ptr<Trial> make_trial(const Cell& cell, const std::function<std::vector<float>(std::size_t)>& values);

}  // namespace thinwire::tools
