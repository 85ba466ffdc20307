// A job that fails between its stages.
#include <gtest/gtest.h>

#include "reducer/job.h"
#include "training.h"

namespace thinwire::test {
namespace {

// After the pass, before anything is settled: what it took out comes back, and the next job starts afresh.
TEST(Pipeline, GivesBackWhatAFailedJobTookOut) {
  ReducerOptions options = top_k(0.02);
  options.dense_below = kDenseBelow;
  options.momentum = 0.9f;
  run_ranks(2, [&](Communicator& communicator) {
    Pipeline pipeline(options, model(), communicator);
    Residual apart;
    for (const Parameter& parameter : model()) apart.add(parameter, {0.9f});
    pipeline.begin_step(0, StepMode::scheduled);
    std::uint32_t number = 0;
    for (const Bucket& bucket : two_buckets()) {
      GradientBuffer gradient(make_values(Distribution::laplace, numel(bucket), number + 1));
      Job job;
      job.number = number++;
      job.bucket = bucket;
      job.gradient = gradient.view();
      pipeline.address(job);
      pipeline.plan(job);
      pipeline.accumulate_and_select(job);
      ASSERT_FALSE(job.plan.units.empty());
      pipeline.give_back(job);
      pipeline.give_back(job);  // once is enough
      std::uint32_t offset = 0;
      for (const BucketSlice& slice : bucket.slices) {
        const Residual::Segment segment = apart.segment(slice.name, slice.numel, offset);
        Residual::accumulate({&segment, 1}, gradient.view());
        offset += static_cast<std::uint32_t>(slice.numel);
        EXPECT_TRUE(same_bits(pipeline.residual.residual(slice.name), apart.residual(slice.name))) << slice.name;
        EXPECT_TRUE(same_bits(pipeline.residual.velocity(slice.name), apart.velocity(slice.name))) << slice.name;
      }
    }
  });
}

}  // namespace
}  // namespace thinwire::test
