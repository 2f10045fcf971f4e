// SPDX-License-Identifier: Apache-2.0

// Ops behind a kernel that lets them start early and writes one of their inputs last. Activations,
// routing and cached keys must be read after it has ended, whatever was promised about weights;
// weights written just before must be read after it too unless the caller promised that they are
// settled.

#include <functional>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "cuda/attention_runs.h"
#include "cuda/op_parity.h"
#include "diffulex/ops/accept.h"
#include "diffulex/ops/activation.h"
#include "diffulex/ops/kv.h"
#include "diffulex/ops/linear.h"
#include "diffulex/ops/moe.h"
#include "diffulex/ops/norm.h"
#include "diffulex/ops/rope.h"
#include "diffulex/ops/routing.h"
#include "diffulex/ops/sampling.h"
#include "diffulex/ops/warmup.h"
#include "ops/moe_case.h"
#include "ops/shared/cuda/hopper.h"
#include "ops/shared/cuda/pdl.cuh"

namespace diffulex::test {
namespace {

constexpr long long kDelayClocks = 300000;

/// Waits, then copies `count` bytes.
__global__ void write_late(uint8_t* target, const uint8_t* source, int64_t count,
                           long long clocks) {
  cuda::pdl_wait();
  cuda::pdl_launch_dependents();
  const long long start = clock64();
  while (clock64() - start < clocks) {
  }
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
    target[i] = source[i];
  }
}

/// A chain of ops over device tensors.
struct Chain {
  std::string name;
  TensorRef late;                  // the input that is written last
  std::vector<TensorRef> outputs;  // `late` itself where the chain works in place
  std::function<Status(const ExecContext&)> enqueue;
  std::function<void()> reset;  // of what the chain works on in place; absent = outputs become zero
};

std::vector<uint8_t> bytes_of(const TensorRef& tensor) {
  std::vector<uint8_t> bytes(span_bytes(tensor));
  DeviceMirror::check(cudaMemcpy(bytes.data(), tensor.data, bytes.size(), cudaMemcpyDeviceToHost));
  return bytes;
}

/// Runs the chain with its inputs in place, then behind a slow writer, and compares all bytes.
void expect_late_write_is_seen(const Chain& chain, DeviceContext* context, bool weights_settled) {
  SCOPED_TRACE(chain.name);
  cudaStream_t stream = nullptr;
  DIFFULEX_ASSERT_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  ExecContext& exec = context->get();
  exec.stream = stream;
  exec.weights_settled = weights_settled;
  ASSERT_TRUE(warmup(exec).ok());
  const size_t count = span_bytes(chain.late);
  const DeviceBuffer good(count);
  DIFFULEX_ASSERT_CUDA(cudaMemcpy(good.data(), chain.late.data, count, cudaMemcpyDeviceToDevice));
  const auto clear = [&] {
    if (chain.reset) {
      chain.reset();
      return;
    }
    for (const TensorRef& output : chain.outputs) {
      DeviceMirror::check(cudaMemset(output.data, 0, span_bytes(output)));
    }
  };
  const auto results = [&] {
    std::vector<std::vector<uint8_t>> all;
    for (const TensorRef& output : chain.outputs) {
      all.push_back(bytes_of(output));
    }
    return all;
  };
  const auto enqueue = [&] {
    const Status status = chain.enqueue(exec);
    ASSERT_TRUE(status.ok()) << status.message();
  };
  clear();
  DIFFULEX_ASSERT_CUDA(cudaMemcpy(chain.late.data, good.data(), count, cudaMemcpyDeviceToDevice));
  DIFFULEX_ASSERT_CUDA(cudaDeviceSynchronize());
  ASSERT_NO_FATAL_FAILURE(enqueue());
  DIFFULEX_ASSERT_CUDA(cudaStreamSynchronize(stream));
  const std::vector<std::vector<uint8_t>> want = results();
  // The stale input must give something else, or the test shows nothing.
  clear();
  DIFFULEX_ASSERT_CUDA(cudaMemset(chain.late.data, 0, count));
  DIFFULEX_ASSERT_CUDA(cudaDeviceSynchronize());
  ASSERT_NO_FATAL_FAILURE(enqueue());
  DIFFULEX_ASSERT_CUDA(cudaStreamSynchronize(stream));
  ASSERT_NE(results(), want);
  for (int run = 0; run < 5; ++run) {
    clear();
    DIFFULEX_ASSERT_CUDA(cudaMemset(chain.late.data, 0, count));
    DIFFULEX_ASSERT_CUDA(cudaDeviceSynchronize());
    write_late<<<1, 256, 0, stream>>>(chain.late.as<uint8_t>(), good.data(),
                                      static_cast<int64_t>(count), kDelayClocks);
    ASSERT_NO_FATAL_FAILURE(enqueue());
    DIFFULEX_ASSERT_CUDA(cudaStreamSynchronize(stream));
    ASSERT_EQ(results(), want) << "run " << run;
  }
  exec.stream = nullptr;
  cudaStreamDestroy(stream);
  DIFFULEX_ASSERT_CUDA(cudaMemcpy(chain.late.data, good.data(), count, cudaMemcpyDeviceToDevice));
}

/// Tensors of one test, uploaded as they are made.
class Tensors final {
 public:
  explicit Tensors(uint64_t seed) : random_(seed) {}

