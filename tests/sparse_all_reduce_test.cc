// sparse_all_reduce.h: payloads of all ranks become the mean, rounded once, in every type and across tiles.
#include "thinwire/sparse_all_reduce.h"

#include "cases.h"
#include "helpers.h"
#include "payloads.h"
#include "reference/mean.h"
#include "thinwire/codec.h"

namespace thinwire::test {
namespace {

/// What one rank sends: its bytes, and the same as a dense vector.
struct Sent {
  std::vector<std::byte> bytes;
  std::vector<float> dense;
};

/// A dense run at the start and two sparse units, of which the second is a hash table.
Sent make_sent(std::size_t numel, int rank) {
  std::mt19937 random(static_cast<std::uint32_t>(rank) * 977 + static_cast<std::uint32_t>(numel));
  Sent sent{{}, std::vector<float>(numel, 0.0f)};
  const auto at = [&](std::size_t part) { return std::uint32_t(numel * part / 4); };
  const std::vector<float> head = make_values(Distribution::normal, at(1), random());
  std::copy(head.begin(), head.end(), sent.dense.begin());
  Example example;
  example.owned.push_back(dense_section(0, head));

  std::vector<std::uint32_t> indices, hashed;
  std::vector<float> values;
  for (std::uint32_t i = at(1); i < at(3); ++i)
    if (random() % 4 == 0 || i + 1 == at(3)) {
      indices.push_back(i);
      values.push_back(std::ldexp(float(int(random() % 20001) - 10000), int(random() % 30) - 20));
      sent.dense[i] = values.back();
    }
  for (std::uint32_t i = at(3); i < numel; ++i)
    if (random() % 5 == 0) hashed.push_back(i);
  example.owned.push_back(sparse_section(at(1), at(3) - at(1), indices, values));
  example.owned.push_back(hashed_section(at(3), std::uint32_t(numel) - at(3), random(), 1 + hashed.size(), hashed));
  reference::scatter({example.owned.back().indices, example.owned.back().values}, sent.dense);
  example.header.slices = 3;
  example.has_gradient = {true, true, true};
  sent.bytes = reference::payload(example.header, example.has_gradient, example.sections());
  return sent;
}

const std::vector<std::size_t> kTileSizes =
#ifdef THINWIRE_SMALL_TESTS
    {0, 1, 2, 33, 4097};
#else
    {0, 1, 2, 33, 4097, 65'535, 65'536, 65'537, 200'001};
#endif

TEST(DecodeMean, IsTheSumInRankOrderDividedByTheRanks) {
  for (const std::size_t numel : kTileSizes)
    for (const int ranks : kRanks) {
      std::vector<Sent> sent;
      std::vector<std::vector<float>> dense;
      std::vector<Payload> payloads;
      for (int rank = 0; rank < ranks; ++rank) {
        sent.push_back(make_sent(numel, rank));
        dense.push_back(sent.back().dense);
      }
      for (const Sent& one : sent) payloads.push_back(validate(one.bytes, numel));
      const std::vector<float> mean = reference::mean(dense);
      for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
        GradientBuffer out(std::vector<float>(numel, 77.0f), dtype, 1);
        decode_mean(payloads, out.view());
        std::vector<float> expected = mean;
        for (float& value : expected) value = reference::rounded(dtype, value);
        ASSERT_TRUE(same_bits(out.floats(), expected)) << numel << ", " << ranks << " ranks, " << to_string(dtype);
        ASSERT_TRUE(out.intact());
      }
    }
}

TEST(DecodeMean, WritesZerosWhereNothingWasSent) {
  Example example;
  example.header.slices = 1;
  example.has_gradient = {true};
  example.owned = {sparse_section(0, 5, {3}, {8.0f})};
  const auto bytes = reference::payload(example.header, example.has_gradient, example.sections());
  const Payload payload = validate(bytes, 5);
  const std::vector<Payload> payloads(4, payload);
  GradientBuffer out(std::vector<float>{-1.0f, std::nanf(""), 2.0f, 3.0f, HUGE_VALF});
  decode_mean(payloads, out.view());
  EXPECT_TRUE(same_bits(out.floats(), std::vector<float>{0.0f, 0.0f, 0.0f, 8.0f, 0.0f}));
}

TEST(DenseMean, IsTheSumDividedByTheRanks) {
  for (const int ranks : kRanks) {
    run_ranks(ranks, [](Communicator& c) {
      const std::size_t numel = 4097;
      const auto values = [](int rank) {
        return make_values(Distribution::student_t3, numel, 50 + std::uint32_t(rank));
      };
      std::vector<std::vector<float>> all;
      for (int rank = 0; rank < c.size(); ++rank) all.push_back(values(rank));
      const std::vector<float> expected = reference::mean(all);

      std::vector<float> mine = values(c.rank()), mean(numel, -1.0f);
      dense_mean(c, mine, mean);
      EXPECT_TRUE(same_bits(mine, values(c.rank()))) << "the input was written to";
      EXPECT_TRUE(same_bits(mean, expected)) << c.size() << " ranks";
      dense_mean(c, mine, mine);
      EXPECT_TRUE(same_bits(mine, expected)) << "in place";
      EXPECT_EQ(c.traffic().calls, c.size() == 1 ? 0u : 2u);
    });
  }
}

TEST(SparseAllReduce, Names) {
  EXPECT_STREQ(to_string(SparseAllReduce::all_gather), "all_gather");
  EXPECT_STREQ(to_string(SparseAllReduce::dense), "dense");
}

}  // namespace
}  // namespace thinwire::test
