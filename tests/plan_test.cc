// plan.h: the cost model against values worked out by hand, its consequences, and the bytes that a Reducer really sends.
#include "thinwire/plan.h"

#include <cmath>
#include <limits>

#include "cases.h"
#include "helpers.h"
#include "thinwire/reducer.h"

namespace thinwire::test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

constexpr LinkCost kGigabit{.latency_seconds = 50e-6, .seconds_per_byte = 8e-9};
constexpr StageCost kStages{.select_seconds = 0.025, .decode_seconds = 0.0005, .reduce_seconds_per_byte = 0.25e-9};
constexpr Message kHundredMegabytes{.dense_bytes = 100e6, .density = 0.001};

// 100 MB at 0.1 %: 25 000 entries of 8 bytes, 0.2 MB a rank, 1.6 ms on the link.
TEST(CostModel, IsTheFormula) {
  EXPECT_DOUBLE_EQ(payload_bytes(kHundredMegabytes), 200e3);
  EXPECT_DOUBLE_EQ(payload_bytes({.dense_bytes = 100e6, .density = 0.001, .bytes_per_entry = 4}), 100e3);
  // 25 ms + 3·50 us + 7·1.6 ms + 8·0.5 ms
  EXPECT_NEAR(sparse_seconds(8, kHundredMegabytes, kGigabit, kStages), 0.04035, 1e-12);
  // 6·50 us + 2·7/8·0.8 s + 7/8·25 ms
  EXPECT_NEAR(dense_seconds(8, 100e6, kGigabit, kStages), 1.422175, 1e-12);
  // lg 3 = 1.58496250072: 25 ms + lg 3·50 us + 2·1.6 ms + 3·0.5 ms; 2·lg 3·50 us + 4/3·0.8 s + 2/3·25 ms
  EXPECT_NEAR(sparse_seconds(3, kHundredMegabytes, kGigabit, kStages), 0.029779248125036, 1e-12);
  EXPECT_NEAR(dense_seconds(3, 100e6, kGigabit, kStages), 1.083491829583405, 1e-12);
}

TEST(CostModel, OneRankNeedsNoNetwork) {
  EXPECT_DOUBLE_EQ(sparse_seconds(1, kHundredMegabytes, kGigabit, kStages), 0.0255);
  EXPECT_EQ(dense_seconds(1, 100e6, kGigabit, kStages), 0.0);
  EXPECT_FALSE(worth_compressing(1, kHundredMegabytes, kGigabit, kStages));
}

// Sparse traffic grows with the number of ranks: at 128 of them 0.1 % costs 12.8 %.
TEST(CostModel, TrafficGrowsWithTheRanks) {
  EXPECT_DOUBLE_EQ(traffic_ratio(128, 0.001), 0.128);
  EXPECT_DOUBLE_EQ(traffic_ratio(128, 0.001, 4), 0.064);
  EXPECT_DOUBLE_EQ(break_even_ranks(0.001), 1000);
  EXPECT_DOUBLE_EQ(break_even_ranks(0.001, 4), 2000);
  EXPECT_DOUBLE_EQ(break_even_ranks(1.0), 1);
  EXPECT_DOUBLE_EQ(traffic_ratio(1000, 0.001), 1);
  const LinkCost bytes_only{.latency_seconds = 0, .seconds_per_byte = 1};
  for (const double bytes_per_entry : {3.3, 4.0, 8.0})
    for (const int ranks : {2, 3, 8, 128}) {
      const Message message{.dense_bytes = 4e6, .density = 0.01, .bytes_per_entry = bytes_per_entry};
      const double ratio = sparse_seconds(ranks, message, bytes_only) / dense_seconds(ranks, 4e6, bytes_only);
      EXPECT_NEAR(ratio, traffic_ratio(ranks, 0.01, bytes_per_entry), 1e-12 * ratio);
    }
  EXPECT_TRUE(worth_compressing(99, {.dense_bytes = 4e6, .density = 0.01}, bytes_only));
  EXPECT_FALSE(worth_compressing(100, {.dense_bytes = 4e6, .density = 0.01}, bytes_only));  // as much is not less
}

