// SPDX-License-Identifier: Apache-2.0

// Ops called at once: from several threads, each with its own stream and workspace, and on two
// devices. Every call must give the bits it gives alone.

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "cuda/attention_runs.h"
#include "diffulex/ops/moe.h"
#include "diffulex/ops/sampling.h"
#include "ops/moe_case.h"

namespace diffulex::test {
namespace {

/// What one engine has: its own tensors, workspaces and stream on a device.
class Worker final {
 public:
  Worker(int32_t device, uint64_t seed)
      : device_(on(device)),
        attention_(attention_shape(), {request(32, 2048), request(20, 96)}, seed),
        moe_(moe_shape(), seed),
        random_(seed),
        logits_(DType::kBF16, {kRows, kVocab}) {
    logits_.fill_normal(&random_, 4.0);
    BlockAttentionParams host = attention_.params();
    host.num_splits = 5;  // through counters and clusters in the workspace
    attention_params_ = upload(host, &mirror_);
    attention_context_ =
        std::make_unique<DeviceContext>(attention_workspace_bytes(shape_of(host), Device::kCuda));
    moe_params_ = moe_.params();
    for (TensorRef FusedMoeParams::* member :
         {&FusedMoeParams::x, &FusedMoeParams::w13, &FusedMoeParams::w2,
          &FusedMoeParams::topk_weights, &FusedMoeParams::topk_ids, &FusedMoeParams::out}) {
      moe_params_.*member = mirror_.upload(moe_params_.*member);
    }
    moe_context_ =
        std::make_unique<DeviceContext>(fused_moe_workspace_bytes(moe_.moe_shape(), Device::kCuda));
    stats_.logits = mirror_.upload(logits_.ref());
    stats_.ids = mirror_.upload(ref_of(ids_));
    stats_.stats = mirror_.upload(ref_of(stats_values_, {kRows, kTokenStatsColumns}));
    stats_context_ = std::make_unique<DeviceContext>(
        token_stats_workspace_bytes(kRows, kVocab, 0, Device::kCuda));
    DeviceMirror::check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    for (DeviceContext* context :
         {attention_context_.get(), moe_context_.get(), stats_context_.get()}) {
      context->get().stream = stream_;
      context->get().device_index = device;
    }
  }
  ~Worker() {
    on(device_);
    cudaStreamDestroy(stream_);
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  /// All ops, `times` times over, and what they wrote in the end; an error text instead of results.
  void run(int times, bool is_settled) {
    on(device_);
    for (int time = 0; time < times; ++time) {
      for (const Status& status : {block_attention(attention_params_, attention_context_->get()),
                                   fused_moe(moe_params_, moe_context_->get()),
                                   token_stats(stats_, stats_context_->get())}) {
        if (!status.ok()) {
          error = status.message();
          return;
        }
      }
      if (is_settled) {
        DeviceMirror::check(cudaStreamSynchronize(stream_));
      }
    }
    DeviceMirror::check(cudaStreamSynchronize(stream_));
    results.clear();
    for (const TensorRef& tensor : {attention_params_.out, moe_params_.out, stats_.stats}) {
      std::vector<uint8_t> bytes(span_bytes(tensor));
      DeviceMirror::check(
          cudaMemcpy(bytes.data(), tensor.data, bytes.size(), cudaMemcpyDeviceToHost));
      results.push_back(std::move(bytes));
    }
  }

  std::vector<std::vector<uint8_t>> results;
  std::string error;

 private:
  static constexpr int64_t kRows = 8;
  static constexpr int64_t kVocab = 30000;

  static int32_t on(int32_t device) {
    DeviceMirror::check(cudaSetDevice(device));
    return device;
  }
  static CaseRequest request(int64_t rows, int64_t context) {
    CaseRequest result;
    result.num_rows = rows;
    result.num_valid = rows;
    result.context = context;
    result.start = context;
    return result;
  }
  static CaseShape attention_shape() {
    CaseShape shape;
    shape.dtype = DType::kBF16;
    shape.head_dim = 128;
    shape.page_size = 32;
    shape.block_size = 32;
    shape.num_kv_heads = 8;
    shape.group = 4;
    return shape;
  }
  static MoeCaseShape moe_shape() {
    MoeCaseShape shape;
    shape.dtype = DType::kBF16;
    shape.num_tokens = 200;
    shape.num_experts = 6;
    shape.hidden = 192;
    shape.width = 128;
    return shape;
  }

  int32_t device_;
  AttentionCase attention_;
  MoeCase moe_;
  std::mt19937_64 random_;
  TestTensor logits_;
  std::vector<int64_t> ids_ = std::vector<int64_t>(kRows, 0);
  std::vector<float> stats_values_ = std::vector<float>(kRows * kTokenStatsColumns, 0.0F);
  DeviceMirror mirror_;
  BlockAttentionParams attention_params_;
  FusedMoeParams moe_params_;
  TokenStatsParams stats_;
  std::unique_ptr<DeviceContext> attention_context_, moe_context_, stats_context_;
  cudaStream_t stream_ = nullptr;
};

void expect_same_bits_at_once(const std::vector<int32_t>& devices) {
  std::vector<std::unique_ptr<Worker>> workers;
  std::vector<std::vector<std::vector<uint8_t>>> want;
  for (size_t i = 0; i < devices.size(); ++i) {
    workers.push_back(std::make_unique<Worker>(devices[i], i + 1));
    workers.back()->run(1, true);
    ASSERT_EQ(workers.back()->error, "");
    want.push_back(workers.back()->results);
  }
  for (int round = 0; round < 3; ++round) {
    std::vector<std::thread> threads;
    for (const std::unique_ptr<Worker>& worker : workers) {
      threads.emplace_back([&worker] { worker->run(60, false); });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    for (size_t i = 0; i < workers.size(); ++i) {
      ASSERT_EQ(workers[i]->error, "") << "worker " << i;
      ASSERT_EQ(workers[i]->results, want[i]) << "worker " << i << " round " << round;
    }
  }
}

TEST(CudaConcurrentCallsTest, ThreadsWithTheirOwnStreams) {
  DIFFULEX_REQUIRE_DEVICE();
  expect_same_bits_at_once({0, 0, 0, 0});
}

TEST(CudaConcurrentCallsTest, TwoDevices) {
  DIFFULEX_REQUIRE_DEVICE();
  int count = 0;
  DIFFULEX_ASSERT_CUDA(cudaGetDeviceCount(&count));
  if (count < 2) {
    GTEST_SKIP() << "needs two CUDA devices, has " << count;
  }
  expect_same_bits_at_once({0, 1, 0, 1});
  DIFFULEX_ASSERT_CUDA(cudaSetDevice(0));
}

}  // namespace
}  // namespace diffulex::test
