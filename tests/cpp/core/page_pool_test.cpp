// SPDX-License-Identifier: Apache-2.0
#include "diffulex/core/page_pool.h"

#include <gtest/gtest.h>

namespace diffulex {
namespace {

TEST(PagePool, HandsOutInOrderAndTakesBackAtTheTail) {
  PagePool pool(3);
  EXPECT_EQ(pool.try_allocate(), 0);
  EXPECT_EQ(pool.try_allocate(), 1);
  pool.release(0);
  EXPECT_EQ(pool.try_allocate(), 2);
  EXPECT_EQ(pool.try_allocate(), 0);
  EXPECT_EQ(pool.try_allocate(), -1);
  EXPECT_EQ(pool.front(), -1);
  EXPECT_EQ(pool.num_free(), 0);
  EXPECT_TRUE(pool.check_integrity().ok());
}

TEST(PagePool, CountsReferencesAndRevives) {
  PagePool pool(2);
  EXPECT_EQ(pool.try_allocate(), 0);
  pool.acquire(0);
  EXPECT_EQ(pool.ref_count(0), 2);
  pool.release(0);
  EXPECT_EQ(pool.num_free(), 1);
  pool.release(0);
  EXPECT_EQ(pool.num_free(), 2);
  pool.acquire(0);  // from within the queue
  EXPECT_EQ(pool.num_free(), 1);
  EXPECT_EQ(pool.front(), 1);
  EXPECT_TRUE(pool.check_integrity().ok());
}

TEST(PagePool, MisuseIsAnInternalError) {
  PagePool pool(2);
  EXPECT_THROW(pool.release(0), InternalError);
  EXPECT_THROW((void)pool.ref_count(2), InternalError);
  EXPECT_THROW((void)pool.ref_count(-1), InternalError);
  EXPECT_THROW(PagePool(0), InternalError);
}

}  // namespace
}  // namespace diffulex
