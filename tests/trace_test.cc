// trace.h: the stages of every job, in order; and their JSON.
#include "thinwire/trace.h"

#include <map>

#include "training.h"

namespace thinwire::test {
namespace {

TEST(Trace, ShowsEveryStageOfEveryJobInOrder) {
  run_ranks(2, [](Communicator& communicator) {
    Reducer reducer(options_with(TopK{0.02}), model(), communicator);
    reducer.begin_step();
    reduce_all(reducer, two_buckets(), communicator.rank());
    EXPECT_TRUE(reducer.take_trace().empty());
    reducer.set_tracing(true);
    const auto before = std::chrono::steady_clock::now().time_since_epoch();
    for (int step = 1; step < 3; ++step) {
      reducer.begin_step();
      reduce_all(reducer, two_buckets(), communicator.rank());
    }
    reducer.set_tracing(false);
    reducer.begin_step();
    reduce_all(reducer, two_buckets(), communicator.rank());

    std::map<std::pair<std::uint64_t, std::string>, std::vector<std::string>> stages;
    std::int64_t last = std::chrono::duration_cast<std::chrono::nanoseconds>(before).count();
    for (const TraceEvent& event : reducer.take_trace()) {
      stages[{event.step, event.lane}].push_back(event.name);
      EXPECT_LE(event.begin_ns, event.end_ns);
      const bool is_work = event.name != "queued";
      EXPECT_LE(last, is_work ? event.begin_ns : event.end_ns);  // of the jobs only one is at work
      last = event.end_ns;
    }
    ASSERT_EQ(stages.size(), 4u);
    for (const auto& [where, names] : stages) {
      EXPECT_TRUE(where.first == 1 || where.first == 2);
      EXPECT_TRUE(where.second == "bucket 0" || where.second == "bucket 1");
      EXPECT_EQ(std::vector<std::string>(names.begin(), names.begin() + 5),
                (std::vector<std::string>{"queued", "accumulate and select", "encode", "exchange", "decode"}));
    }
    EXPECT_TRUE(reducer.take_trace().empty());
  });
}

TEST(Trace, IsWrittenAsJson) {
  const std::vector<TraceEvent> events = {
      {.name = "b", .lane = "late", .step = 7, .begin_ns = 3500, .end_ns = 4000},
      {.name = "say \"a\"\n", .lane = "early", .step = 7, .begin_ns = 1000, .end_ns = 4500},
      {.name = "c", .lane = "early", .step = 7, .begin_ns = 2000, .end_ns = 2001},
  };
  EXPECT_EQ(chrome_trace(events, "rank 0"), R"({"displayTimeUnit":"ms","traceEvents":[
{"ph":"M","pid":0,"tid":0,"name":"process_name","args":{"name":"rank 0"}},
{"ph":"M","pid":0,"tid":0,"name":"thread_name","args":{"name":"early"}},
{"ph":"X","pid":0,"tid":0,"name":"say \"a\"\u000a","ts":0,"dur":3.5,"args":{"step":7}},
{"ph":"X","pid":0,"tid":0,"name":"c","ts":1,"dur":0.001,"args":{"step":7}},
{"ph":"M","pid":0,"tid":1,"name":"thread_name","args":{"name":"late"}},
{"ph":"X","pid":0,"tid":1,"name":"b","ts":2.5,"dur":0.5,"args":{"step":7}}
]}
)");
  EXPECT_EQ(chrome_trace({}, "nobody"), R"({"displayTimeUnit":"ms","traceEvents":[
{"ph":"M","pid":0,"tid":0,"name":"process_name","args":{"name":"nobody"}}
]}
)");
}

}  // namespace
}  // namespace thinwire::test