// What a rank has to decode grows with p, so a training's speed-up p·C / (C + T_sparse(p)) is concave and stays below
// C / (B·beta + gamma1), and what compression gains over a dense exchange has one maximum.
TEST(CostModel, DecodingBendsTheSpeedUp) {
  const double compute_seconds = 0.2;
  for (const LinkCost& link : {kGigabit, LinkCost{5e-6, 0.8e-9}, LinkCost{0, 8e-8}}) {
    std::vector<double> speed_up;
    std::vector<double> gain;
    for (int ranks = 1; ranks <= 2048; ++ranks) {
      const double sparse = sparse_seconds(ranks, kHundredMegabytes, link, kStages);
      speed_up.push_back(ranks * compute_seconds / (compute_seconds + sparse));
      gain.push_back(dense_seconds(ranks, 100e6, link, kStages) / sparse);
    }
    const double limit = compute_seconds / (200e3 * link.seconds_per_byte + kStages.decode_seconds);
    EXPECT_LT(speed_up.back(), limit);
    for (std::size_t i = 2; i < speed_up.size(); ++i)
      ASSERT_LT(speed_up[i] - speed_up[i - 1], speed_up[i - 1] - speed_up[i - 2]) << i + 1 << " ranks";
    int maxima = 0;
    for (std::size_t i = 1; i + 1 < gain.size(); ++i) maxima += gain[i] > gain[i - 1] && gain[i] >= gain[i + 1];
    EXPECT_EQ(maxima, 1);
    EXPECT_LT(gain.back(), gain[7]);
  }
}

TEST(CostModel, DragonnsRuleCountsCompression) {
  EXPECT_TRUE(worth_compressing(0.2, 0.7, 1.0));
  EXPECT_FALSE(worth_compressing(0.25, 0.75, 1.0));
  EXPECT_FALSE(worth_compressing(0.5, 0.75, 1.0));
  // A small tensor is not worth it, a large one is: the selection has a fixed cost here.
  const StageCost stages{.select_seconds = 200e-6, .decode_seconds = 10e-6, .reduce_seconds_per_byte = 0};
  EXPECT_FALSE(worth_compressing(4, {.dense_bytes = 4 * 1024}, kGigabit, stages));
  EXPECT_TRUE(worth_compressing(4, {.dense_bytes = 4 * 1024 * 1024}, kGigabit, stages));
}

TEST(CostModel, BadArgumentsAreRefusedByName) {
  const auto refuses = [](const auto& body, const std::vector<std::string>& words) {
    EXPECT_TRUE(says(error_of(body), ErrorCode::invalid_argument, words));
  };
  const Message good = kHundredMegabytes;
  for (const int ranks : {0, -3}) {
    const std::vector<std::string> words = {"ranks", std::to_string(ranks)};
    refuses([&] { sparse_seconds(ranks, good, kGigabit); }, words);
    refuses([&] { dense_seconds(ranks, 1, kGigabit); }, words);
    refuses([&] { traffic_ratio(ranks, 0.1); }, words);
    refuses([&] { worth_compressing(ranks, good, kGigabit); }, words);
  }
  for (const double density : {0.0, -0.1, 1.5, kNan, kInfinity}) {
    refuses([&] { payload_bytes({.dense_bytes = 1, .density = density}); }, {"density"});
    refuses([&] { sparse_seconds(2, {.dense_bytes = 1, .density = density}, kGigabit); }, {"density"});
    refuses([&] { traffic_ratio(2, density); }, {"density"});
    refuses([&] { break_even_ranks(density); }, {"density"});
  }
  for (const double bytes : {0.0, -1.0, kNan, kInfinity}) {
    refuses([&] { payload_bytes({.dense_bytes = bytes}); }, {"dense_bytes"});
    refuses([&] { dense_seconds(2, bytes, kGigabit); }, {"dense_bytes"});
    refuses([&] { break_even_ranks(0.1, bytes); }, {"bytes_per_entry"});
    refuses([&] { payload_bytes({.dense_bytes = 1, .density = 1, .bytes_per_entry = bytes}); }, {"bytes_per_entry"});
  }
  for (const double seconds : {-1e-9, kNan, kInfinity}) {
    for (const auto& [name, field] : {std::pair{"latency_seconds", &LinkCost::latency_seconds},
                                      std::pair{"seconds_per_byte", &LinkCost::seconds_per_byte}}) {
      LinkCost link = kGigabit;
      link.*field = seconds;
      refuses([&] { sparse_seconds(2, good, link); }, {name});
      refuses([&] { dense_seconds(2, 1, link); }, {name});
    }
    for (const auto& [name, field] : {std::pair{"select_seconds", &StageCost::select_seconds},
                                      std::pair{"decode_seconds", &StageCost::decode_seconds},
                                      std::pair{"reduce_seconds_per_byte", &StageCost::reduce_seconds_per_byte}}) {
      StageCost stages = kStages;
      stages.*field = seconds;
      refuses([&] { sparse_seconds(2, good, kGigabit, stages); }, {name});
      refuses([&] { dense_seconds(2, 1, kGigabit, stages); }, {name});
    }
    refuses([&] { worth_compressing(seconds, 1, 1); }, {"compress_seconds"});
    refuses([&] { worth_compressing(1, seconds, 1); }, {"exchange_seconds"});
    refuses([&] { worth_compressing(1, 1, seconds); }, {"full_seconds"});
  }
}

