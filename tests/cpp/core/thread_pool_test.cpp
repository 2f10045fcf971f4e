// SPDX-License-Identifier: Apache-2.0
#include "diffulex/core/thread_pool.h"

#include <atomic>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

namespace diffulex::test {
namespace {

struct Counter {
  std::vector<std::atomic<int32_t>> visits;
  std::atomic<int64_t> shortest{INT64_MAX};
  int64_t end = 0;
};

void count(int64_t begin, int64_t end, void* context) {
  auto* counter = static_cast<Counter*>(context);
  for (int64_t i = begin; i < end; ++i) {
    ++counter->visits[static_cast<size_t>(i)];
  }
  int64_t seen = counter->shortest;
  while (end != counter->end && end - begin < seen &&
         !counter->shortest.compare_exchange_weak(seen, end - begin)) {
  }
}

TEST(ThreadPool, CoversTheRangeOnceInPiecesOfTheGrain) {
  for (int32_t threads = 0; threads <= 4; ++threads) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.num_threads(), std::max(threads, 1));
    for (const int64_t n : {0, 1, 7, 100, 1000}) {
      for (const int64_t grain : {1, 3, 64, 5000}) {
        Counter counter;
        counter.visits = std::vector<std::atomic<int32_t>>(static_cast<size_t>(n));
        counter.end = n;
        ThreadPool::parallel_for(0, n, grain, count, &counter, &pool);
        for (const std::atomic<int32_t>& visits : counter.visits) {
          ASSERT_EQ(visits.load(), 1);
        }
        if (counter.shortest != INT64_MAX) {
          EXPECT_GE(counter.shortest.load(), grain);
        }
      }
    }
  }
}

TEST(ThreadPool, NestedAndConcurrentLoopsFinish) {
  ThreadPool pool(3);
  struct Nested {
    ThreadPool* pool;
    std::atomic<int64_t> total{0};
  } nested{&pool, {}};
  const auto outer = [](int64_t begin, int64_t end, void* context) {
    auto* state = static_cast<Nested*>(context);
    for (int64_t i = begin; i < end; ++i) {
      const auto inner = [](int64_t first, int64_t last, void* user) {
        *static_cast<std::atomic<int64_t>*>(user) += last - first;
      };
      state->pool->run(0, 10, 1, inner, &state->total);
    }
  };
  std::thread other([&] { pool.run(0, 50, 1, outer, &nested); });
  pool.run(0, 50, 1, outer, &nested);
  other.join();
  EXPECT_EQ(nested.total.load(), 1000);
}

TEST(ThreadPool, RethrowsAndStaysUsable) {
  ThreadPool pool(3);
  const auto fail = [](int64_t begin, int64_t end, void* /*context*/) {
    if (begin <= 40 && 40 < end) {
      throw std::runtime_error("body failed");
    }
  };
  EXPECT_THROW(pool.run(0, 100, 1, fail, nullptr), std::runtime_error);
  Counter counter;
  counter.visits = std::vector<std::atomic<int32_t>>(10);
  counter.end = 10;
  pool.run(0, 10, 1, count, &counter);
  EXPECT_EQ(std::accumulate(counter.visits.begin(), counter.visits.end(), 0,
                            [](int32_t sum, const auto& visits) { return sum + visits.load(); }),
            10);
}

}  // namespace
}  // namespace diffulex::test
