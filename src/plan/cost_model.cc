// The cost model: a few numbers enter, seconds and ratios leave.
#include <cmath>
#include <sstream>

#include "core/check.h"
#include "thinwire/plan.h"

namespace thinwire {
namespace {

constexpr double kDenseElementBytes = 4.0;

void refuse_unless(bool valid, const char* name, double value, const char* wanted) {
  if (valid) return;
  std::ostringstream sentence;
  sentence << name << " is " << value << ", " << wanted;
  require(false, sentence.str());
}

void check_time(const char* name, double seconds) {
  refuse_unless(std::isfinite(seconds) && seconds >= 0.0, name, seconds, "must be finite and not negative");
}

void check_positive(const char* name, double value) {
  refuse_unless(std::isfinite(value) && value > 0.0, name, value, "must be finite and positive");
}

void check_ranks(int ranks) { refuse_unless(ranks >= 1, "ranks", ranks, "must be at least 1"); }

void check_density(double density) {
  refuse_unless(density > 0.0 && density <= 1.0, "density", density, "not in (0, 1]");
}

void check(const LinkCost& link) {
  check_time("latency_seconds", link.latency_seconds);
  check_time("seconds_per_byte", link.seconds_per_byte);
}

void check(const StageCost& stages) {
  check_time("select_seconds", stages.select_seconds);
  check_time("decode_seconds", stages.decode_seconds);
  check_time("reduce_seconds_per_byte", stages.reduce_seconds_per_byte);
}

}  // namespace

double payload_bytes(const Message& message) {
  check_positive("dense_bytes", message.dense_bytes);
  check_density(message.density);
  check_positive("bytes_per_entry", message.bytes_per_entry);
  return message.density * message.dense_bytes / kDenseElementBytes * message.bytes_per_entry;
}

double sparse_seconds(int ranks, const Message& message, const LinkCost& link, const StageCost& stages) {
  check_ranks(ranks);
  check(link);
  check(stages);
  const double p = ranks;
  return stages.select_seconds + std::log2(p) * link.latency_seconds +
         (p - 1.0) * payload_bytes(message) * link.seconds_per_byte + p * stages.decode_seconds;
}

double dense_seconds(int ranks, double dense_bytes, const LinkCost& link, const StageCost& stages) {
  check_ranks(ranks);
  check_positive("dense_bytes", dense_bytes);
  check(link);
  check(stages);
  const double p = ranks;
  const double share = (p - 1.0) / p * dense_bytes;
  return 2.0 * std::log2(p) * link.latency_seconds + 2.0 * share * link.seconds_per_byte +
         share * stages.reduce_seconds_per_byte;
}

double traffic_ratio(int ranks, double density, double bytes_per_entry) {
  check_ranks(ranks);
  return ranks / break_even_ranks(density, bytes_per_entry);
}

double break_even_ranks(double density, double bytes_per_entry) {
  check_density(density);
  check_positive("bytes_per_entry", bytes_per_entry);
  return 2.0 * kDenseElementBytes / (density * bytes_per_entry);
}

bool worth_compressing(double compress_seconds, double exchange_seconds, double full_seconds) {
  check_time("compress_seconds", compress_seconds);
  check_time("exchange_seconds", exchange_seconds);
  check_time("full_seconds", full_seconds);
  return compress_seconds + exchange_seconds < full_seconds;
}

bool worth_compressing(int ranks, const Message& message, const LinkCost& link, const StageCost& stages) {
  return sparse_seconds(ranks, message, link, stages) < dense_seconds(ranks, message.dense_bytes, link, stages);
}

}  // namespace thinwire
