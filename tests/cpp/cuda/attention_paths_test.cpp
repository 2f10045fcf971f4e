// SPDX-License-Identifier: Apache-2.0

// block_attention on every path a device can take (Hopper, sm_80 with the shared memory of a large
// and of a small device, generic) where shapes or data are unusual: many query heads per KV head,
// visible NaN, long batches, caches past 2^31 elements.

#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "cuda/attention_runs.h"
#include "diffulex/ops/kv.h"
#include "ops/attention/config.h"

namespace diffulex::test {
namespace {

/// A way to run; the device's own path first.
struct Path {
  const char* name;
  RunOptions options;
};

std::vector<Path> all_paths() {
  std::vector<Path> paths = {{"own", {}}, {"163 KiB", {}}, {"99 KiB", {}}, {"generic", {}}};
  paths[1].options.shared_memory_limit = kMediumSharedMemory;
  paths[2].options.shared_memory_limit = kSmallSharedMemory;
  paths[3].options.shift = 1;  // unaligned rows
  paths[3].options.shared_memory_limit = kSmallSharedMemory;
  return paths;
}

CaseRequest block_causal(int64_t rows, int64_t context) {
  CaseRequest request;
  request.num_rows = rows;
  request.num_valid = rows;
  request.context = context;
  request.start = context;
  return request;
}

CaseShape plain_shape(int64_t head_dim, int64_t group) {
  CaseShape shape;
  shape.dtype = DType::kBF16;
  shape.head_dim = head_dim;
  shape.page_size = 32;
  shape.block_size = 32;
  shape.num_kv_heads = 1;
  shape.group = group;
  return shape;
}

/// Every path against the CPU kernel.
void expect_all_paths(AttentionCase* problem, DType dtype, const std::vector<int32_t>& splits,
                      const std::string& what) {
  run_on_cpu(problem);
  const TestTensor want = problem->out();
  const std::vector<float> want_lse = problem->lse();
  for (const Path& path : all_paths()) {
    for (const int32_t num_splits : splits) {
      RunOptions options = path.options;
      options.num_splits = num_splits;
      AttentionOutputs outputs;
      run_on_device(problem, options, &outputs);
      ASSERT_FALSE(testing::Test::HasFatalFailure()) << what << ", " << path.name;
      ASSERT_LT(worst_difference(*problem, want, want_lse, dtype), 1.0)
          << what << ", " << path.name << ", splits " << num_splits;
    }
  }
}

TEST(CudaAttentionPathsTest, ManyQueryHeadsPerKvHead) {
  DIFFULEX_REQUIRE_DEVICE();
  uint64_t seed = 0;
  for (const int64_t head_dim : {64, 128, 256, 512}) {
    for (const int64_t group : {9, 16, 20, 32, 33, 64, 65, 127, 128, 130}) {
      if (group % 8 != 0 && head_dim != 512 && head_dim != 128) {
        continue;
      }
      const CaseShape shape = plain_shape(head_dim, group);
      AttentionCase problem(shape, {block_causal(7, 600), block_causal(1, 40)}, ++seed);
      expect_all_paths(&problem, shape.dtype, {0, 1, 3},
                       "D " + std::to_string(head_dim) + " G " + std::to_string(group));
      if (HasFatalFailure()) {
        return;
      }
    }
  }
}

/// The instances that a device with 99 KiB of shared memory gets, over masks, windows and pages.
TEST(CudaAttentionPathsTest, SmallSharedMemoryMatchesCpu) {
  DIFFULEX_REQUIRE_DEVICE();
  for (uint64_t seed = 0; seed < num_seeds(64); ++seed) {
    std::mt19937_64 random(seed + 5000);
    CaseShape shape;
    shape.dtype = seed % 2 == 0 ? DType::kBF16 : DType::kF16;
    shape.head_dim = std::vector<int64_t>{64, 128, 256, 512}[seed / 2 % 4];
    shape.num_kv_heads = 2;
    shape.group = pick(&random, {1, 4, 7, 16});
    shape.page_size = pick(&random, {4, 16, 32, 64});
    shape.block_size = pick(&random, {4, 16, 32});
    shape.window = pick(&random, {0, 100});
    shape.softcap = static_cast<double>(pick(&random, {0, 30}));
    shape.padding_rows = 2;
    std::vector<CaseRequest> requests(3);
    for (CaseRequest& request : requests) {
      request = random_request(&random, shape.block_size, shape.page_size, 700);
    }
    AttentionCase problem(shape, requests, seed);
    run_on_cpu(&problem);
    const TestTensor want = problem.out();
    const std::vector<float> want_lse = problem.lse();
    RunOptions options;
    options.shared_memory_limit = kSmallSharedMemory;
    options.num_splits = static_cast<int32_t>(seed % 4);
    options.batch_invariant = seed % 5 == 0;
    AttentionOutputs outputs;
    run_on_device(&problem, options, &outputs);
    ASSERT_FALSE(HasFatalFailure());
    ASSERT_LT(worst_difference(problem, want, want_lse, shape.dtype), 1.0)
        << "seed " << seed << " D " << shape.head_dim << " G " << shape.group;
  }
}

/// fp32 and odd head dims with the small tile of the generic kernel, against fp64.
TEST(CudaAttentionPathsTest, SmallSharedMemoryGenericMatchesFp64) {
  DIFFULEX_REQUIRE_DEVICE();
  for (uint64_t seed = 0; seed < num_seeds(30); ++seed) {
    std::mt19937_64 random(seed + 7000);
    CaseShape shape;
    shape.dtype = seed % 3 == 0 ? DType::kBF16 : DType::kF32;
    shape.head_dim = pick(&random, {16, 96, 256, 320, 376, 400, 512});
    shape.num_kv_heads = 2;
    shape.group = pick(&random, {1, 3, 8});
    shape.page_size = pick(&random, {4, 16});
    shape.block_size = 8;
    std::vector<CaseRequest> requests(3);
    for (CaseRequest& request : requests) {
      request = random_request(&random, shape.block_size, shape.page_size, 200);
    }
    AttentionCase problem(shape, requests, seed);
    RunOptions options;
    options.shared_memory_limit = kSmallSharedMemory;
    options.num_splits = static_cast<int32_t>(seed % 3);
    options.shift = 1;
    AttentionOutputs outputs;
    run_on_device(&problem, options, &outputs);
    ASSERT_FALSE(HasFatalFailure());
    ASSERT_LT(problem.worst_error(), 1.0) << "seed " << seed << " D " << shape.head_dim;
  }
}

/// A NaN that a row sees must reach it, however its keys are divided; so must an infinite value.
TEST(CudaAttentionPathsTest, VisibleNanIsNeverDropped) {
  DIFFULEX_REQUIRE_DEVICE();
  for (const int64_t head_dim : {64, 128, 256, 512}) {
    const CaseShape shape = plain_shape(head_dim, 4);
    const int64_t context = 2048;
    for (const int64_t key : {int64_t{5}, int64_t{1300}, context + 3}) {
      for (const bool is_value : {false, true}) {
        for (const double value : {kNaN, kInf}) {
          if (!is_value && std::isinf(value)) {
            continue;  // may stand for a weight of 0
          }
          AttentionCase problem(shape, {block_causal(32, context)}, 11);
          for (size_t page = 0; page < static_cast<size_t>(context / shape.page_size); ++page) {
            problem.page_table()[page] =
                static_cast<int32_t>(page) % static_cast<int32_t>(problem.num_pages());
          }
          problem.fill_caches(0.5);  // the table is another than that of the case
          problem.plant(0, key, is_value, value);
          for (const Path& path : all_paths()) {
            for (const int32_t splits : {1, 2, 5, 8, 16, 32}) {
              RunOptions options = path.options;
              options.num_splits = splits;
              AttentionOutputs outputs;
              run_on_device(&problem, options, &outputs);
              ASSERT_FALSE(HasFatalFailure());
              for (int64_t row = 0; row < 32; ++row) {
                for (int64_t head = 0; head < 4; ++head) {
                  ASSERT_FALSE(std::isfinite(problem.out().get({row, head, 0})))
                      << path.name << " D " << head_dim << " splits " << splits << " key " << key
                      << " of V " << is_value << " row " << row;
                  ASSERT_EQ(std::isfinite(problem.out().get({row, head, 1})), is_value)
                      << path.name << " D " << head_dim << " splits " << splits << " key " << key;
                }
              }
            }
          }
        }
      }
    }
  }
}

/// More requests than a scheduler warp walks at a time, and than 32 such walks.
TEST(CudaAttentionPathsTest, HundredsOfRequests) {
  DIFFULEX_REQUIRE_DEVICE();
  for (const int count : {72, 1023, 1100}) {
    std::mt19937_64 random(static_cast<uint64_t>(count));
    CaseShape shape = plain_shape(64, 4);
    shape.page_size = 16;
    shape.block_size = 4;
    std::vector<CaseRequest> requests;
    for (int i = 0; i < count; ++i) {
      requests.push_back(i % 7 == 0 ? CaseRequest() : random_request(&random, 4, 16, 40));
    }
    AttentionCase problem(shape, requests, 6);
    expect_all_paths(&problem, shape.dtype, {0, 2}, std::to_string(count) + " requests");
    if (HasFatalFailure()) {
      return;
    }
  }
}

/// A cache of more than 2^31 elements whose last pages are read and written.
TEST(CudaAttentionPathsTest, PoolsPast31Bits) {
  DIFFULEX_REQUIRE_DEVICE();
  const CaseShape shape = [] {
    CaseShape result = plain_shape(128, 4);
    result.num_kv_heads = 8;
    return result;
  }();
  constexpr int64_t kPageElements = 32 * 8 * 128;
  constexpr int64_t kPages = (int64_t{1} << 31) / kPageElements + 64;
  constexpr size_t kBytes = static_cast<size_t>(kPages * kPageElements) * 2;
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  DIFFULEX_ASSERT_CUDA(cudaMemGetInfo(&free_bytes, &total_bytes));
  if (free_bytes < 2 * kBytes + (size_t{1} << 30)) {
    GTEST_SKIP() << "needs " << (2 * kBytes >> 20) << " MiB of device memory, has "
                 << (free_bytes >> 20);
  }
  AttentionCase problem(shape, {block_causal(32, 640), block_causal(4, 100)}, 3);
  const DeviceBuffer k_pool(kBytes);
  const DeviceBuffer v_pool(kBytes);
  // What lies in the first pages must not be taken for the last.
  DIFFULEX_ASSERT_CUDA(cudaMemset(k_pool.data(), 0xFF, kBytes));
  DIFFULEX_ASSERT_CUDA(cudaMemset(v_pool.data(), 0xFF, kBytes));
  for (const Path& path : all_paths()) {
    for (const int32_t splits : {1, 4}) {
      RunOptions options = path.options;
      options.num_splits = splits;
      AttentionOutputs want;
      run_on_device(&problem, options, &want);
      ASSERT_FALSE(HasFatalFailure());
      problem.clear_outputs();
      BlockAttentionParams host = problem.params();
      host.num_splits = splits;
      DeviceMirror mirror(options.shift);
      BlockAttentionParams device = upload(host, &mirror);
      // An unaligned pool ends one page earlier.
      const int64_t pages = kPages - (options.shift > 0 ? 1 : 0);
      const int64_t first = pages - problem.num_pages();
      const auto place = [&](const DeviceBuffer& pool, const TensorRef& source) {
        TensorRef result = source;
        result.data = pool.data() + options.shift * 2;
        result.size[0] = pages;
        DeviceMirror::check(
            cudaMemcpy(static_cast<uint8_t*>(result.data) + first * kPageElements * 2, source.data,
                       static_cast<size_t>(problem.num_pages() * kPageElements) * 2,
                       cudaMemcpyDeviceToDevice));
        return result;
      };
      device.k_cache = place(k_pool, device.k_cache);
      device.v_cache = place(v_pool, device.v_cache);
      std::vector<int32_t> table = problem.page_table();
      for (int32_t& page : table) {
        page += page >= 0 && page < problem.num_pages() ? static_cast<int32_t>(first) : 0;
      }
      DeviceMirror table_mirror(options.shift);
      device.page_table =
          table_mirror.upload(ref_of(table, {host.page_table.size[0], host.page_table.size[1]}));
      DeviceContext context(attention_workspace_bytes(shape_of(host), Device::kCuda));
      context.get().shared_memory_limit = options.shared_memory_limit;
      const Status status = block_attention(device, context.get());
      ASSERT_TRUE(status.ok()) << status.message();
      mirror.download();
      ASSERT_EQ(problem.out().bytes(), want.out) << path.name << " splits " << splits;
    }
  }
  // A row stored in the last slot, and nothing else.
  TestTensor row(DType::kBF16, {1, 8, 128});
  std::mt19937_64 random(8);
  row.fill_normal(&random);
  DeviceMirror mirror;
  StoreKvCacheParams store;
  store.k = mirror.upload(row.ref());
  store.v = store.k;
  store.k_cache = store.k;
  store.k_cache.data = k_pool.data();
  store.k_cache.rank = 4;
  const int64_t sizes[] = {kPages, 32, 8, 128};
  const int64_t strides[] = {kPageElements, 8 * 128, 128, 1};
  std::copy_n(sizes, 4, store.k_cache.size);
  std::copy_n(strides, 4, store.k_cache.stride);
  store.v_cache = store.k_cache;
  store.v_cache.data = v_pool.data();
  std::vector<int64_t> slots = {kPages * 32 - 1};
  store.slot_mapping = mirror.upload(ref_of(slots));
  DeviceContext context(0);
  const Status status = store_kv_cache(store, context.get());
  ASSERT_TRUE(status.ok()) << status.message();
  std::vector<uint8_t> got(8 * 128 * 2);
  for (const DeviceBuffer* pool : {&k_pool, &v_pool}) {
    DIFFULEX_ASSERT_CUDA(cudaMemcpy(got.data(), pool->data() + kBytes - got.size(), got.size(),
                                    cudaMemcpyDeviceToHost));
    ASSERT_EQ(std::memcmp(got.data(), row.bytes().data(), got.size()), 0);
  }
}

}  // namespace
}  // namespace diffulex::test