  TensorRef normal(DType dtype, const std::vector<int64_t>& shape, double deviation = 1.0) {
    TestTensor tensor(dtype, shape);
    tensor.fill_normal(&random_, deviation);
    return mirror_.upload(tensor.ref());
  }
  TensorRef zeros(DType dtype, const std::vector<int64_t>& shape) {
    TestTensor tensor(dtype, shape);
    return mirror_.upload(tensor.ref());
  }
  template <typename T>
  TensorRef of(std::vector<T> values, std::vector<int64_t> shape = {}) {
    return mirror_.upload(ref_of(values, std::move(shape)));
  }

 private:
  std::mt19937_64 random_;
  DeviceMirror mirror_;
};

RmsNormParams norm_params(Tensors* tensors, DType dtype, int64_t rows, int64_t width) {
  RmsNormParams params;
  params.x = tensors->normal(dtype, {rows, width});
  params.weight = tensors->normal(dtype, {width});
  params.out = tensors->zeros(dtype, {rows, width});
  return params;
}

QkNormRopeParams rope_params(Tensors* tensors, int64_t rows, int64_t head_dim) {
  QkNormRopeParams params;
  params.num_q_heads = 4;
  params.num_kv_heads = 2;
  params.head_dim = static_cast<int32_t>(head_dim);
  params.qkv = tensors->normal(DType::kBF16, {rows, 8 * head_dim});
  std::vector<int64_t> positions;
  for (int64_t row = 0; row < rows; ++row) {
    positions.push_back(row % 60);
  }
  params.positions = tensors->of(positions);
  params.cos_sin_cache = tensors->normal(DType::kF32, {64, head_dim});
  params.q_weight = tensors->normal(DType::kBF16, {head_dim});
  params.k_weight = tensors->normal(DType::kBF16, {head_dim});
  return params;
}

RouterGemmParams router_params(Tensors* tensors, DType dtype, int64_t rows) {
  RouterGemmParams params;
  params.x = tensors->normal(dtype, {rows, 1024});
  params.w = tensors->normal(dtype == DType::kBF16 ? dtype : DType::kF32, {64, 1024});
  params.logits = tensors->zeros(DType::kF32, {rows, 64});
  return params;
}

LinearFewRowsParams linear_params(Tensors* tensors, int64_t rows) {
  LinearFewRowsParams params;
  params.x = tensors->normal(DType::kBF16, {rows, 1024});
  params.weight = tensors->normal(DType::kBF16, {512, 1024}, 0.03);
  params.out = tensors->zeros(DType::kBF16, {rows, 512});
  return params;
}

TEST(CudaOpOverlapTest, WeightsWrittenByTheKernelBefore) {
  DIFFULEX_REQUIRE_DEVICE();
  DeviceContext context(0);
  for (const int64_t width : {128, 2048, 4096, 16384, 100}) {
    Tensors tensors(1);
    const RmsNormParams norm = norm_params(&tensors, DType::kBF16, 9, width);
    ASSERT_NO_FATAL_FAILURE(
        expect_late_write_is_seen({"rms_norm " + std::to_string(width),
                                   norm.weight,
                                   {norm.out},
                                   [&](const ExecContext& exec) { return rms_norm(norm, exec); },
                                   {}},
                                  &context, false));
    RmsNormParams add = norm;
    add.residual = tensors.normal(DType::kBF16, {9, width});
    ASSERT_NO_FATAL_FAILURE(
        expect_late_write_is_seen({"rms_norm_add " + std::to_string(width),
                                   add.weight,
                                   {add.out},
                                   [&](const ExecContext& exec) { return rms_norm_add(add, exec); },
                                   {}},
                                  &context, false));
  }
  for (const int64_t rows : {3, 700}) {
    for (const int64_t head_dim : {64, 128, 256}) {
      Tensors tensors(2);
      const QkNormRopeParams rope = rope_params(&tensors, rows, head_dim);
      const DeviceBuffer original(span_bytes(rope.qkv));
      DIFFULEX_ASSERT_CUDA(
          cudaMemcpy(original.data(), rope.qkv.data, original.bytes(), cudaMemcpyDeviceToDevice));
      ASSERT_NO_FATAL_FAILURE(expect_late_write_is_seen(
          {"qk_norm_rope " + std::to_string(head_dim),
           rope.q_weight,
           {rope.qkv},
           [&](const ExecContext& exec) { return qk_norm_rope(rope, exec); },
           [&] {
             DeviceMirror::check(cudaMemcpy(rope.qkv.data, original.data(), original.bytes(),
                                            cudaMemcpyDeviceToDevice));
           }},
          &context, false));
    }
  }
  for (const int64_t rows : {1, 33, 600}) {
    for (const DType dtype : {DType::kBF16, DType::kF32}) {
      Tensors tensors(3);
      const RouterGemmParams router = router_params(&tensors, dtype, rows);
      ASSERT_NO_FATAL_FAILURE(expect_late_write_is_seen(
          {"router_gemm " + std::to_string(rows),
           router.w,
           {router.logits},
           [&](const ExecContext& exec) { return router_gemm(router, exec); },
           {}},
          &context, false));
    }
  }
  if (!cuda::is_hopper_device(0)) {
    return;
  }
  for (const int64_t rows : {1, 16, 64, 128}) {
    Tensors tensors(4);
    const LinearFewRowsParams linear = linear_params(&tensors, rows);
    ASSERT_NO_FATAL_FAILURE(expect_late_write_is_seen(
        {"linear_few_rows " + std::to_string(rows),
         linear.weight,
         {linear.out},
         [&](const ExecContext& exec) { return linear_few_rows(linear, exec); },
         {}},
        &context, false));
  }
}

/// With the promise about weights, everything else still waits.
TEST(CudaOpOverlapTest, ActivationsWrittenByTheKernelBefore) {
  DIFFULEX_REQUIRE_DEVICE();
  DeviceContext context(0);
  for (const int64_t width : {128, 2048, 16384, 100}) {
    Tensors tensors(5);
    const RmsNormParams norm = norm_params(&tensors, DType::kBF16, 9, width);
    ASSERT_NO_FATAL_FAILURE(
        expect_late_write_is_seen({"rms_norm " + std::to_string(width),
                                   norm.x,
                                   {norm.out},
                                   [&](const ExecContext& exec) { return rms_norm(norm, exec); },
                                   {}},
                                  &context, true));
  }
  for (const int64_t rows : {3, 700}) {
    Tensors tensors(6);
    const QkNormRopeParams rope = rope_params(&tensors, rows, 128);
    ASSERT_NO_FATAL_FAILURE(expect_late_write_is_seen(
        {"qk_norm_rope",
         rope.qkv,
         {rope.qkv},
         [&](const ExecContext& exec) { return qk_norm_rope(rope, exec); },
         {}},
        &context, true));
  }
  for (const int64_t rows : {1, 33, 600}) {
    Tensors tensors(7);
    const RouterGemmParams router = router_params(&tensors, DType::kBF16, rows);
    MoeTopkParams topk;
    topk.logits = router.logits;
    topk.top_k = 4;
    topk.weights = tensors.zeros(DType::kF32, {rows, 4});
    std::vector<int32_t> no_ids(static_cast<size_t>(rows * 4), 0);
    topk.ids = tensors.of(no_ids, {rows, 4});
    ASSERT_NO_FATAL_FAILURE(
        expect_late_write_is_seen({"router_gemm, moe_topk",
                                   router.x,
                                   {router.logits, topk.weights, topk.ids},
                                   [&](const ExecContext& exec) {
                                     const Status status = router_gemm(router, exec);
                                     return status.ok() ? moe_topk(topk, exec) : status;
                                   },
                                   {}},
                                  &context, true));
  }
  if (!cuda::is_hopper_device(0)) {
    return;
  }
  for (const int64_t rows : {1, 16, 64, 128}) {
    Tensors tensors(8);
    const LinearFewRowsParams linear = linear_params(&tensors, rows);
    ActAndMulParams act;
    act.x = linear.out;
    act.out = tensors.zeros(DType::kBF16, {rows, 256});
    ASSERT_NO_FATAL_FAILURE(
        expect_late_write_is_seen({"linear_few_rows, act_and_mul",
                                   linear.x,
                                   {linear.out, act.out},
                                   [&](const ExecContext& exec) {
                                     const Status status = linear_few_rows(linear, exec);
                                     return status.ok() ? act_and_mul(act, exec) : status;
                                   },
                                   {}},
                                  &context, true));
  }
}

/// Rows, routing and the weights of either product, at token counts of every kind of tile.
TEST(CudaOpOverlapTest, ExpertInputsWrittenByTheKernelBefore) {
  DIFFULEX_REQUIRE_DEVICE();
  for (const int64_t num_tokens : {3, 100, 330, 2048}) {
    MoeCaseShape shape;
    shape.dtype = DType::kBF16;
    shape.num_tokens = num_tokens;
    shape.num_experts = 6;
    shape.hidden = 192;
    shape.width = 128;
    MoeCase problem(shape, 31);
    const FusedMoeParams host = problem.params();
    DeviceMirror mirror;
    FusedMoeParams moe = host;
    moe.x = mirror.upload(host.x);
    moe.w13 = mirror.upload(host.w13);
    moe.w2 = mirror.upload(host.w2);
    moe.topk_weights = mirror.upload(host.topk_weights);
    moe.topk_ids = mirror.upload(host.topk_ids);
    moe.out = mirror.upload(host.out);
    DeviceContext context(fused_moe_workspace_bytes(problem.moe_shape(), Device::kCuda));
    Tensors tensors(9);
    RmsNormParams norm;
    norm.x = moe.out;
    norm.out = tensors.zeros(DType::kBF16, {num_tokens, 192});
    const struct {
      const char* name;
      TensorRef late;
    } inputs[] = {{"x", moe.x},
                  {"ids", moe.topk_ids},
                  {"weights", moe.topk_weights},
                  {"w13", moe.w13},
                  {"w2", moe.w2}};
    for (const auto& input : inputs) {
      ASSERT_NO_FATAL_FAILURE(expect_late_write_is_seen(
          {std::string("fused_moe ") + input.name + " " + std::to_string(num_tokens),
           input.late,
           {moe.out, norm.out},
           [&](const ExecContext& exec) {
             const Status status = fused_moe(moe, exec);
             return status.ok() ? rms_norm(norm, exec) : status;
           },
           {}},
          &context, true));
    }
  }
}

/// Keys and values stored in front of the attention that reads them.
TEST(CudaOpOverlapTest, KeysStoredByTheKernelBefore) {
  DIFFULEX_REQUIRE_DEVICE();
  CaseShape shape;
  shape.dtype = DType::kBF16;
  shape.head_dim = 128;
  shape.page_size = 32;
  shape.block_size = 32;
  shape.num_kv_heads = 2;
  shape.group = 4;
  CaseRequest request;
  request.num_rows = 32;
  request.num_valid = 32;
  request.context = 960;
  request.start = 960;
  for (const int32_t splits : {0, 1, 4, 16}) {
    AttentionCase problem(shape, {request}, 3);
    for (size_t page = 0; page < 30; ++page) {  // 23 pages; the row's slots are in page 7
      problem.page_table()[page] = static_cast<int32_t>(page) % 23;
    }
    problem.fill_caches(0.25);
    BlockAttentionParams host = problem.params();
    host.num_splits = splits;
    DeviceMirror mirror;
    const BlockAttentionParams device = upload(host, &mirror);
    ASSERT_GE(device.k_cache.size[0], 23);
    Tensors tensors(10);
    StoreKvCacheParams store;
    store.k = tensors.normal(DType::kBF16, {32, 2, 128});
    store.v = tensors.normal(DType::kBF16, {32, 2, 128});
    store.k_cache = device.k_cache;
    store.v_cache = device.v_cache;
    std::vector<int32_t> slots;
    for (int32_t i = 0; i < 32; ++i) {
      slots.push_back(7 * 32 + i);
    }
    store.slot_mapping = tensors.of(slots);
    DeviceContext context(attention_workspace_bytes(shape_of(host), Device::kCuda));
    for (const TensorRef& late : {store.k, store.v}) {
      ASSERT_NO_FATAL_FAILURE(expect_late_write_is_seen(
          {"store_kv_cache, block_attention, splits " + std::to_string(splits),
           late,
           {device.out},
           [&](const ExecContext& exec) {
             const Status status = store_kv_cache(store, exec);
             return status.ok() ? block_attention(device, exec) : status;
           },
           {}},
          &context, true));
    }
  }
}

/// Logits, statistics, accepted tokens, and the norm of the step after.
TEST(CudaOpOverlapTest, LogitsWrittenByTheKernelBefore) {
  DIFFULEX_REQUIRE_DEVICE();
  for (const int64_t vocab : {3000, 151936}) {
    constexpr int64_t kRows = 8;
    Tensors tensors(11);
    TokenStatsParams sample;
    sample.logits = tensors.normal(DType::kBF16, {kRows, vocab}, 4.0);
    sample.inv_temperature = tensors.of(std::vector<float>(kRows, 0.7F));
    sample.uniforms = tensors.of(std::vector<double>(kRows, 0.4));
    sample.ids = tensors.of(std::vector<int64_t>(kRows, 0));
    sample.stats = tensors.zeros(DType::kF32, {kRows, kTokenStatsColumns});
    AcceptMaskFillParams accept;
    accept.mask_token_id = 5;
    accept.tokens = tensors.of(std::vector<int64_t>(kRows, 5), {1, kRows});
    std::vector<int32_t> index;
    for (int32_t row = 0; row < kRows; ++row) {
      index.push_back(row);
    }
    accept.row_index = tensors.of(index, {1, kRows});
    accept.editable_start = tensors.of(std::vector<int32_t>{0});
    accept.gate = tensors.of(std::vector<uint8_t>{1});
    accept.accept_threshold = tensors.of(std::vector<float>{0.01F});
    accept.open_steps = tensors.of(std::vector<int32_t>{0});
    accept.ids = sample.ids;
    accept.stats = sample.stats;
    accept.write_ids = tensors.of(std::vector<int64_t>(kRows, 0), {1, kRows});
    accept.confidence = tensors.zeros(DType::kF32, {1, kRows});
    accept.masks_left = tensors.of(std::vector<int32_t>{0});
    accept.flags = tensors.of(std::vector<int32_t>{0});
    RmsNormParams norm = norm_params(&tensors, DType::kF32, 1, kRows);
    norm.x = accept.confidence;
    DeviceContext context(token_stats_workspace_bytes(kRows, vocab, 0, Device::kCuda));
    ASSERT_NO_FATAL_FAILURE(expect_late_write_is_seen(
        {"token_stats, accept_mask_fill, rms_norm",
         sample.logits,
         {sample.ids, sample.stats, accept.write_ids, accept.confidence, norm.out},
         [&](const ExecContext& exec) {
           DIFFULEX_RETURN_IF_ERROR(token_stats(sample, exec));
           DIFFULEX_RETURN_IF_ERROR(accept_mask_fill(accept, exec));
           return rms_norm(norm, exec);
         },
         {}},
        &context, true));
  }
}

}  // namespace
}  // namespace diffulex::test
