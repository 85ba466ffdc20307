// The invariants of one rank's path, accumulate -> select -> encode -> settle -> decode: what stays plus what was sent is
// what went in, to the bit, and every SIMD target does the same.
#include <cmath>

#include "cases.h"
#include "helpers.h"
#include "reference/residual.h"
#include "thinwire/codec.h"
#include "thinwire/reducer.h"
#include "thinwire/select.h"

namespace thinwire::test {
namespace {

constexpr std::uint32_t kFirst = 2;  // offset of the unit in its bucket
constexpr std::uint32_t kGap = 5;    // between its two segments

/// Two parameters that form one unit, with a gap between them, as a reducer drives them through the stages.
class Path {
 public:
  Path(std::size_t numel, const MomentumRule& rule, const Selector& selector, const Codec& codec = {})
      : selector_(selector), codec_(codec) {
    const std::size_t head = numel / 3;
    residual_.add({"head", head}, rule);
    residual_.add({"tail", numel - head}, rule);
    unit_ = {residual_.segment("head", head, kFirst), residual_.segment("tail", numel - head, tail_offset(head))};
    bucket_numel_ = tail_offset(head) + numel - head;
  }

  std::vector<float> spread(std::span<const float> unit_values) const {
    std::vector<float> bucket(bucket_numel_, 1e30f);
    std::copy_n(unit_values.begin(), head(), bucket.begin() + kFirst);
    std::copy(unit_values.begin() + std::ptrdiff_t(head()), unit_values.end(), bucket.begin() + tail_offset(head()));
    return bucket;
  }
  std::vector<float> gather(std::span<const float> bucket) const {
    std::vector<float> values(bucket.begin() + kFirst, bucket.begin() + kFirst + std::ptrdiff_t(head()));
    values.insert(values.end(), bucket.begin() + tail_offset(head()), bucket.end());
    return values;
  }
  std::vector<float> v() const { return both(&Residual::residual); }
  std::vector<float> u() const { return both(&Residual::velocity); }

  /// One step; returns the payload.
  std::vector<std::byte> step(std::span<const float> gradient, std::uint32_t seed, bool masking) {
    GradientBuffer buffer(spread(gradient));
    Selection selection;
    SparseGradient sent;
    TakenEntries taken;
    accumulate_and_select(selector_, unit_, buffer.view(), seed, masking, selection, sent, taken);
    const auto extent = static_cast<std::uint32_t>(bucket_numel_ - kFirst);
    round_values(codec_.values, sent.values);
    const std::vector<Section> sections = {
        SparseSection{kFirst, extent, sent.hashed_order, sent.hash_seed, sent.indices, sent.values}};
    const SectionShape shape{false, capacity(selector_, v().size()), extent};
    std::vector<std::byte> payload(payload_bound(codec_, 2, {&shape, 1}));
    PayloadHeader header;
    header.slices = 2;
    payload.resize(encode(codec_, header, {true, true}, sections, payload));
    residual_.settle(unit_, sent, masking, std::move(taken));
    residual_.commit();
    return payload;
  }

  /// What a receiver reads from the payload, as a dense vector of the unit.
  std::vector<float> decode(std::span<const std::byte> payload) const {
    std::vector<float> bucket(bucket_numel_, 0.0f);
    DecodeCursor cursor;
    decode_add(validate(payload, bucket_numel_), 0, bucket, cursor);
    return gather(bucket);
  }
  /// 1 for each element that the payload has an entry of, whatever its value.
  std::vector<float> entries(std::span<const std::byte> payload) const {
    std::vector<float> bucket(bucket_numel_, 0.0f);
    const Payload read = validate(payload, bucket_numel_);
    for (const std::uint32_t index : std::get<SparseSection>(read.sections.at(0)).indices)
      if (index != kEmptySlot) bucket[index] = 1.0f;
    return gather(bucket);
  }

 private:
  static std::uint32_t tail_offset(std::size_t head) { return static_cast<std::uint32_t>(kFirst + head + kGap); }
  std::size_t head() const { return residual_.residual("head").size(); }
  std::vector<float> both(std::span<const float> (Residual::*part)(std::string_view) const) const {
    const std::span<const float> a = (residual_.*part)("head"), b = (residual_.*part)("tail");
    std::vector<float> values(a.begin(), a.end());
    values.insert(values.end(), b.begin(), b.end());
    return values;
  }

