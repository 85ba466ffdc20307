// `thinwire bench`: how long each stage takes on this machine, next to a read pass over the same memory.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace thinwire::tools {

struct BenchOptions {
  std::vector<std::string> stages;     ///< of `stages()`; empty: all
  std::vector<std::string> selectors;  ///< of `selectors()`; empty: all
  std::vector<std::size_t> numel = {std::size_t{16} << 20};
  std::vector<double> density = {0.001, 0.01};
  std::vector<std::string> distributions = {"laplace"};
  std::vector<int> threads = {1};
  std::string input;            ///< a .npy file to tile instead of the distributions
  std::size_t repetitions = 0;  ///< 0: as many as fit into `seconds`, at least 7
  double seconds = 1.0;         ///< for each row
  std::string json;             ///< where to write the rows; empty: nowhere
};

const std::vector<std::string>& stages();
const std::vector<std::string>& selectors();

/// Verifies each stage against an oracle, times it, prints a row and writes the JSON file.
/// Returns false if a stage gave a wrong result; its row then says so and has no times.
/// Errors: invalid_argument for a file that cannot be read or written, and for what the selectors refuse.
bool run_bench(const BenchOptions& options);

}  // namespace thinwire::tools
