// What the bench runs on: values of a distribution or a file, threads side by side, and the passes that it compares to.
#pragma once

#include <barrier>
#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace thinwire::tools {

/// Names that `make_values` knows: gauss, laplace, student_t3.
const std::vector<std::string>& distributions();

/// [numel] values drawn from the distribution, the same for the same seed.
std::vector<float> make_values(const std::string& distribution, std::size_t numel, unsigned seed);

/// The float32 values of a NumPy file in C order, any shape.
/// Errors: invalid_argument naming the file, and what is wrong with it.
std::vector<float> read_npy(const std::string& path);

/// `values` repeated to [numel].
std::vector<float> tile(std::span<const float> values, std::size_t numel);

/// The sum of the values, as fast as memory delivers them: the read pass that times are compared to.
float read_pass(std::span<const float> values);

/// u <- m·u + g; v <- v + u, as fast as memory allows, and nothing else.
void update_pass(float momentum, const float* g, float* u, float* v, std::size_t count);

/// Threads that do the same thing at the same time, each on its own data, as ranks on one machine do.
class Team {
 public:
  explicit Team(int threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const noexcept { return size_; }
  /// Seconds from the common start until the last f(thread) has ended.
  double time(const std::function<void(int thread)>& f);

 private:
  int size_;
  std::barrier<> start_;
  std::barrier<> end_;
  const std::function<void(int)>* job_ = nullptr;  // null ends the threads
  std::vector<std::thread> helpers_;               // all but the caller
};

}  // namespace thinwire::tools