  Residual residual_;
  Selector selector_;
  Codec codec_;
  std::vector<Residual::Segment> unit_;
  std::size_t bucket_numel_ = 0;
};

/// v' + s == a for every element, where a is the accumulated value, or with a shared mean v' == a - s, rounded; what was
/// not sent is a itself.
::testing::AssertionResult conserved(const reference::ResidualState& accumulated, const Path& path,
                                     std::span<const std::byte> payload, bool masking, ValueCoding coding) {
  const std::vector<float> v = path.v(), u = path.u(), sent = path.decode(payload), entries = path.entries(payload);
  for (std::size_t i = 0; i < v.size(); ++i) {
    const bool was_sent = entries[i] != 0;
    const bool holds = coding == ValueCoding::shared_mean
                           ? bits_of(v[i]) == bits_of(reference::add(accumulated.v[i], -sent[i]))
                           : bits_of(reference::add(v[i], sent[i])) == bits_of(accumulated.v[i]);
    if (was_sent && !holds)
      return ::testing::AssertionFailure()
             << "element " << i << ": " << v[i] << " + " << sent[i] << " != " << accumulated.v[i];
    if (!was_sent && bits_of(v[i]) != bits_of(accumulated.v[i]))
      return ::testing::AssertionFailure()
             << "element " << i << " was not sent and is " << v[i] << ", not " << accumulated.v[i];
    if (u.empty()) continue;
    const float expected_u = was_sent && masking ? 0.0f : accumulated.u[i];
    if (bits_of(u[i]) != bits_of(expected_u))
      return ::testing::AssertionFailure() << "velocity " << i << " is " << u[i] << ", not " << expected_u;
  }
  return ::testing::AssertionSuccess();
}

/// Everything that the steps of one case leave: payloads, v and u, as bytes.
std::vector<std::byte> run(const Case& c, const std::vector<std::vector<float>>& gradients, const Selector& selector,
                           const MomentumRule& rule, const Codec& codec = {}) {
  const bool masking = rule.momentum > 0;
  Path path(c.numel, rule, selector, codec);
  std::vector<std::byte> trace;
  const auto append = [&trace](const auto& values) {
    const auto bytes = std::as_bytes(std::span(values));
    trace.insert(trace.end(), bytes.begin(), bytes.end());
  };
  for (std::uint32_t step = 0; step < gradients.size(); ++step) {
    reference::ResidualState accumulated(0, rule);
    accumulated.v = path.v();
    accumulated.u = path.u();
    reference::accumulate(accumulated, rule, gradients[step]);
    const std::vector<std::byte> payload = path.step(gradients[step], c.seed + step, masking);
    EXPECT_TRUE(conserved(accumulated, path, payload, masking, codec.values))
        << to_string(selector) << ", " << to_string(codec) << " on " << c << ", step " << step;
    append(payload);
    append(path.v());
    append(path.u());
  }
  return trace;
}

std::vector<std::vector<float>> gradients_of(const Case& c) {
  return {c.values(), make_values(c.distribution, c.numel, c.seed + 500)};
}

TEST(Conservation, HoldsToTheBitAndIsTheSameOnEveryTarget) {
  for (const Case& c : small_cases()) {
    const auto gradients = gradients_of(c);
    for (const double density : kDensities)
      for (const Selector& selector : selectors(density))
        for (const MomentumRule& rule : {MomentumRule{}, MomentumRule{0.9f, false, true}}) {
          std::optional<std::vector<std::byte>> first;
          on_every_target([&] {
            const std::vector<std::byte> trace = run(c, gradients, selector, rule);
            if (!first) first = trace;
            ASSERT_EQ(trace, *first) << to_string(selector) << " on " << c << ": not the bits of the best target";
          });
        }
  }
}

// What rounding takes from a value stays in the residual, to the bit.
TEST(Conservation, HoldsForEveryCodecAndIsTheSameOnEveryTarget) {
  for (const Case& c : small_cases()) {
    const auto gradients = gradients_of(c);
    for (const double density : {0.01, 1.0})
      for (const Selector& selector : selectors(density))
        for (const Codec& codec : codecs_for(selector)) {
          std::optional<std::vector<std::byte>> first;
          on_every_target([&] {
            const std::vector<std::byte> trace = run(c, gradients, selector, {0.9f, false, true}, codec);
            if (!first) first = trace;
            ASSERT_EQ(trace, *first) << to_string(selector) << ", " << to_string(codec) << " on " << c;
          });
        }
  }
}

TEST(Conservation, HoldsOnLargeUnits) {
  for (const Case& c : large_cases()) {
    const auto gradients = gradients_of(c);
    for (const Selector& selector : selectors(0.001)) {
      run(c, gradients, selector, {0.9f, true, true});
      run(c, gradients, selector, {0.9f, true, true}, codecs_for(selector).back());
    }
  }
}

// Multiples of 2^-10 whose sums are exact: what was sent in all steps and what is left add up to all that went in.
TEST(Conservation, AddsUpExactlyOverManySteps) {
  constexpr std::size_t kNumel = 1000;
  for (const double density : {0.001, 0.01, 0.1})
    for (const Selector& selector : selectors(density)) {
      Path path(kNumel, {}, selector);
      std::vector<double> in(kNumel, 0.0), out(kNumel, 0.0);
      for (std::uint32_t step = 0; step < 100; ++step) {
        const std::vector<float> gradient = dyadic_values(kNumel, 9000 + step);
        const std::vector<float> sent = path.decode(path.step(gradient, step, false));
        for (std::size_t i = 0; i < kNumel; ++i) in[i] += gradient[i], out[i] += sent[i];
      }
      const std::vector<float> left = path.v();
      for (std::size_t i = 0; i < kNumel; ++i) ASSERT_EQ(out[i] + left[i], in[i]) << to_string(selector) << ", " << i;
    }
}

TEST(Conservation, AddsUpToRoundingOnRandomValues) {
  constexpr std::size_t kNumel = 1000;
  const MomentumRule rule{0.9f, false, true};
  for (const Selector& selector : selectors(0.01)) {
    Path path(kNumel, rule, selector);
    std::vector<double> in(kNumel, 0.0), out(kNumel, 0.0), largest(kNumel, 0.0);
    for (std::uint32_t step = 0; step < 100; ++step) {
      const std::vector<float> gradient = make_values(Distribution::student_t3, kNumel, 700 + step);
      const std::vector<float> u_before = path.u();
      const std::vector<float> sent = path.decode(path.step(gradient, step, true));
      for (std::size_t i = 0; i < kNumel; ++i) {
        in[i] += reference::add(reference::multiply(rule.momentum, u_before[i]), gradient[i]);
        out[i] += sent[i];
        largest[i] = std::max(largest[i], std::fabs(in[i] - out[i]) + std::fabs(double(sent[i])));
      }
    }
    const std::vector<float> left = path.v();
    for (std::size_t i = 0; i < kNumel; ++i)
      ASSERT_NEAR(out[i] + left[i], in[i], 100 * 6e-8 * largest[i]) << to_string(selector) << ", " << i;
  }
}

}  // namespace
}  // namespace thinwire::test
