// SPDX-License-Identifier: Apache-2.0

// block_attention on devices of compute capability 9.0: every page size and head dim of the Hopper
// kernels, long row lists, both ways of splitting keys, and the choice of kernel itself. Results
// are held against the CPU kernel; every case poisons what no row may see.

#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "cuda/attention_runs.h"
#include "diffulex/ops/warmup.h"
#include "ops/shared/cuda/hopper.h"

/// Skips the running test where the Hopper kernels do not run.
#define DIFFULEX_REQUIRE_HOPPER()                                              \
  do {                                                                         \
    DIFFULEX_REQUIRE_DEVICE();                                                 \
    if (!cuda::is_hopper_device(0)) {                                          \
      GTEST_SKIP() << "not a device of compute capability 9.0, or forced off"; \
    }                                                                          \
  } while (false)

namespace diffulex::test {
namespace {

/// What the CPU kernel makes of a case.
struct CpuResult {
  TestTensor out;
  std::vector<float> lse;

  static CpuResult of(AttentionCase* problem) {
    run_on_cpu(problem);
    return CpuResult{problem->out(), problem->lse()};
  }
};

/// Runs the case on the device and compares.
void expect_matches(AttentionCase* problem, const CpuResult& want, DType dtype,
                    const RunOptions& options, const std::string& what) {
  AttentionOutputs outputs;
  run_on_device(problem, options, &outputs);
  ASSERT_FALSE(testing::Test::HasFatalFailure()) << what;
  ASSERT_LT(worst_difference(*problem, want.out, want.lse, dtype), 1.0) << what;
}

/// Runs the case on both sides and compares.
void expect_matches_cpu(AttentionCase* problem, DType dtype, const RunOptions& options,
                        const std::string& what) {
  expect_matches(problem, CpuResult::of(problem), dtype, options, what);
}

CaseRequest block_causal(int64_t rows, int64_t context) {
  CaseRequest request;
  request.num_rows = rows;
  request.num_valid = rows;
  request.context = context;
  request.start = context;
  return request;
}

/// One call as a graph.
class CapturedCall final {
 public:
  CapturedCall(const BlockAttentionParams& device, DeviceContext* context) {
    DeviceMirror::check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    context->get().stream = stream_;
    EXPECT_TRUE(warmup(context->get()).ok());
    DeviceMirror::check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal));
    const Status status = block_attention(device, context->get());
    EXPECT_TRUE(status.ok()) << status.message();
    DeviceMirror::check(cudaStreamEndCapture(stream_, &graph_));
    DeviceMirror::check(cudaGraphInstantiate(&executable_, graph_, 0));
  }
  ~CapturedCall() {
    cudaGraphExecDestroy(executable_);
    cudaGraphDestroy(graph_);
    cudaStreamDestroy(stream_);
  }
  CapturedCall(const CapturedCall&) = delete;
  CapturedCall& operator=(const CapturedCall&) = delete;

  void replay() {
    DeviceMirror::check(cudaGraphLaunch(executable_, stream_));
    DeviceMirror::check(cudaStreamSynchronize(stream_));
  }

  [[nodiscard]] std::vector<std::string> kernel_names() const {
    size_t count = 0;
    DeviceMirror::check(cudaGraphGetNodes(graph_, nullptr, &count));
    std::vector<cudaGraphNode_t> nodes(count);
    DeviceMirror::check(cudaGraphGetNodes(graph_, nodes.data(), &count));
    std::vector<std::string> names;
    for (const cudaGraphNode_t node : nodes) {
      cudaKernelNodeParams params{};
      DeviceMirror::check(cudaGraphKernelNodeGetParams(node, &params));
      const char* name = nullptr;
      DeviceMirror::check(cudaFuncGetName(&name, params.func));
      names.emplace_back(name);
    }
    return names;
  }

