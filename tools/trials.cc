#include "trials.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <span>

#include "core/array.h"
#include "reference/selection.h"
#include "select/candidates.h"
#include "workload.h"

namespace thinwire::tools {
namespace {

constexpr float kMomentum = 0.9f;

bool same(const SparseGradient& a, const SparseGradient& b) {
  return a.indices == b.indices && std::ranges::equal(a.values, b.values) && a.hashed_order == b.hashed_order;
}

// Everything at or above a known threshold: the k-th magnitude.
class Filter : public Trial {
 public:
  Filter(std::vector<float> values, double density) : values_(std::move(values)) {
    bytes = 4 * values_.size();
    entries = target_count(TopK{density}, values_.size());
    expected_ = reference::top_k({&unit_, 1}, density);
    for (const float value : expected_.values) threshold_ = std::min(threshold_, reference::key(value));
  }
  bool verify() override {
    run(0);
    return same(out_, expected_);
  }
  void run(std::size_t) override {
    candidates_.begin(entries, threshold_, Side::both);
    candidates_.collect(UnitView(&unit_, 1));
    candidates_.finish(out_, taken_);
  }

 private:
  std::vector<float> values_;
  UnitSegment unit_{values_.data(), values_.size(), 0};
  SparseGradient expected_;
  std::uint32_t threshold_ = kNoBound;
  Candidates candidates_;
  SparseGradient out_;
  TakenEntries taken_;
};

class Select : public Trial {
 public:
  Select(std::vector<float> values, const Selector& selector) : values_(std::move(values)), selector_(selector) {
    bytes = 4 * values_.size();
  }
  bool verify() override {
    run(0);
    entries = out_.nnz();
    return same(out_, reference::select(selector_, {&unit_, 1}, 0));
  }
  void run(std::size_t repetition) override {
    select(selector_, {&unit_, 1}, static_cast<std::uint32_t>(repetition), scratch_, out_);
    fallbacks += scratch_.fallbacks();
  }

 private:
  std::vector<float> values_;
  UnitSegment unit_{values_.data(), values_.size(), 0};
  Selector selector_;
  Selection scratch_;
  SparseGradient out_;
};

// The residual of one parameter. Its gradients differ from step to step: windows of one longer array, so that making them
// costs nothing.
class Step : public Trial {
 public:
  Step(std::vector<float> source, std::size_t numel) : numel_(numel), source_(std::move(source)) {
    bytes = 20 * numel;
    residual_.add({"weight", numel}, {kMomentum});
    segment_ = residual_.segment("weight", numel, 0);
    u_.resize(numel);
    v_.resize(numel);
  }
  static std::size_t source_numel(std::size_t numel) { return numel + kWindows * 4096; }
  void bare() override { update_pass(kMomentum, gradient(bare_step_++), u_.data(), v_.data(), numel_); }

 protected:
  const float* gradient(std::size_t step) const { return source_.data() + step * 37 % kWindows * 4096; }
  GradientView view(std::size_t step) const { return {const_cast<float*>(gradient(step)), numel_}; }

  // Two steps, because the first one's u and v are the gradient; then both against the plain formula.
  bool verify_against(const std::function<void(std::size_t step)>& run, const std::function<bool()>& settle) {
    std::ranges::fill(u_, 0.0f);
    std::ranges::fill(v_, 0.0f);
    for (std::size_t step = 0; step < 2; ++step) {
      run(step);
      const float* g = gradient(step);
      for (std::size_t i = 0; i < numel_; ++i) {
        u_[i] = kMomentum * u_[i] + g[i];
        v_[i] += u_[i];
      }
      if (!settle()) return false;
      if (!std::ranges::equal(residual_.residual("weight"), v_)) return false;
      if (!std::ranges::equal(residual_.velocity("weight"), u_)) return false;
    }
    return true;
  }

  static constexpr std::size_t kWindows = 64;
  std::size_t numel_;
  std::vector<float> source_;
  Residual residual_;
  Residual::Segment segment_;
  FloatArray u_;
  FloatArray v_;
  std::size_t bare_step_ = 0;
};

class UpdateOnly : public Step {
 public:
  using Step::Step;
  bool verify() override {
    return verify_against([this](std::size_t step) { run(step); }, [] { return true; });
  }
  void run(std::size_t repetition) override { Residual::accumulate({&segment_, 1}, view(repetition)); }
  bool has_bare() const override { return true; }
};

// Accumulate, select and settle, as the reducer does it.
class FusedStep : public Step {
 public:
  FusedStep(std::vector<float> source, std::size_t numel, const Selector& selector)
      : Step(std::move(source), numel), selector_(selector) {}
  bool verify() override {
    std::size_t step = 0;
    return verify_against([this](std::size_t s) { run(s); },
                          [&] {
                            const UnitSegment unit{v_.data(), v_.size(), 0};
                            const auto seed = static_cast<std::uint32_t>(step++);
                            const SparseGradient expected = reference::select(selector_, {&unit, 1}, seed);
                            for (const std::uint32_t index : expected.indices)
                              if (index != kEmptySlot) v_[index] = u_[index] = 0.0f;
                            entries = sent_.nnz();
                            return same(sent_, expected);
                          });
  }
  void run(std::size_t repetition) override {
    accumulate_and_select(selector_, {&segment_, 1}, view(repetition), static_cast<std::uint32_t>(repetition), true,
                          scratch_, sent_, taken_);
    residual_.settle({&segment_, 1}, sent_, true, std::move(taken_));
    residual_.commit();
    fallbacks += scratch_.fallbacks();
  }
  bool has_bare() const override { return true; }

