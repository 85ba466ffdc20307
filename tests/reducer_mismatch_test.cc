// reducer.h: ranks that do not mean the same thing find out in the first exchange, and say what differs.
#include "failures.h"

namespace thinwire::test {
namespace {

struct Mismatch {
  std::string name;
  std::function<void(ReducerOptions&, std::vector<Parameter>&)> change;  ///< on the last rank
  std::vector<std::string> words;
};

const std::vector<Mismatch> kMismatches = {
    {"density", [](auto& o, auto&) { o.selector = TopK{0.02}; }, {"density=0.01", "density=0.02"}},
    {"selector", [](auto& o, auto&) { o.selector = HashedSlots{0.01}; }, {"top_k", "hashed_slots"}},
    {"unit", [](auto& o, auto&) { o.unit = Unit::bucket; }, {"unit=parameter", "unit=bucket"}},
    {"all_reduce",
     [](auto& o, auto&) { o.all_reduce = SparseAllReduce::dense; },
     {"all_reduce=all_gather", "all_reduce=dense"}},
    {"momentum", [](auto& o, auto&) { o.momentum = 0.5f; }, {"momentum=0.25", "momentum=0.5"}},
    {"nesterov", [](auto& o, auto&) { o.nesterov = true; }, {"nesterov=false", "nesterov=true"}},
    {"masking",
     [](auto& o, auto&) { o.momentum_masking = false; },
     {"momentum_masking=true", "momentum_masking=false"}},
    {"dense_below", [](auto& o, auto&) { o.dense_below = 51; }, {"dense_below=50", "dense_below=51"}},
    {"schedule", [](auto& o, auto&) { o.schedule.dense_steps = 3; }, {"dense_steps=0", "dense_steps=3"}},
    {"ramp", [](auto& o, auto&) { o.schedule.ramp_steps = 9; }, {"ramp_steps=0", "ramp_steps=9"}},
    {"stages", [](auto& o, auto&) { o.schedule.ramp_stages = 9; }, {"ramp_stages=4", "ramp_stages=9"}},
    {"by size",
     [](auto& o, auto&) {
       o.selector_by_size = {{9, TopK{0.5}}};
     },
     {"above 9 elements"}},
    {"clipping", [](auto& o, auto&) { o.clip_norm = 1e9f; }, {"clip_norm=0", "clip_norm=1e+09"}},
    {"decay", [](auto& o, auto&) { o.residual_decay = 0.5f; }, {"residual_decay=1", "residual_decay=0.5"}},
    {"seed", [](auto& o, auto&) { o.seed = 8; }, {"seed=0", "seed=8"}},
    {"rule",
     [](auto& o, auto&) {
       o.rules.push_back({"fc.*", true, {}, {}});
     },
     {"fc.*"}},
    {"name", [](auto&, auto& p) { p[2].name = "fc.weights"; }, {"'fc.weight'", "'fc.weights'"}},
    {"numel", [](auto&, auto& p) { p[3].numel = 34; }, {"'fc.bias'", "33", "34"}},
    {"one parameter more",
     [](auto&, auto& p) {
       p.push_back({"head", 5});
     },
     {"'head'"}},
    {"one parameter less", [](auto&, auto& p) { p.pop_back(); }, {"'nothing'"}},
};

TEST(ReducerMismatch, OptionsAndParameters) {
  for (const Mismatch& mismatch : kMismatches)
    for (const int ranks : {2, 3, 5}) {
      SCOPED_TRACE(mismatch.name + " with " + std::to_string(ranks) + " ranks");
      run_ranks(ranks, [&](Communicator& communicator) {
        ReducerOptions options = options_with(TopK{0.01});
        options.momentum = 0.25f;
        std::vector<Parameter> parameters = model();
        if (communicator.rank() == ranks - 1) mismatch.change(options, parameters);
        Reducer reducer(options, parameters, communicator);
        reducer.begin_step();
        const Bucket bucket = bucket_of({"conv.weight", "conv.bias"});
        const std::vector<float> gradient = gradient_of(bucket, 0, communicator.rank());
        GradientBuffer buffer(gradient);
        Work work = reducer.reduce(bucket, buffer.view());
        std::vector<std::string> words = mismatch.words;
        words.push_back("rank 0");
        words.push_back("rank " + std::to_string(ranks - 1));
        const Error error = error_of([&] { work.wait(); });
        EXPECT_TRUE(says(error, ErrorCode::remote, words));
        const bool nesterov = options.nesterov;  // then the addend is not the gradient
        EXPECT_TRUE(nesterov || same_bits(reducer.residual().residual("conv.weight"), std::span(gradient).first(600)));
        EXPECT_STREQ(error_of([&] { reducer.begin_step(); }).what(), error.what());
      });
    }
}

/// Two good steps of `before`, then a step in which the last rank gives `theirs` where the others give `mine`.
void run_buckets(int ranks, const Bucket& mine, const Bucket& theirs, const std::vector<std::string>& words) {
  run_ranks(ranks, [&](Communicator& communicator) {
    ReducerOptions options = options_with(TopK{0.01});
    Reducer reducer(options, model(), communicator);
    for (int step = 0; step < 2; ++step) {
      reducer.begin_step();
      reduce_all(reducer, {mine}, communicator.rank());
    }
    const std::vector<ParameterState> before = reducer.residual().state();
    reducer.begin_step();
    const Bucket& bucket = communicator.rank() == ranks - 1 ? theirs : mine;
    const std::vector<float> gradient = gradient_of(bucket, 2, communicator.rank());
    GradientBuffer buffer(gradient);
    Work work = reducer.reduce(bucket, buffer.view());
    const Error error = error_of([&] { work.wait(); });
    EXPECT_TRUE(says(error, ErrorCode::remote, words));
    EXPECT_TRUE(same_states(reducer.residual().state(), accumulated(before, {bucket}, {gradient}, {})));
    expect_dead(reducer, error);
  });
}

TEST(ReducerMismatch, BucketLayouts) {
  for (const int ranks : {2, 3, 5}) {
    const std::string guilty = "rank " + std::to_string(ranks - 1);
    run_buckets(ranks, bucket_of({"conv.weight", "fc.weight"}), bucket_of({"fc.weight", "conv.weight"}),
                {guilty, "rank 0", "'conv.weight'", "'fc.weight'", "step 2"});  // of the same size
    run_buckets(ranks, bucket_of({"conv.weight", "fc.bias"}), bucket_of({"conv.weight", "conv.bias"}),
                {guilty, "rank 0", "'fc.bias'", "'conv.bias'"});  // of another size
    run_buckets(ranks, bucket_of({"conv.weight", "fc.bias"}), bucket_of({"conv.weight"}),
                {guilty, "rank 0", "'fc.bias'"});
  }
}

TEST(ReducerMismatch, KindsOfSteps) {
  run_ranks(3, [](Communicator& communicator) {
    Reducer reducer(options_with(TopK{0.01}), model(), communicator);
    for (int step = 0; step < 2; ++step) {
      reducer.begin_step();
      reduce_all(reducer, two_buckets(), communicator.rank());
    }
    reducer.begin_step(communicator.rank() == 1 ? StepMode::dense : StepMode::scheduled);
    GradientBuffer buffer(gradient_of(two_buckets()[0], 2, communicator.rank()));
    Work work = reducer.reduce(two_buckets()[0], buffer.view());
    EXPECT_TRUE(says(error_of([&] { work.wait(); }), ErrorCode::remote, {"rank 1", "dense step"}));
  });
}

TEST(ReducerMismatch, Steps) {
  for (const int ranks : {2, 5})
    run_ranks(ranks, [&](Communicator& communicator) {
      Reducer reducer(options_with(TopK{0.01}), model(), communicator);
      reducer.begin_step();
      reduce_all(reducer, two_buckets(), communicator.rank());
      ReducerState state = reducer.state();
      EXPECT_EQ(state.step, 1u);
      if (communicator.rank() == ranks - 1) state.step = 7;
      reducer.load(state);
      reducer.begin_step();
      GradientBuffer buffer(gradient_of(two_buckets()[0], 1, communicator.rank()));
      Work work = reducer.reduce(two_buckets()[0], buffer.view());
      EXPECT_TRUE(says(error_of([&] { work.wait(); }), ErrorCode::remote,
                       {"step 1", "step 7", "rank 0", "rank " + std::to_string(ranks - 1)}));
    });
}

// One rank has a bucket more: its last job meets the others' first of the next step.
TEST(ReducerMismatch, NumbersOfBuckets) {
  run_ranks(3, [](Communicator& communicator) {
    Reducer reducer(options_with(TopK{0.01}), {{"a", 600}, {"b", 600}}, communicator);
    std::vector<float> values = make_values(Distribution::normal, 600, 1);
    const auto job = [&](const char* name) {
      return reducer.reduce({{{name, 600}}}, {values.data(), 600, DType::f32, {}});
    };
    for (int step = 0; step < 2; ++step) {
      reducer.begin_step();
      job("a").wait();
      job("b").wait();
    }
    reducer.begin_step();
    job("a").wait();
    if (communicator.rank() != 1) reducer.begin_step();
    Work work = job(communicator.rank() == 1 ? "b" : "a");
    EXPECT_TRUE(says(error_of([&] { work.wait(); }), ErrorCode::remote, {"rank 1", "step 2", "step 3"}));
  });
}

}  // namespace
}  // namespace thinwire::test
