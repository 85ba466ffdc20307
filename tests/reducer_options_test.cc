// reducer.h: presets, what options are refused, and the words in which ranks compare them.
#include <cmath>
#include <limits>

#include "failures.h"

namespace thinwire::test {
namespace {

TEST(Options, PresetsAreWhatThePapersSay) {
  EXPECT_EQ(dense().all_reduce, SparseAllReduce::dense);
  EXPECT_EQ(top_k().selector, Selector(TopK{0.001}));
  EXPECT_EQ(top_k(0.25).selector, Selector(TopK{0.25}));
  EXPECT_EQ(top_k().unit, Unit::bucket);
  EXPECT_EQ(redsync().selector, Selector(TopK{0.001}));
  EXPECT_EQ(redsync(0.01).selector_by_size,
            (std::vector<SizedSelector>{{131'072, TrimmedTopK{0.01, 0.2}}, {4'194'304, ThresholdSearch{0.01, 5}}}));
  const ReducerOptions quantized = redsync_quantized(0.01, {"*decoder*"});
  EXPECT_EQ(quantized.codec.values, ValueCoding::shared_mean);
  EXPECT_TRUE(quantized.rounding_feedback);
  EXPECT_EQ(quantized.selector_by_size.back().selector, Selector(ThresholdSearch{0.01, 1})) << "nothing to reuse";
  EXPECT_EQ(quantized.rules.at(0).pattern, "*decoder*");
  EXPECT_EQ(quantized.rules.at(0).values, ValueCoding::f32);
  EXPECT_EQ(dgc().selector, Selector(SampledTopK{0.001, 0.01}));
  EXPECT_EQ(dgc().unit, Unit::parameter);
  EXPECT_EQ(redsync().unit, Unit::parameter);
  EXPECT_TRUE(redsync().momentum_masking);
  EXPECT_EQ(dragonn().selector, Selector(HashedSlots{0.01, HashedSlots::Layout::b, 0.01})) << "of small units";
  EXPECT_EQ(dragonn().selector_by_size,
            (std::vector<SizedSelector>{{131'072, HashedSlots{0.001, HashedSlots::Layout::b, 0.01}}}));
  EXPECT_EQ(dragonn({.density = 0.02, .layout = HashedSlots::Layout::a}).selector,
            Selector(HashedSlots{0.02, HashedSlots::Layout::a, 0.01}));
  EXPECT_EQ(dragonn().unit, Unit::parameter);
  for (const ReducerOptions& options : {top_k(), redsync(), redsync_quantized(), dragonn(), dgc()}) {
    EXPECT_EQ(options.all_reduce, SparseAllReduce::all_gather);
    EXPECT_EQ(options.dense_below, 10'240u);
    EXPECT_TRUE(options.error_feedback);
  }
  EXPECT_TRUE(says(error_of([] { redsync(0.0); }), ErrorCode::invalid_argument, {"density"}));
  EXPECT_TRUE(says(error_of([] { dragonn({.density = 1.5}); }), ErrorCode::invalid_argument, {"density", "1.5"}));
}

TEST(Options, EveryFieldIsInWords) {
  ReducerOptions options;
  options.rules = {{"fc.*", true, 0.5f, false, TopK{0.25}, ValueCoding::shared_mean}};
  options.selector_by_size = {{777, TopK{0.125}}};
  const std::string text = to_string(options);
  for (const char* field : {"selector=top_k(density=0.001)",
                            "unit=parameter",
                            "codec=raw_u32 x f32",
                            "all_reduce=all_gather",
                            "momentum=0",
                            "nesterov=false",
                            "momentum_masking=true",
                            "error_feedback=true",
                            "rounding_feedback=true",
                            "residual_decay=1",
                            "clip_norm=0",
                            "dense_below=10240",
                            "dense_steps=0",
                            "ramp_steps=0",
                            "ramp_stages=4",
                            "seed=0",
                            "fc.*",
                            "above 777 elements=top_k(density=0.125)",
                            "selector=top_k(density=0.25)",
                            "values=shared_mean"})
    EXPECT_NE(text.find(field), std::string::npos) << field << " in\n" << text;
}

// Ranks compare these words: what differs at all must differ in them.
TEST(Options, TheWordsTellEveryNumberApart) {
  ReducerOptions one, other;
  one.selector = TopK{0.001};
  other.selector = TopK{std::nextafter(0.001, 1.0)};
  EXPECT_NE(to_string(one), to_string(other));
  other = one;
  one.clip_norm = 0.25f;
  other.clip_norm = std::nextafter(0.25f, 1.0f);
  EXPECT_NE(to_string(one), to_string(other));
}

TEST(Options, BadOnesAreRefusedByName) {
  const auto refuses = [](const std::function<void(ReducerOptions&)>& change, const std::vector<std::string>& words) {
    ReducerOptions options;
    change(options);
    EXPECT_TRUE(says(error_of([&] { validate(options); }), ErrorCode::invalid_argument, words));
    run_ranks(1, [&](Communicator& communicator) {
      EXPECT_TRUE(says(error_of([&] { Reducer(options, model(), communicator); }), ErrorCode::invalid_argument, words));
    });
  };
  refuses([](auto& o) { o.selector = TopK{2.0}; }, {"density", "2"});
  refuses([](auto& o) { o.momentum = 1.0f; }, {"momentum", "1"});
  refuses([](auto& o) { o.momentum = -0.5f; }, {"momentum", "-0.5"});
  refuses([](auto& o) { o.momentum = std::numeric_limits<float>::quiet_NaN(); }, {"momentum"});
  refuses([](auto& o) { o.nesterov = true; }, {"nesterov"});
  refuses(
      [](auto& o) {
        o.selector = HashedSlots{0.01, HashedSlots::Layout::a};
        o.codec.indices = IndexCoding::elias_fano;
      },
      {"elias_fano", "layout a"});
  refuses(
      [](auto& o) {
        o.error_feedback = false;
        o.momentum = 0.5f;
      },
      {"error_feedback", "momentum"});
  refuses([](auto& o) { o.rules = {{"fc.*", {}, 1.5f, {}}}; }, {"momentum", "fc.*"});
  refuses([](auto& o) { o.residual_decay = 0.0f; }, {"residual_decay", "0"});
  refuses([](auto& o) { o.residual_decay = 1.5f; }, {"residual_decay", "1.5"});
  refuses([](auto& o) { o.clip_norm = -1.0f; }, {"clip_norm", "-1"});
  refuses([](auto& o) { o.clip_norm = 1e-40f; }, {"clip_norm"});
  refuses([](auto& o) { o.clip_norm = std::numeric_limits<float>::quiet_NaN(); }, {"clip_norm", "nan"});
  refuses([](auto& o) { o.selector_by_size = {{10, TopK{2.0}}}; }, {"density", "2"});
  refuses([](auto& o) { o.selector_by_size = {{10, TopK{}}, {10, TopK{}}}; }, {"selector_by_size", "10"});
  refuses([](auto& o) { o.rules = {{"fc.*", {}, {}, {}, TopK{2.0}, {}}}; }, {"density", "2"});
}

// Two options that contradict each other are refused by both names.
TEST(Options, ContradictionsAreRefusedByBothNames) {
  const auto refuses = [](const std::function<void(ReducerOptions&)>& change, const std::vector<std::string>& words) {
    ReducerOptions options;
    change(options);
    EXPECT_TRUE(says(error_of([&] { validate(options); }), ErrorCode::invalid_argument, words));
  };
  refuses(
      [](auto& o) {
        o.selector = ThresholdSearch{.density = 0.01, .reuse_interval = 5};
        o.codec.values = ValueCoding::shared_mean;
      },
      {"shared_mean", "reuse_interval", "5"});
  refuses(
      [](auto& o) {
        o.selector_by_size = {{100, ThresholdSearch{.density = 0.01, .reuse_interval = 2}}};
        o.codec.values = ValueCoding::shared_mean;
      },
      {"shared_mean", "reuse_interval", "2"});
  refuses(
      [](auto& o) {
        o.rules = {
            {"fc.*", {}, {}, {}, ThresholdSearch{.density = 0.01, .reuse_interval = 2}, ValueCoding::shared_mean}};
      },
      {"shared_mean", "reuse_interval"});
  refuses(
      [](auto& o) {
        o.selector = HashedSlots{0.01, HashedSlots::Layout::a};
        o.codec.values = ValueCoding::shared_mean;
      },
      {"shared_mean", "layout a"});
  refuses([](auto& o) { o.rounding_feedback = false; }, {"rounding_feedback", "codec.values"});
  refuses(
      [](auto& o) {
        o.codec.values = ValueCoding::shared_mean;
        o.rounding_feedback = o.error_feedback = false;
      },
      {"rounding_feedback", "error_feedback"});
  refuses(
      [](auto& o) {
        o.error_feedback = false;
        o.residual_decay = 0.5f;
      },
      {"error_feedback", "residual_decay"});
  refuses(
      [](auto& o) {
        o.all_reduce = SparseAllReduce::dense;
        o.schedule.ramp_steps = 10;
      },
      {"ramp_steps", "all_reduce"});
  refuses([](auto& o) { o.schedule = {.dense_steps = 0, .ramp_steps = 10, .ramp_stages = 0}; },
          {"ramp_steps", "ramp_stages"});
  // Rules that are sound one by one, but not together.
  run_ranks(1, [](Communicator& communicator) {
    ReducerOptions options;
    options.rules = {{"w", {}, {}, {}, HashedSlots{0.01, HashedSlots::Layout::a}, {}},
                     {"w", {}, {}, {}, {}, ValueCoding::shared_mean}};
    EXPECT_TRUE(says(error_of([&] {
                       Reducer(options, {{"w", 20'000}}, communicator);
                     }),
                     ErrorCode::invalid_argument, {"shared_mean", "layout a"}));
  });
}

TEST(Options, AParameterIsGivenOnce) {
  run_ranks(1, [](Communicator& communicator) {
    EXPECT_TRUE(says(error_of([&] {
                       Reducer(top_k(), {{"w", 3}, {"v", 3}, {"w", 3}}, communicator);
                     }),
                     ErrorCode::invalid_argument, {"'w'", "twice"}));
  });
}

}  // namespace
}  // namespace thinwire::test