 private:
  Selector selector_;
  Selection scratch_;
  SparseGradient sent_;
  TakenEntries taken_;
};

// A payload of one sparse section: the exact top-k of the values.
class Coding : public Trial {
 public:
  Coding(const std::vector<float>& values, double density, const Codec& codec)
      : numel_(values.size()), codec_(codec), sum_(values.size()) {
    const UnitSegment unit{values.data(), values.size(), 0};
    select(TopK{density}, {&unit, 1}, 0, sent_);
    entries = sent_.nnz();
    round_values(codec.values, sent_.values);
    header_.slices = 1;
    const SectionShape shape{.dense = false, .capacity = entries, .extent = static_cast<std::uint32_t>(values.size())};
    payload_.resize(payload_bound(codec_, 1, {&shape, 1}));
    bytes = encode_once();
    bits_per_entry = 8.0 * static_cast<double>(bytes) / static_cast<double>(entries);
  }
  bool verify() override {
    std::ranges::fill(sum_, 0.0f);
    encode_once();
    decode_once();
    std::vector<float> expected(numel_);
    for (std::size_t j = 0; j < sent_.nnz(); ++j) expected[sent_.indices[j]] += sent_.values[j];
    return std::ranges::equal(sum_, expected);
  }

 protected:
  std::size_t encode_once() {
    const std::array<Section, 1> sections = {SparseSection{
        .begin = 0, .extent = static_cast<std::uint32_t>(numel_), .indices = sent_.indices, .values = sent_.values}};
    return encode(codec_, header_, {true}, sections, payload_);
  }
  void decode_once() {
    DecodeCursor cursor;
    const Payload payload = validate(std::span(payload_).first(bytes), numel_);
    decode_add(payload, 0, sum_, cursor);
  }

 private:
  std::size_t numel_;
  Codec codec_;
  PayloadHeader header_;
  SparseGradient sent_;
  std::vector<std::byte> payload_;
  std::vector<float> sum_;
};

class Encode : public Coding {
 public:
  using Coding::Coding;
  void run(std::size_t) override { encode_once(); }
};

// Validate and add to the sum.
class Decode : public Coding {
 public:
  using Coding::Coding;
  void run(std::size_t) override { decode_once(); }
};

}  // namespace

Selector selector_of(const std::string& name, double density) {
  if (name == "top_k") return TopK{density};
  if (name == "trimmed_top_k") return TrimmedTopK{density};
  if (name == "hashed_slots_a") return HashedSlots{density, HashedSlots::Layout::a};
  if (name == "threshold_search") return ThresholdSearch{density};
  if (name == "sampled_top_k") return SampledTopK{density};
  return HashedSlots{density, HashedSlots::Layout::b};
}

const std::vector<std::pair<std::string, Codec>>& codecs() {
  static const std::vector<std::pair<std::string, Codec>> list = [] {
    std::vector<std::pair<std::string, Codec>> all;
    for (const IndexCoding indices : {IndexCoding::raw_u32, IndexCoding::elias_fano})
      for (const ValueCoding values : {ValueCoding::f32, ValueCoding::bf16, ValueCoding::f16})
        all.emplace_back(to_string(Codec{indices, values}), Codec{indices, values});
    return all;
  }();
  return list;
}

std::unique_ptr<Trial> make_trial(const Cell& cell, const std::function<std::vector<float>(std::size_t)>& values) {
  if (cell.stage == "update_only")
    return std::make_unique<UpdateOnly>(values(Step::source_numel(cell.numel)), cell.numel);
  if (cell.stage == "fused_step")
    return std::make_unique<FusedStep>(values(Step::source_numel(cell.numel)), cell.numel,
                                       selector_of(cell.selector, cell.density));
  if (cell.stage == "filter") return std::make_unique<Filter>(values(cell.numel), cell.density);
  if (cell.stage == "select")
    return std::make_unique<Select>(values(cell.numel), selector_of(cell.selector, cell.density));
  const Codec codec = std::ranges::find(codecs(), cell.selector, &std::pair<std::string, Codec>::first)->second;
  if (cell.stage == "encode") return std::make_unique<Encode>(values(cell.numel), cell.density, codec);
  return std::make_unique<Decode>(values(cell.numel), cell.density, codec);
}

}  // namespace thinwire::tools