// ---- what a Reducer sends ------------------------------------------------------------------------------------------

constexpr std::size_t kNumel = 20'000;
constexpr double kDenseBytes = 4.0 * kNumel;
constexpr LinkCost kBytes{.latency_seconds = 0, .seconds_per_byte = 1};

// Bytes sent by rank 0 in each of three steps of one bucket.
std::vector<StepStats> steps_of(const ReducerOptions& options, int ranks) {
  std::vector<StepStats> steps;
  run_ranks(ranks, [&](Communicator& communicator) {
    Reducer reducer(options, {{"weight", kNumel}}, communicator);
    for (std::uint32_t step = 0; step < 3; ++step) {
      std::vector<float> gradient =
          make_values(Distribution::normal, kNumel, 10 * step + std::uint32_t(communicator.rank()) + 1);
      reducer.begin_step();
      reducer.reduce({{{"weight", kNumel}}}, {gradient.data(), kNumel}).wait();
      const StepStats stats = reducer.stats();
      if (communicator.rank() == 0) steps.push_back(stats);
    }
  });
  return steps;
}

// In a settled step: (P-1) payloads, and with each at most a header of 64 bytes, a section's 32, slice bits and padding.
TEST(CostModel, TrafficIsWhatTheReducerSends) {
  for (const int ranks : {2, 3, 4, 8})
    for (const double density : {0.001, 0.01, 0.1}) {
      SCOPED_TRACE(std::to_string(ranks) + " ranks at density " + std::to_string(density));
      const Message message{.dense_bytes = kDenseBytes, .density = density};
      const StepStats last = steps_of(top_k(density), ranks).back();
      EXPECT_EQ(last.calls, 1u);
      const double model = sparse_seconds(ranks, message, kBytes);
      EXPECT_NEAR(model, (ranks - 1) * payload_bytes(message), 1e-9 * model);
      const double framing = (double(last.bytes_sent) - model) / (ranks - 1);
      EXPECT_GE(framing, 64 + 32);
      EXPECT_LE(framing, 64 + 32 + 4 + 7);
      EXPECT_NEAR(double(last.dense_bytes), dense_seconds(ranks, kDenseBytes, kBytes), 1);  // whole bytes
    }
}

// With another coding an entry costs what its payload costs; about 3.3 bytes with Elias–Fano and bf16 at 1 %.
TEST(CostModel, BytesPerEntryAreThoseOfTheCoding) {
  ReducerOptions options = top_k(0.01);
  options.codec = {IndexCoding::elias_fano, ValueCoding::bf16};
  const SectionShape entries{.dense = false, .capacity = 200, .extent = kNumel};
  const SectionShape none{.dense = false, .capacity = 0, .extent = kNumel};
  const double framing = double(payload_bound(options.codec, 1, {&none, 1}));
  const Message message{.dense_bytes = kDenseBytes,
                        .density = 0.01,
                        .bytes_per_entry = (double(payload_bound(options.codec, 1, {&entries, 1})) - framing) / 200};
  EXPECT_GT(message.bytes_per_entry, 2.5);
  EXPECT_LT(message.bytes_per_entry, 3.5);
  for (const int ranks : {2, 4}) {
    const double sent = double(steps_of(options, ranks).back().bytes_sent);
    EXPECT_NEAR(sent, sparse_seconds(ranks, message, kBytes) + (ranks - 1) * framing, 1e-6 * sent);
  }
}

TEST(CostModel, ADenseStepSendsWhatTheModelSays) {
  for (const int ranks : {2, 3, 4}) {
    const StepStats last = steps_of(dense(), ranks).back();
    const double model = dense_seconds(ranks, kDenseBytes, kBytes);
    EXPECT_GE(double(last.bytes_sent), model - 1);
    EXPECT_LE(double(last.bytes_sent), model + (ranks - 1) * (64 + 4 + 4));  // and a round of headers
  }
}

}  // namespace
}  // namespace thinwire::test
