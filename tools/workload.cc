#include "workload.h"

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <random>
#include <regex>
#include <sstream>

#include "thinwire/error.h"

namespace thinwire::tools {
namespace {

[[noreturn]] void refuse(const std::string& text) { throw Error(ErrorCode::invalid_argument, text); }

// The compiler makes one version for AVX2 and one for any x86-64; elsewhere the baseline has vectors.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#define THINWIRE_VECTORIZED __attribute__((target_clones("avx2", "default"), optimize("O3")))
#else
#define THINWIRE_VECTORIZED
#endif

template <class Distribution>
std::vector<float> draw(std::size_t numel, unsigned seed, Distribution distribution) {
  std::mt19937 random(seed);
  std::vector<float> values(numel);
  for (float& value : values) value = distribution(random);
  return values;
}

}  // namespace

const std::vector<std::string>& distributions() {
  static const std::vector<std::string> names = {"gauss", "laplace", "student_t3"};
  return names;
}

std::vector<float> make_values(const std::string& distribution, std::size_t numel, unsigned seed) {
  if (distribution == "gauss") return draw(numel, seed, std::normal_distribution<float>());
  if (distribution == "student_t3") return draw(numel, seed, std::student_t_distribution<float>(3.0f));
  if (distribution == "laplace")
    return draw(numel, seed, [magnitude = std::exponential_distribution<float>()](std::mt19937& random) mutable {
      return (random() & 1u) != 0 ? magnitude(random) : -magnitude(random);
    });
  refuse("unknown distribution '" + distribution + "'");
}

std::vector<float> read_npy(const std::string& path) {
  const std::string file = "'" + path + "'";
  std::ifstream in(path, std::ios::binary);
  if (!in) refuse(file + " cannot be opened");
  std::array<unsigned char, 12> start{};
  in.read(reinterpret_cast<char*>(start.data()), 10);
  if (!in || std::string(start.begin(), start.begin() + 6) != "\x93NUMPY") refuse(file + " is not a NumPy file");
  std::size_t header_bytes = start[8] + 256u * start[9];
  if (start[6] > 1) {  // versions 2 and 3 have a longer length field
    in.read(reinterpret_cast<char*>(start.data()) + 10, 2);
    header_bytes += 65536u * start[10] + 16777216u * start[11];
  }
  if (header_bytes > 65536) refuse(file + " has a header of " + std::to_string(header_bytes) + " bytes");
  std::string header(header_bytes, '\0');
  in.read(header.data(), static_cast<std::streamsize>(header_bytes));
  std::smatch dtype;
  if (!in || !std::regex_search(header, dtype, std::regex("'descr': *'([^']*)'")))
    refuse(file + " has a damaged header");
  if (dtype[1] != "<f4") refuse(file + " holds '" + dtype[1].str() + "', not float32 ('<f4')");
  if (header.find("'fortran_order': False") == std::string::npos) refuse(file + " is in Fortran order");
  std::smatch shape;
  if (!std::regex_search(header, shape, std::regex("'shape': *\\(([0-9, ]*)\\)")))
    refuse(file + " has a damaged header");
  std::size_t expected = 4;
  std::istringstream extents(shape[1].str());
  for (std::string extent; std::getline(extents, extent, ',');)
    if (extent.find_first_of("0123456789") != std::string::npos) expected *= std::stoull(extent);
  std::vector<float> values;
  std::size_t bytes = 0;
  for (std::array<float, 4096> block; in;) {
    in.read(reinterpret_cast<char*>(block.data()), sizeof(block));
    bytes += static_cast<std::size_t>(in.gcount());
    values.insert(values.end(), block.begin(), block.begin() + in.gcount() / 4);
  }
  if (bytes != expected)
    refuse(file + " holds " + std::to_string(bytes) + " bytes of values, its header says " + std::to_string(expected));
  if (values.empty()) refuse(file + " holds no values");
  for (std::size_t i = 0; i < values.size(); ++i)
    if (!std::isfinite(values[i])) refuse(file + " holds a value that is not finite at " + std::to_string(i));
  return values;
}

std::vector<float> tile(std::span<const float> values, std::size_t numel) {
  std::vector<float> tiled(numel);
  for (std::size_t begin = 0; begin < numel; begin += values.size())
    std::copy_n(values.begin(), std::min(values.size(), numel - begin),
                tiled.begin() + static_cast<std::ptrdiff_t>(begin));
  return tiled;
}

THINWIRE_VECTORIZED float read_pass(std::span<const float> values) {
  std::array<std::uint32_t, 64> lanes{};
  std::size_t i = 0;
  for (; i + lanes.size() <= values.size(); i += lanes.size())
    for (std::size_t lane = 0; lane < lanes.size(); ++lane)
      lanes[lane] ^= std::bit_cast<std::uint32_t>(values[i + lane]);
  std::uint32_t all = 0;
  for (; i < values.size(); ++i) all ^= std::bit_cast<std::uint32_t>(values[i]);
  for (const std::uint32_t lane : lanes) all ^= lane;
  return std::bit_cast<float>(all);
}

THINWIRE_VECTORIZED void update_pass(float momentum, const float* __restrict g, float* __restrict u,
                                     float* __restrict v, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const float velocity = momentum * u[i] + g[i];
    u[i] = velocity;
    v[i] += velocity;
  }
}

Team::Team(int threads) : size_(threads), start_(threads), end_(threads) {
  for (int thread = 1; thread < threads; ++thread)
    helpers_.emplace_back([this, thread] {
      for (start_.arrive_and_wait(); job_ != nullptr; start_.arrive_and_wait()) {
        (*job_)(thread);
        end_.arrive_and_wait();
      }
    });
}

Team::~Team() {
  job_ = nullptr;
  start_.arrive_and_wait();
  for (std::thread& helper : helpers_) helper.join();
}

double Team::time(const std::function<void(int)>& f) {
  job_ = &f;
  start_.arrive_and_wait();
  const auto begin = std::chrono::steady_clock::now();
  f(0);
  end_.arrive_and_wait();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace thinwire::tools
