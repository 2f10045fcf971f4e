// SPDX-License-Identifier: Apache-2.0

// block_attention on the device. The generic kernel is held against the fp64 reference directly;
// the tensor-core kernels, which round P, against the CPU kernel within the bounds of their dtype.
// Every case poisons what no row may see.

#include <cmath>
#include <random>

#include <gtest/gtest.h>

#include "cuda/attention_runs.h"
#include "diffulex/ops/warmup.h"

namespace diffulex::test {
namespace {

AttentionCase random_case(uint64_t seed, std::vector<int64_t> dtypes, std::vector<int64_t> dims,
                          int64_t max_context, bool any_layout, CaseShape* shape_out) {
  std::mt19937_64 random(seed);
  CaseShape shape;
  shape.dtype = static_cast<DType>(pick(&random, dtypes));
  shape.head_dim = pick(&random, dims);
  shape.num_kv_heads = uniform(&random, 1, 2);
  shape.group = pick(&random, {1, 2, 4, 7, 8});
  shape.page_size = pick(&random, {4, 8, 16, 32, 64, 256});
  shape.block_size = pick(&random, {4, 8, 16, 32, 256});
  shape.window = pick(&random, {0, 0, 1, shape.block_size, 100});
  shape.softcap = static_cast<double>(pick(&random, {0, 0, 30}));
  shape.padding_rows = uniform(&random, 0, 5);
  shape.extra_heads = uniform(&random, 0, 1);
  shape.extra_dims = pick(&random, {0, 0, 8});
  if (any_layout && uniform(&random, 0, 2) == 0) {
    shape.layout = KvLayout::kDistinct;
    shape.extra_dims = 0;
    shape.extra_heads = 0;
  }
  std::vector<CaseRequest> requests(static_cast<size_t>(uniform(&random, 1, 5)));
  for (CaseRequest& request : requests) {
    request = random_request(&random, shape.block_size, shape.page_size, max_context);
  }
  *shape_out = shape;
  return AttentionCase(shape, requests, seed);
}

TEST(CudaBlockAttentionTest, GenericKernelMatchesFp64) {
  DIFFULEX_REQUIRE_DEVICE();
  for (uint64_t seed = 0; seed < num_seeds(120); ++seed) {
    CaseShape shape;
    AttentionCase problem =
        random_case(seed, {0, 0, 1, 2}, {16, 40, 64, 96, 128, 256, 512}, 300, true, &shape);
    // Unaligned tensors take the generic path whatever the dtype.
    RunOptions options;
    options.num_splits = static_cast<int32_t>(seed % 4);
    options.shift = 1;
    AttentionOutputs outputs;
    run_on_device(&problem, options, &outputs);
    if (HasFatalFailure()) {
      return;
    }
    ASSERT_LT(problem.worst_error(), 1.0)
        << "seed " << seed << " dtype " << to_string(shape.dtype) << " D " << shape.head_dim;
  }
}

TEST(CudaBlockAttentionTest, TensorCoreKernelsMatchCpu) {
  DIFFULEX_REQUIRE_DEVICE();
  for (uint64_t seed = 0; seed < num_seeds(200); ++seed) {
    CaseShape shape;
    AttentionCase problem = random_case(seed + 1000, {1, 2}, {64, 64, 128, 128, 128, 256, 512},
                                        seed % 8 == 0 ? 1500 : 400, false, &shape);
    run_on_cpu(&problem);
    const TestTensor want = problem.out();
    const std::vector<float> want_lse = problem.lse();
    RunOptions options;
    const int32_t splits[] = {0, 1, 2, 5, 32};
    options.num_splits = splits[seed % 5];
    AttentionOutputs outputs;
    run_on_device(&problem, options, &outputs);
    if (HasFatalFailure()) {
      return;
    }
    ASSERT_LT(worst_difference(problem, want, want_lse, shape.dtype), 1.0)
        << "seed " << seed << " dtype " << to_string(shape.dtype) << " D " << shape.head_dim
        << " G " << shape.group << " page " << shape.page_size << " B " << shape.block_size
        << " window " << shape.window << " splits " << options.num_splits;
  }
}

TEST(CudaBlockAttentionTest, RepeatedRunsAreBitEqual) {
  DIFFULEX_REQUIRE_DEVICE();
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    CaseShape shape;
    AttentionCase problem =
        random_case(77, {static_cast<int64_t>(dtype)}, {128}, 1200, false, &shape);
    RunOptions options;
    AttentionOutputs first;
    run_on_device(&problem, options, &first);
    for (int run = 0; run < 20; ++run) {
      AttentionOutputs again;
      run_on_device(&problem, options, &again);
      ASSERT_FALSE(HasFatalFailure());
      ASSERT_TRUE(again.equals(first)) << "run " << run << " dtype " << to_string(dtype);
    }
  }
}

/// A request alone must give the bits it gives in a batch.
TEST(CudaBlockAttentionTest, BatchInvariantResultsDoNotDependOnTheBatch) {
  DIFFULEX_REQUIRE_DEVICE();
  for (uint64_t seed = 0; seed < num_seeds(6); ++seed) {
    CaseShape shape;
    AttentionCase problem = random_case(seed + 300, {2, 1}, {64, 128}, 1500, false, &shape);
    RunOptions options;
    options.batch_invariant = true;
    options.num_splits = seed % 2 == 0 ? 0 : 8;
    AttentionOutputs batch;
    run_on_device(&problem, options, &batch);
    ASSERT_FALSE(HasFatalFailure());
    const std::vector<int32_t> offsets = problem.cu_seqlens_q();
    BlockAttentionParams host = problem.params();
    const int64_t row_bytes = host.out.stride[0] * dtype_bytes(host.out.dtype);
    for (int64_t r = 0; r < host.page_table.size[0]; ++r) {
      const auto index = static_cast<size_t>(r);
      const int32_t rows = offsets[index + 1] - offsets[index];
      if (rows == 0) {
        continue;
      }
      problem.clear_outputs();
      DeviceMirror mirror;
      BlockAttentionParams device = upload(host, &mirror);
      const auto advance = [&](TensorRef* tensor, int64_t count, int64_t size) {
        tensor->data = static_cast<uint8_t*>(tensor->data) +
                       count * tensor->stride[0] * dtype_bytes(tensor->dtype);
        tensor->size[0] = size;
      };
      advance(&device.page_table, r, 1);
      advance(&device.cu_seqlens_q, r, 2);
      for (TensorRef* tensor :
           {&device.context_lens, &device.valid_slices, &device.mask_kinds, &device.prefix_lens,
            &device.padded_prefix_lens, &device.q_starts}) {
        advance(tensor, r, 1);
      }
      device.max_seqlen_q = rows;
      device.max_context_len = problem.context_lens()[index];
      device.num_splits = options.num_splits;
      DeviceContext context(attention_workspace_bytes(shape_of(device), Device::kCuda));
      context.get().batch_invariant = true;
      const Status status = block_attention(device, context.get());
      ASSERT_TRUE(status.ok()) << status.message();
      mirror.download();
      const std::vector<uint8_t>& alone = problem.out().bytes();
      ASSERT_EQ(std::memcmp(alone.data() + offsets[index] * row_bytes,
                            batch.out.data() + offsets[index] * row_bytes,
                            static_cast<size_t>(rows * row_bytes)),
                0)
          << "seed " << seed << " request " << r;
    }
  }
}

/// Replays must read every length, table and tensor anew.
TEST(CudaBlockAttentionTest, GraphReplayFollowsItsInputs) {
  DIFFULEX_REQUIRE_DEVICE();
  CaseShape shape;
  AttentionCase problem = random_case(4711, {2}, {128}, 1200, false, &shape);
  BlockAttentionParams host = problem.params();
  DeviceMirror mirror;
  BlockAttentionParams device = upload(host, &mirror);
  DeviceContext context(attention_workspace_bytes(shape_of(host), Device::kCuda));
  cudaStream_t stream = nullptr;
  DIFFULEX_ASSERT_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  context.get().stream = stream;
  ASSERT_TRUE(warmup(context.get()).ok());
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  DIFFULEX_ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  ASSERT_TRUE(block_attention(device, context.get()).ok());
  DIFFULEX_ASSERT_CUDA(cudaStreamEndCapture(stream, &graph));
  DIFFULEX_ASSERT_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  for (int change = 0; change < 3; ++change) {
    if (change > 0) {  // shorter contexts, then one request less
      for (int32_t& context_len : problem.context_lens()) {
        context_len = context_len * 3 / 4 / 32 * 32;
      }
    }
    if (change == 2) {
      std::vector<int32_t>& offsets = problem.cu_seqlens_q();
      offsets.back() = offsets[offsets.size() - 2];
    }
    problem.clear_outputs();
    mirror.refresh();
    DIFFULEX_ASSERT_CUDA(cudaGraphLaunch(executable, stream));
    DIFFULEX_ASSERT_CUDA(cudaStreamSynchronize(stream));
    mirror.download();
    const std::vector<uint8_t> replayed = problem.out().bytes();
    AttentionOutputs eager;
    run_on_device(&problem, RunOptions(), &eager);
    ASSERT_FALSE(HasFatalFailure());
    ASSERT_EQ(replayed, eager.out) << "change " << change;
  }
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

TEST(CudaBlockAttentionTest, WorkspaceTooSmallIsAnErrorWithItsSize) {
  DIFFULEX_REQUIRE_DEVICE();
  CaseShape shape;
  shape.dtype = DType::kBF16;
  shape.head_dim = 128;
  CaseRequest request;
  request.num_rows = 4;
  request.num_valid = 4;
  request.context = 2048;
  request.start = 2048;
  AttentionCase problem(shape, {request}, 5);
  BlockAttentionParams host = problem.params();
  DeviceMirror mirror;
  const BlockAttentionParams device = upload(host, &mirror);
  DeviceContext context(256);
  const Status status = block_attention(device, context.get());
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("workspace"), std::string::npos) << status.message();
}

TEST(CudaBlockAttentionTest, CheckDataReportsBadPages) {
  DIFFULEX_REQUIRE_DEVICE();
  CaseShape shape;
  shape.dtype = DType::kBF16;
  shape.head_dim = 64;
  CaseRequest request;
  request.num_rows = 4;
  request.num_valid = 4;
  request.context = 8;
  request.start = 8;
  AttentionCase problem(shape, {request}, 5);
  for (int32_t& page : problem.page_table()) {
    page = 0;
  }
  BlockAttentionParams host = problem.params();
  DeviceContext context(attention_workspace_bytes(shape_of(host), Device::kCuda));
  context.get().check_data = true;
  {
    DeviceMirror mirror;
    const Status status = block_attention(upload(host, &mirror), context.get());
    EXPECT_TRUE(status.ok()) << status.message();
  }
  problem.page_table()[1] = 1 << 20;
  DeviceMirror mirror;
  const Status status = block_attention(upload(host, &mirror), context.get());
  EXPECT_EQ(status.code(), StatusCode::kOutOfRange);
  EXPECT_NE(status.message().find("page_table"), std::string::npos) << status.message();
}

}  // namespace
}  // namespace diffulex::test
