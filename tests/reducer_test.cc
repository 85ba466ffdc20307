// reducer.h, the façade itself: rules, steps, state, handles. Options: reducer_options_test.cc.
#include "thinwire/reducer.h"

#include <sys/wait.h>
#include <unistd.h>

#include <limits>

#include "failures.h"

namespace thinwire::test {
namespace {

/// Which parameters travel sparsely under these rules: those whose residual is not empty after a step at low density.
std::vector<std::string> sparse_under(const std::vector<ParameterRule>& rules, const std::vector<std::string>& names) {
  std::vector<std::string> sparse;
  run_ranks(2, [&](Communicator& communicator) {
    ReducerOptions options = options_with(TopK{0.01});
    options.rules = rules;
    std::vector<Parameter> parameters;
    Bucket bucket;
    for (const std::string& name : names) {
      parameters.push_back({name, name.ends_with("bias") ? std::size_t{20} : std::size_t{200}});
      bucket.slices.push_back({name, parameters.back().numel});
    }
    Reducer reducer(options, parameters, communicator);
    reducer.begin_step();
    reduce_all(reducer, {bucket}, communicator.rank());
    if (communicator.rank() == 0)
      for (const std::string& name : names) {
        const auto v = reducer.residual().residual(name);
        if (std::any_of(v.begin(), v.end(), [](float x) { return x != 0; })) sparse.push_back(name);
      }
  });
  return sparse;
}

TEST(Rules, DecideByPattern) {
  using Names = std::vector<std::string>;
  const Names names = {"a.weight", "a.bias", "ab.weight", "a*weight"};
  EXPECT_EQ(sparse_under({}, names), (Names{"a.weight", "ab.weight", "a*weight"}));
  EXPECT_EQ(sparse_under({{"a.*", true, {}, {}}}, names), (Names{"ab.weight", "a*weight"}));
  EXPECT_EQ(sparse_under({{"*", true, {}, {}}}, names), Names{});
  EXPECT_EQ(sparse_under({{"*", false, {}, {}}}, names), names);
  EXPECT_EQ(sparse_under({{"a?weight", true, {}, {}}}, names), Names{"ab.weight"});
  EXPECT_EQ(sparse_under({{"a\\*weight", true, {}, {}}}, names), (Names{"a.weight", "ab.weight"}));
  EXPECT_EQ(sparse_under({{"a.weigh", true, {}, {}}}, names), (Names{"a.weight", "ab.weight", "a*weight"}))
      << "the whole name matches";
  EXPECT_EQ(sparse_under({{"*", true, {}, {}}, {"*.bias", false, {}, {}}}, names), Names{"a.bias"})
      << "the last rule wins";
  EXPECT_EQ(sparse_under({{"*.bias", false, {}, {}}, {"a.*", {}, 0.5f, {}}}, names),
            (Names{"a.weight", "a.bias", "ab.weight", "a*weight"}))
      << "a rule sets only what it names";
}

TEST(Rules, SetMomentumByPattern) {
  run_ranks(1, [](Communicator& communicator) {
    ReducerOptions options;
    options.momentum = 0.5f;
    options.rules = {{"*.bias", {}, 0.0f, {}}, {"fc.weight", {}, 0.75f, true}};
    Reducer reducer(options, model(), communicator);
    std::vector<float> means;
    for (int step = 0; step < 2; ++step) {
      reducer.begin_step();
      Bucket bucket = bucket_of({"conv.bias", "conv.weight", "fc.weight"});
      means = reduce_all(reducer, {bucket}, {std::vector<float>(numel(bucket), 1.0f)})[0];
    }
    EXPECT_EQ(means[0], 1.0f);                    // no momentum
    EXPECT_EQ(means[7], 1.5f);                    // u = 0.5 · 1 + 1
    EXPECT_EQ(means[607], 0.75f * 1.75f + 1.0f);  // Nesterov: m·u + g of the new u
    EXPECT_TRUE(reducer.residual().velocity("conv.bias").empty());
  });
}

TEST(Steps, AreNumbered) {
  run_ranks(2, [](Communicator& communicator) {
    Reducer reducer(options_with(TopK{0.1}), model(), communicator);
    EXPECT_EQ(reducer.step(), 0u);
    EXPECT_EQ(reducer.state().step, 0u);
    for (std::uint64_t step = 0; step < 3; ++step) {
      reducer.begin_step();
      EXPECT_EQ(reducer.step(), step);
      reduce_all(reducer, two_buckets(), communicator.rank());
      EXPECT_EQ(reducer.step(), step);
      EXPECT_EQ(reducer.stats().step, step);
      EXPECT_EQ(reducer.state().step, step + 1);
    }
    ReducerState state = reducer.state();
    state.step = 41;
    reducer.load(state);
    EXPECT_EQ(reducer.step(), 41u);
    reducer.begin_step();
    EXPECT_EQ(reducer.step(), 41u);
    EXPECT_EQ(reducer.options(), options_with(TopK{0.1}));
  });
}

// Warm-up, new seeds in each step and the agreed sizes: all of it goes on as if nothing had happened.
TEST(State, AResumedRunEqualsAnUninterruptedOne) {
  for (const int ranks : {1, 3})
    for (const Selector& selector : selectors(0.02))
      run_ranks(ranks, [&](Communicator& communicator) {
        ReducerOptions options = options_with(selector);
        options.momentum = 0.9f;
        options.schedule.dense_steps = 4;
        options.seed = 99;
        const int rank = communicator.rank();
        Reducer whole(options, model(), communicator);
        std::vector<std::vector<std::vector<float>>> means;
        ReducerState saved;
        for (std::uint64_t step = 0; step < 10; ++step) {
          whole.begin_step();
          means.push_back(reduce_all(whole, two_buckets(), rank));
          if (step == 2 || step == 6) saved = whole.state();
          if (step != 2 && step != 6) continue;
          // A second reducer takes over from here for three steps, on the same communicator.
          Reducer resumed(options, model(), communicator);
          resumed.load(saved);
          std::vector<std::vector<std::vector<float>>> later;
          for (std::uint64_t next = 0; next < 3; ++next) {
            resumed.begin_step();
            later.push_back(reduce_all(resumed, two_buckets(), rank));
          }
          const ReducerState then = resumed.state();
          whole.load(saved);
          for (std::uint64_t next = 0; next < 3; ++next) {
            whole.begin_step();
            EXPECT_EQ(reduce_all(whole, two_buckets(), rank), later[next])
                << to_string(selector) << ", step " << step + 1 + next;
          }
          EXPECT_TRUE(same_states(whole.state().parameters, then.parameters));
          whole.load(saved);
        }
      });
}

TEST(State, ABadStateChangesNothing) {
  run_ranks(1, [](Communicator& communicator) {
    ReducerOptions options = options_with(TopK{0.1});
    options.momentum = 0.5f;
    Reducer reducer(options, model(), communicator);
    reducer.begin_step();
    reduce_all(reducer, two_buckets(), 0);
    const ReducerState good = reducer.state();
    ReducerState bad = good;
    bad.step = 7;
    bad.parameters[2].residual[5] = std::numeric_limits<float>::infinity();
    EXPECT_TRUE(says(error_of([&] { reducer.load(bad); }), ErrorCode::invalid_argument, {"'fc.weight'"}));
    bad = good;
    bad.parameters[2].name = "stranger";
    EXPECT_TRUE(says(error_of([&] { reducer.load(bad); }), ErrorCode::invalid_argument, {"'stranger'"}));
    EXPECT_EQ(reducer.step(), 0u);
    EXPECT_TRUE(same_states(reducer.state().parameters, good.parameters));
  });
}

TEST(State, VelocitiesCanBeBroughtAlong) {
  run_ranks(1, [](Communicator& communicator) {
    ReducerOptions options;
    options.momentum = 0.5f;
    Reducer reducer(options, model(), communicator);
    std::vector<float> velocity(33);
    for (std::size_t i = 0; i < 33; ++i) velocity[i] = float(i) * 4;
    reducer.set_velocity("fc.bias", velocity);
    reducer.begin_step();
    const auto mean = reduce_all(reducer, {bucket_of({"fc.bias"})}, {std::vector<float>(33, 1.0f)})[0];
    for (std::size_t i = 0; i < 33; ++i) EXPECT_EQ(mean[i], float(i) * 2 + 1);
    EXPECT_TRUE(says(error_of([&] { reducer.set_velocity("stranger", velocity); }), ErrorCode::invalid_argument,
                     {"'stranger'"}));
    EXPECT_TRUE(says(error_of([&] { reducer.set_velocity("conv.bias", velocity); }), ErrorCode::invalid_argument,
                     {"'conv.bias'"}));
    velocity[32] = std::numeric_limits<float>::quiet_NaN();
    EXPECT_TRUE(
        says(error_of([&] { reducer.set_velocity("fc.bias", velocity); }), ErrorCode::invalid_argument, {"'fc.bias'"}));
  });
}

TEST(Work, CallbacksAndHandles) {
  run_ranks(2, [](Communicator& communicator) {
    Reducer reducer(options_with(TopK{0.1}), model(), communicator);
    reducer.begin_step();
    std::vector<int> order;
    std::vector<GradientBuffer> buffers;
    for (const Bucket& bucket : two_buckets()) buffers.emplace_back(gradient_of(bucket, 0, communicator.rank()));
    for (int b = 0; b < 2; ++b)
      reducer.reduce(two_buckets()[std::size_t(b)], buffers[std::size_t(b)].view(),
                     [&order, b](std::exception_ptr error) {
                       EXPECT_EQ(error, nullptr);
                       order.push_back(b);
                     });
    reducer.residual();
    EXPECT_EQ(order, (std::vector<int>{0, 1}));
    Work work;
    EXPECT_FALSE(work.done());
    EXPECT_EQ(error_of([&] { work.wait(); }).code(), ErrorCode::invalid_argument);
    reducer.begin_step();
    Work second = reducer.reduce({}, {});  // an empty bucket is a job like any other
    second.wait();
    second.wait();
    EXPECT_TRUE(second.done());
  });
}

TEST(Close, FinishesTheQueueAndRefusesMore) {
  run_ranks(2, [](Communicator& communicator) {
    Reducer reducer(options_with(TopK{0.1}), model(), communicator);
    reducer.begin_step();
    GradientBuffer buffer(gradient_of(two_buckets()[0], 0, communicator.rank()));
    Work work = reducer.reduce(two_buckets()[0], buffer.view());
    reducer.close();
    EXPECT_TRUE(work.done());
    EXPECT_NO_THROW(work.wait());
    std::exception_ptr told;
    Work late = reducer.reduce(two_buckets()[0], buffer.view(), [&](std::exception_ptr error) { told = error; });
    EXPECT_TRUE(says(error_of([&] { late.wait(); }), ErrorCode::invalid_argument, {"closed"}));
    EXPECT_NE(told, nullptr);
    reducer.close();
  });
}

#ifndef THINWIRE_SMALL_TESTS  // ThreadSanitizer does not follow a fork of several threads
// A forked child has no lane: it lets go of the reducer without waiting for one.
TEST(Close, DoesNotHangInAForkedChild) {
  auto communicators = make_thread_communicators(1);
  auto reducer = std::make_unique<Reducer>(options_with(TopK{0.1}), model(), *communicators[0]);
  reducer->begin_step();
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(20);
    reducer.reset();
    ::_exit(7);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 7) << "status " << status;
  GradientBuffer buffer(gradient_of(two_buckets()[0], 0, 0));
  EXPECT_NO_THROW(reducer->reduce(two_buckets()[0], buffer.view()).wait());
}
#endif

}  // namespace
}  // namespace thinwire::test
