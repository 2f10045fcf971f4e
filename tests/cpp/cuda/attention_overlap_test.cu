// SPDX-License-Identifier: Apache-2.0

// block_attention behind a kernel that lets it start early and writes its metadata last: what the
// attention kernel worked out before must not be used.

#include <vector>

#include <gtest/gtest.h>

#include "cuda/attention_runs.h"
#include "diffulex/ops/warmup.h"
#include "ops/shared/cuda/pdl.cuh"

namespace diffulex::test {
namespace {

/// Waits `clocks`, then copies `count` words.
__global__ void write_late(int32_t* target, const int32_t* source, int32_t count,
                           long long clocks) {
  cuda::pdl_wait();
  cuda::pdl_launch_dependents();
  const long long start = clock64();
  while (clock64() - start < clocks) {
  }
  for (int32_t i = 0; i < count; ++i) {
    target[i] = source[i];
  }
}

TEST(CudaAttentionOverlapTest, MetadataWrittenByTheKernelBefore) {
  DIFFULEX_REQUIRE_DEVICE();
  CaseShape shape;
  shape.dtype = DType::kBF16;
  shape.head_dim = 128;
  shape.page_size = 32;
  shape.block_size = 32;
  shape.num_kv_heads = 2;
  shape.group = 4;
  std::vector<CaseRequest> requests(3);
  for (size_t r = 0; r < requests.size(); ++r) {
    requests[r].num_rows = 32;
    requests[r].num_valid = 32;
    requests[r].context = static_cast<int64_t>(640 * (r + 1));
    requests[r].start = requests[r].context;
  }
  for (const int32_t splits : {0, 1, 4, 16}) {
    AttentionCase problem(shape, requests, 3);
    RunOptions options;
    options.num_splits = splits;
    AttentionOutputs want;
    run_on_device(&problem, options, &want);
    ASSERT_FALSE(HasFatalFailure());
    problem.clear_outputs();
    BlockAttentionParams host = problem.params();
    host.num_splits = splits;
    DeviceMirror mirror;
    const BlockAttentionParams device = upload(host, &mirror);
    const auto count = static_cast<int32_t>(requests.size());
    // Before: other contexts, and one row less in every request.
    std::vector<int32_t> stale_contexts = {96, 64, 32};
    std::vector<int32_t> stale_ends;
    for (size_t r = 0; r < requests.size(); ++r) {
      stale_ends.push_back(host.valid_slices.as<const int32_t>()[r] - 1);
    }
    DeviceMirror copies;
    const TensorRef contexts = copies.upload(host.context_lens);
    const TensorRef ends = copies.upload(host.valid_slices);
    DeviceContext context(attention_workspace_bytes(shape_of(host), Device::kCuda));
    ASSERT_TRUE(warmup(context.get()).ok());
    cudaStream_t stream = nullptr;
    DIFFULEX_ASSERT_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    context.get().stream = stream;
    const size_t bytes = requests.size() * sizeof(int32_t);
    DIFFULEX_ASSERT_CUDA(
        cudaMemcpy(device.context_lens.data, stale_contexts.data(), bytes, cudaMemcpyHostToDevice));
    DIFFULEX_ASSERT_CUDA(
        cudaMemcpy(device.valid_slices.data, stale_ends.data(), bytes, cudaMemcpyHostToDevice));
    write_late<<<1, 1, 0, stream>>>(device.valid_slices.as<int32_t>(), ends.as<const int32_t>(),
                                    count, 1000);
    write_late<<<1, 1, 0, stream>>>(device.context_lens.as<int32_t>(), contexts.as<const int32_t>(),
                                    count, 200000);
    const Status status = block_attention(device, context.get());
    ASSERT_TRUE(status.ok()) << status.message();
    DIFFULEX_ASSERT_CUDA(cudaStreamSynchronize(stream));
    mirror.download();
    EXPECT_EQ(problem.out().bytes(), want.out) << "splits " << splits;
    cudaStreamDestroy(stream);
  }
}

}  // namespace
}  // namespace diffulex::test
