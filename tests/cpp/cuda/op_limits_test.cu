// SPDX-License-Identifier: Apache-2.0

// What a grid, a CTA or a failed call must not break: rows past the y extent of a grid, more shared
// memory than a CTA has, an error that the next op must not inherit, calls that a stream under
// capture cannot make.

#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "cuda/op_parity.h"
#include "diffulex/ops/merge.h"
#include "diffulex/ops/norm.h"
#include "diffulex/ops/rope.h"
#include "ops/cuda_ops.h"
#include "ops/shared/cuda/launch.cuh"
#include "ops/shared/cuda/pdl.cuh"

namespace diffulex::test {
namespace {

ExecContext device_context() {
  ExecContext context;
  context.device = Device::kCuda;
  return context;
}

/// A grid counts at most 65,535 along y.
TEST(CudaOpLimitsTest, SoftEmbeddingOfManyRows) {
  DIFFULEX_REQUIRE_DEVICE();
  constexpr int64_t kRows = 65600;
  std::mt19937_64 random(1);
  TestTensor logits = random_tensor(&random, DType::kF32, {kRows, 24});
  TestTensor table = random_tensor(&random, DType::kF32, {24, 8});
  std::vector<float> lse(kRows, 4.0F);
  TestTensor want(DType::kF32, {kRows, 8});
  TestTensor got(DType::kF32, {kRows, 8});
  got.fill(kNaN);
  SoftEmbeddingParams params;
  params.logits = logits.ref();
  params.lse = ref_of(lse);
  params.embedding = table.ref();
  params.out = want.ref();
  ASSERT_TRUE(soft_embedding(params, ExecContext()).ok());
  DeviceMirror mirror;
  params.logits = mirror.upload(params.logits);
  params.lse = mirror.upload(params.lse);
  params.embedding = mirror.upload(params.embedding);
  params.out = mirror.upload(got.ref());
  DeviceContext context(soft_embedding_workspace_bytes(kRows, 24, 8, DType::kF32, Device::kCuda));
  const Status status = soft_embedding(params, context.get());
  ASSERT_TRUE(status.ok()) << status.message();
  mirror.download();
  expect_parity(want, got, DType::kF32, "soft_embedding");
}

/// The window of a request lives in the shared memory of its CTA.
TEST(CudaOpLimitsTest, AdvanceDecodeNamesTheMostPositions) {
  DIFFULEX_REQUIRE_DEVICE();
  PlanLayout layout;
  layout.block_size = 256;
  layout.buffer_size = 32;
  layout.max_num_reqs = 1;
  layout.max_num_rows = 8192;
  const auto ints = layout.to_ints();
  // Nothing is read: the kernel is not launched.
  std::vector<uint8_t> memory(Arena::arena_bytes(PlanArrays::fields(layout)));
  AdvanceDecodeParams params;
  params.layout.assign(ints.begin(), ints.end());
  params.num_reqs = 1;
  params.plan.data = memory.data();
  params.output.data = memory.data();
  params.batch.data = memory.data();
  const Status status = cuda::advance_decode(params, device_context());
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_NE(status.message().find("positions in flight per request on cuda, got 8192"),
            std::string::npos)
      << status.message();
}

__global__ void do_nothing() {}

/// The runtime keeps the error of a failed launch for whoever asks next.
TEST(CudaOpLimitsTest, AFailedLaunchLeavesNoErrorBehind) {
  DIFFULEX_REQUIRE_DEVICE();
  std::mt19937_64 random(2);
  TestTensor x = random_tensor(&random, DType::kF32, {4, 2, 64});
  TestTensor angles = random_tensor(&random, DType::kF32, {8, 64});
  std::vector<int64_t> positions(4, 3);
  DeviceMirror mirror;
  RotaryParams params;
  params.q = mirror.upload(x.ref());
  params.k = params.q;
  params.k.size[1] = 0;
  params.positions = mirror.upload(ref_of(positions));
  params.cos_sin_cache = mirror.upload(angles.ref());
  params.head_dim = 64;
  const auto launch_too_much = [] {
    cuda::LaunchShape shape;
    shape.grid = dim3(1);
    shape.block = dim3(32);
    shape.smem_bytes = size_t{1} << 20;
    return cuda::cuda_status("test", cuda::launch_dependent(do_nothing, shape, false));
  };
  const auto allow_too_much = [] {
    return cuda::cuda_status(
        "test",
        cudaFuncSetAttribute(do_nothing, cudaFuncAttributeMaxDynamicSharedMemorySize, 1 << 20));
  };
  for (int kind = 0; kind < 2; ++kind) {
    const Status failed = kind == 0 ? launch_too_much() : allow_too_much();
    ASSERT_EQ(failed.code(), StatusCode::kCudaError);
    EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess) << "kind " << kind;
    EXPECT_TRUE(cuda::check_launch("the next op").ok()) << "kind " << kind;
    const Status status = rotary_embedding(params, device_context());
    EXPECT_TRUE(status.ok()) << status.message();
  }
  DIFFULEX_ASSERT_CUDA(cudaDeviceSynchronize());
}

/// DIFFULEX_CHECK=1 waits for the device, which a capture cannot.
TEST(CudaOpLimitsTest, CheckedOpsSayWhyTheyCannotBeCaptured) {
  DIFFULEX_REQUIRE_DEVICE();
  std::mt19937_64 random(3);
  TestTensor x = random_tensor(&random, DType::kF32, {4, 2, 64});
  TestTensor angles = random_tensor(&random, DType::kF32, {8, 64});
  std::vector<int64_t> positions(4, 3);
  DeviceMirror mirror;
  RotaryParams params;
  params.q = mirror.upload(x.ref());
  params.k = params.q;
  params.k.size[1] = 0;
  params.positions = mirror.upload(ref_of(positions));
  params.cos_sin_cache = mirror.upload(angles.ref());
  params.head_dim = 64;
  cudaStream_t stream = nullptr;
  DIFFULEX_ASSERT_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  ExecContext context = device_context();
  context.stream = stream;
  context.check_data = true;
  EXPECT_TRUE(rotary_embedding(params, context).ok());
  DIFFULEX_ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  const Status status = rotary_embedding(params, context);
  cudaGraph_t graph = nullptr;
  DIFFULEX_ASSERT_CUDA(cudaStreamEndCapture(stream, &graph));
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_NE(status.message().find("enforce_eager"), std::string::npos) << status.message();
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

}  // namespace
}  // namespace diffulex::test