 private:
  cudaStream_t stream_ = nullptr;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

/// Names of the kernels one call launches.
std::vector<std::string> kernels_of(AttentionCase* problem, int32_t num_splits) {
  BlockAttentionParams host = problem->params();
  host.num_splits = num_splits;
  DeviceMirror mirror;
  const BlockAttentionParams device = upload(host, &mirror);
  DeviceContext context(attention_workspace_bytes(shape_of(host), Device::kCuda));
  return CapturedCall(device, &context).kernel_names();
}

TEST(CudaHopperAttentionTest, EveryPageSizeAndHeadDim) {
  DIFFULEX_REQUIRE_HOPPER();
  uint64_t seed = 0;
  for (const int64_t dim : {64, 128, 256, 512}) {
    for (const int64_t page_size : {8, 16, 32, 64, 128, 256}) {
      for (const DType dtype : {DType::kBF16, DType::kF16}) {
        std::mt19937_64 random(++seed);
        CaseShape shape;
        shape.dtype = dtype;
        shape.head_dim = dim;
        shape.page_size = page_size;
        shape.num_kv_heads = 2;
        shape.group = pick(&random, {1, 2, 4, 7, 8});
        shape.block_size = pick(&random, {4, 16, 32});
        shape.window = pick(&random, {0, 100});
        shape.softcap = static_cast<double>(pick(&random, {0, 30}));
        shape.padding_rows = 3;
        shape.extra_heads = uniform(&random, 0, 1);
        std::vector<CaseRequest> requests(4);
        for (CaseRequest& request : requests) {
          request = random_request(&random, shape.block_size, page_size, 700);
        }
        AttentionCase problem(shape, requests, seed);
        RunOptions options;
        options.num_splits = static_cast<int32_t>(pick(&random, {0, 1, 3, 12}));
        expect_matches_cpu(&problem, dtype, options,
                           "D " + std::to_string(dim) + " page " + std::to_string(page_size) +
                               " G " + std::to_string(shape.group) + " splits " +
                               std::to_string(options.num_splits) + " seed " +
                               std::to_string(seed));
        if (HasFatalFailure()) {
          return;
        }
      }
    }
  }
}

/// Prefill: many row tiles, several of them per CTA, with and without a cached prefix.
TEST(CudaHopperAttentionTest, LongRowLists) {
  DIFFULEX_REQUIRE_HOPPER();
  for (const int64_t context : {0, 512, 544}) {
    for (const int64_t kind : {0, 1, 2}) {
      CaseShape shape;
      shape.dtype = DType::kBF16;
      shape.head_dim = 128;
      shape.page_size = 32;
      shape.block_size = 32;
      shape.num_kv_heads = 2;
      shape.group = 4;
      std::vector<CaseRequest> requests = {block_causal(1000, context), block_causal(32, 96),
                                           block_causal(333, 0)};
      requests[0].kind = kind;
      requests[0].num_valid = 990;
      AttentionCase problem(shape, requests, 17);
      expect_matches_cpu(&problem, shape.dtype, RunOptions(),
                         "context " + std::to_string(context) + " kind " + std::to_string(kind));
      if (HasFatalFailure()) {
        return;
      }
    }
  }
}

/// More requests than a warp has lanes, some of them empty.
TEST(CudaHopperAttentionTest, ManyRequests) {
  DIFFULEX_REQUIRE_HOPPER();
  std::mt19937_64 random(5);
  CaseShape shape;
  shape.dtype = DType::kBF16;
  shape.head_dim = 128;
  shape.page_size = 16;
  shape.block_size = 8;
  shape.group = 4;
  std::vector<CaseRequest> requests;
  for (int i = 0; i < 71; ++i) {
    requests.push_back(i % 5 == 0 ? CaseRequest() : random_request(&random, 8, 16, 200));
  }
  AttentionCase problem(shape, requests, 6);
  for (const int32_t splits : {0, 1, 4, 16}) {
    RunOptions options;
    options.num_splits = splits;
    expect_matches_cpu(&problem, shape.dtype, options, "splits " + std::to_string(splits));
    if (HasFatalFailure()) {
      return;
    }
  }
}

TEST(CudaHopperAttentionTest, EverySplitCount) {
  DIFFULEX_REQUIRE_HOPPER();
  CaseShape shape;
  shape.dtype = DType::kBF16;
  shape.head_dim = 128;
  shape.page_size = 32;
  shape.block_size = 32;
  shape.group = 4;
  std::vector<CaseRequest> requests = {block_causal(32, 4096), block_causal(32, 320)};
  AttentionCase problem(shape, requests, 3);
  const CpuResult want = CpuResult::of(&problem);
  for (int32_t splits = 0; splits <= 32; ++splits) {
    RunOptions options;
    options.num_splits = splits;
    expect_matches(&problem, want, shape.dtype, options, "splits " + std::to_string(splits));
    if (HasFatalFailure()) {
      return;
    }
  }
}

/// Any number of splits is one launch; shapes the copy engine cannot fetch stay on the older
/// kernels.
TEST(CudaHopperAttentionTest, KernelFollowsTheShape) {
  DIFFULEX_REQUIRE_HOPPER();
  CaseShape shape;
  shape.dtype = DType::kBF16;
  shape.head_dim = 128;
  shape.page_size = 32;
  shape.group = 4;
  const std::vector<CaseRequest> requests = {block_causal(32, 2048)};
  AttentionCase paged(shape, requests, 1);
  for (const int32_t splits : {1, 8, 16}) {
    const std::vector<std::string> names = kernels_of(&paged, splits);
    ASSERT_EQ(names.size(), 1U);
    EXPECT_NE(names[0].find("sm90"), std::string::npos) << names[0];
  }
  shape.page_size = 4;
  AttentionCase small_pages(shape, requests, 1);
  const std::vector<std::string> names = kernels_of(&small_pages, 1);
  ASSERT_EQ(names.size(), 1U);
  EXPECT_EQ(names[0].find("sm90"), std::string::npos) << names[0];
}

/// Clusters of one unit find out which comes last through counters in a workspace of any content:
/// replays over new and old rubbish must give the same bits, and the CPU's result.
TEST(CudaHopperAttentionTest, ReplaysOverAnyWorkspace) {
  DIFFULEX_REQUIRE_HOPPER();
  CaseShape shape;
  shape.dtype = DType::kBF16;
  shape.page_size = 32;
  shape.block_size = 32;
  for (const int64_t dim : {64, 128, 256, 512}) {
    for (const int32_t splits : {2, 5, 8, 12, 16, 32}) {
      if (dim != 128 && splits != 5 && splits != 32) {
        continue;
      }
      shape.head_dim = dim;
      shape.num_kv_heads = splits == 5 ? 8 : 2;
      shape.group = splits == 12 ? 2 : 4;
      AttentionCase problem(shape, {block_causal(32, 2048), block_causal(20, 96)}, 21);
      const std::string what = "D " + std::to_string(dim) + " splits " + std::to_string(splits);
      RunOptions options;
      options.num_splits = splits;
      expect_matches_cpu(&problem, shape.dtype, options, what);
      if (HasFatalFailure()) {
        return;
      }
      const std::vector<uint8_t> first = problem.out().bytes();
      problem.clear_outputs();
      BlockAttentionParams host = problem.params();
      host.num_splits = splits;
      DeviceMirror mirror;
      const BlockAttentionParams device = upload(host, &mirror);
      DeviceContext context(attention_workspace_bytes(shape_of(host), Device::kCuda));
      CapturedCall call(device, &context);
      for (int replay = 0; replay < 6; ++replay) {
        if (replay % 3 == 2) {
          context.poison();
        }
        problem.clear_outputs();
        mirror.refresh();
        call.replay();
        mirror.download();
        ASSERT_EQ(problem.out().bytes(), first) << what << " replay " << replay;
      }
    }
  }
}

/// A captured step bounds the contexts by the longest it may meet.
TEST(CudaHopperAttentionTest, ContextsFarBelowTheBound) {
  DIFFULEX_REQUIRE_HOPPER();
  CaseShape shape;
  shape.dtype = DType::kBF16;
  shape.head_dim = 128;
  shape.page_size = 32;
  shape.block_size = 32;
  shape.num_kv_heads = 8;
  shape.group = 4;
  for (const int64_t rows : {4, 32, 128}) {
    for (const int64_t context_len : {0, 96, 320, 2976}) {
      AttentionCase problem(shape, {block_causal(rows, context_len)}, 5);
      run_on_cpu(&problem);
      const TestTensor want = problem.out();
      const std::vector<float> want_lse = problem.lse();
      for (const int32_t bound : {4096, 40960}) {
        problem.clear_outputs();
        BlockAttentionParams host = problem.params();
        host.max_context_len = bound;
        DeviceMirror mirror;
        const BlockAttentionParams device = upload(host, &mirror);
        DeviceContext context(attention_workspace_bytes(shape_of(host), Device::kCuda));
        const Status status = block_attention(device, context.get());
        ASSERT_TRUE(status.ok()) << status.message();
        mirror.download();
        ASSERT_LT(worst_difference(problem, want, want_lse, shape.dtype), 1.0)
            << rows << " rows, context " << context_len << ", bound " << bound;
      }
    }
  }
}

/// A cache without pages: only keys in flight exist.
TEST(CudaHopperAttentionTest, CacheWithoutPages) {
  DIFFULEX_REQUIRE_HOPPER();
  CaseShape shape;
  shape.dtype = DType::kBF16;
  shape.head_dim = 128;
  shape.group = 4;
  AttentionCase problem(shape, {block_causal(150, 0)}, 9);
  run_on_cpu(&problem);
  const TestTensor want = problem.out();
  const std::vector<float> want_lse = problem.lse();
  problem.clear_outputs();
  BlockAttentionParams host = problem.params();
  DeviceMirror mirror;
  BlockAttentionParams device = upload(host, &mirror);
  device.k_cache.size[0] = 0;
  device.v_cache.size[0] = 0;
  DeviceContext context(attention_workspace_bytes(shape_of(host), Device::kCuda));
  const Status status = block_attention(device, context.get());
  ASSERT_TRUE(status.ok()) << status.message();
  mirror.download();
  EXPECT_LT(worst_difference(problem, want, want_lse, shape.dtype), 1.0);
}

}  // namespace
}  // namespace diffulex::test
