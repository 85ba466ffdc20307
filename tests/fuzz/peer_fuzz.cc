// reducer.h: the other rank is hostile. Whatever it sends, a job ends with a mean or an Error that is one line; residuals
// stay finite, and a job that failed leaves what came, all of it.
//
// A case: options, model, then for each call what the peer answers.
#include <cstring>

#include "model.h"
#include "reference/wire.h"

namespace thinwire::fuzz {
namespace {

/// Rank 0 of two; rank 1 is made of the input.
class Peer : public Communicator {
 public:
  explicit Peer(Input& input) : input_(input) {}
  int rank() const override { return 0; }
  int size() const override { return 2; }
  void abort(const std::string&) noexcept override {}

 protected:
  void do_all_gather(std::span<const std::byte> block, std::span<std::byte> blocks) override {
    expect(blocks.size() <= std::size_t{1} << 26, "nothing large is asked for");
    std::ranges::copy(block, blocks.begin());
    std::ranges::copy(answer({block.begin(), block.end()}), blocks.begin() + std::ptrdiff_t(block.size()));
  }
  void do_all_to_all(std::span<const std::byte>, std::span<std::byte>) override { expect(false, "no all_to_all"); }
  void do_all_reduce(std::span<const float> mine, std::span<float> sum) override {
    for (std::size_t i = 0; i < mine.size(); ++i) sum[i] = mine[i] + input_.value();
  }
  void do_barrier() override {}

 private:
  /// This rank's own block, changed in some places, or anything; of the same size.
  reference::Bytes answer(reference::Bytes block) {
    const std::uint32_t kind = input_.below(8);
    if (kind == 7) {
      const std::vector<std::byte> any = input_.bytes(block.size());
      std::ranges::copy(any, block.begin());
      return block;
    }
    const bool payload = block.size() >= kHeaderBytes;
    for (std::uint32_t changes = kind; changes > 0; --changes) {
      // Anywhere, or where a header keeps its fields.
      const std::uint32_t place = input_.below(32);
      std::size_t at = place < 24 ? 4 * place : input_.take<std::uint16_t>();
      at %= block.size();
      const std::uint32_t width = 1 + input_.below(4);
      for (std::uint32_t i = 0; i < width && at < block.size(); ++i) block[at++] = std::byte(input_.below(256));
    }
    if (payload && input_.below(8) != 7) {
      const std::uint64_t used = reference::number(block, reference::kPayloadBytesAt, 8);
      if (used >= kHeaderBytes && used <= block.size()) reference::seal(block, used);
    }
    return block;
  }
  Input& input_;
};

void expect_one_line(const std::string& sentence) {
  expect(!sentence.empty() && sentence.size() < 4096, "an error is a sentence");
  expect(std::ranges::all_of(sentence, [](unsigned char c) { return c >= ' '; }), "of one line");
}

/// False after an error. The buckets hold the parameters in order.
bool step(Reducer& reducer, const std::vector<Bucket>& buckets, Input& input) {
  std::vector<std::vector<float>> gradients;
  for (const Bucket& bucket : buckets) gradients.push_back(take_gradient(bucket, input));
  std::vector<std::vector<float>> means = gradients;
  const std::vector<ParameterState> before = reducer.state().parameters;
  reducer.begin_step();
  std::vector<Work> works;  // from here on the input is the peer's
  for (std::size_t b = 0; b < buckets.size(); ++b)
    works.push_back(reducer.reduce(buckets[b], {means[b].data(), means[b].size()}));
  std::vector<float> came;
  bool failed = false;
  bool whole = true;
  for (std::size_t b = 0; b < buckets.size(); ++b) {
    for (const BucketSlice& slice : buckets[b].slices) whole = whole && slice.has_gradient;
    if (!failed) came.insert(came.end(), gradients[b].begin(), gradients[b].end());
    try {
      works[b].wait();
    } catch (const Error& error) {
      expect_one_line(error.what());
      failed = true;
    }
  }
  const std::vector<ParameterState> after = reducer.state().parameters;
  expect_finite(after);
  came.resize(numel_of(before), 0.0f);
  const bool plain = whole && reducer.options().momentum == 0 && reducer.options().residual_decay == 1 &&
                     reducer.options().error_feedback && reducer.options().clip_norm == 0;
  if (plain && failed)
    expect(same_states(after, accumulated(before, reducer.options(), came)), "a failed step leaves what came");
  return !failed;
}

}  // namespace
}  // namespace thinwire::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace thinwire;
  fuzz::Input input(data, size);
  const ReducerOptions options = fuzz::take_options(input);
  const std::vector<Parameter> parameters = fuzz::take_parameters(input);
  std::vector<Bucket> buckets;
  if (input.chance())
    buckets.push_back(fuzz::bucket_of(parameters, input));
  else
    for (const Parameter& parameter : parameters) buckets.push_back(fuzz::bucket_of({parameter}, input));
  fuzz::Peer peer(input);
  try {
    Reducer reducer(options, parameters, peer);
    for (int steps = 0; steps < 3; ++steps)
      if (!fuzz::step(reducer, buckets, input)) break;
  } catch (const Error& error) {  // options that do not go together
    fuzz::expect(error.code() == ErrorCode::invalid_argument, error.what());
  }
  return 0;
}
