// parameter.h and sparse_gradient.h: the plain nouns.
#include "thinwire/parameter.h"

#include <gtest/gtest.h>

#include "thinwire/sparse_gradient.h"

namespace thinwire::test {
namespace {

TEST(Parameter, ComparesNameAndSize) {
  EXPECT_EQ((Parameter{"w", 3}), (Parameter{"w", 3}));
  EXPECT_NE((Parameter{"w", 3}), (Parameter{"w", 4}));
  EXPECT_NE((Parameter{"w", 3}), (Parameter{"b", 3}));
}

TEST(Bucket, NumelIsTheSumOfItsSlices) {
  EXPECT_EQ(numel(Bucket{}), 0u);
  EXPECT_EQ(numel(Bucket{{{"a", 5}, {"b", 0}, {"c", 70'000, false}}}), 70'005u);
  EXPECT_TRUE(BucketSlice{}.has_gradient);
}

TEST(SparseGradient, ClearsEverything) {
  SparseGradient entries{{4, 9}, {1.5f, -2.5f}, true, 77};
  EXPECT_EQ(entries.nnz(), 2u);
  entries.clear();
  EXPECT_EQ(entries.nnz(), 0u);
  EXPECT_TRUE(entries.values.empty());
  EXPECT_FALSE(entries.hashed_order);
  EXPECT_EQ(entries.hash_seed, 0u);
}

}  // namespace
}  // namespace thinwire::test
