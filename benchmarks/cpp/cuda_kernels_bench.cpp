// SPDX-License-Identifier: Apache-2.0

// Device time of the CUDA kernels with a cold L2 (see cuda_timer.h). Each shape first checks a
// sample of the result against the CPU kernel; a wrong kernel is reported, never timed.

#include <cmath>
#include <cstring>
#include <memory>
#include <random>

#include <benchmark/benchmark.h>

#include "cuda_mirror.h"
#include "cuda_timer.h"
#include "diffulex/ops/attention.h"
#include "diffulex/ops/norm.h"
#include "diffulex/ops/sampling.h"
#include "diffulex/ops/warmup.h"
#include "ops/shared/half.h"

namespace diffulex::bench {
namespace {

/// One decode batch: Hq = 32, D = 128, page 32, BLOCK_CAUSAL with B = 32.
struct DecodeBatch {
  static constexpr int64_t kHeads = 32;
  static constexpr int64_t kDim = 128;
  static constexpr int64_t kPage = 32;

  DecodeBatch(int64_t kv_heads, int64_t rows_each, int64_t num_reqs, int64_t context_len,
              int64_t rotations)
      : hkv(kv_heads), rows(rows_each), reqs(num_reqs), context(context_len) {
    const int64_t pages_each = context / kPage;
    num_pages = std::max<int64_t>(1, reqs * pages_each);
    const int64_t tokens = rows * reqs;
    std::vector<int32_t> table(static_cast<size_t>(reqs * std::max<int64_t>(pages_each, 1)), 0);
    for (size_t i = 0; i < table.size(); ++i) {
      table[i] = static_cast<int32_t>(i);
    }
    std::shuffle(table.begin(), table.end(), std::mt19937_64(3));
    std::vector<int32_t> offsets = {0};
    std::vector<int32_t> valid;
    for (int64_t r = 0; r < reqs; ++r) {
      offsets.push_back(static_cast<int32_t>((r + 1) * rows));
      valid.push_back(offsets.back());
    }
    q = std::make_unique<Bf16>(normal_bf16(tokens * kHeads * kDim, 1));
    k = std::make_unique<Bf16>(normal_bf16(tokens * hkv * kDim, 2));
    v = std::make_unique<Bf16>(normal_bf16(tokens * hkv * kDim, 3));
    out =
        std::make_unique<Bf16>(std::vector<uint16_t>(static_cast<size_t>(tokens * kHeads * kDim)));
    page_table = std::make_unique<Ints>(table);
    cu_seqlens_q = std::make_unique<Ints>(offsets);
    valid_slices = std::make_unique<Ints>(valid);
    const auto each = static_cast<size_t>(reqs);
    context_lens =
        std::make_unique<Ints>(std::vector<int32_t>(each, static_cast<int32_t>(context)));
    kinds = std::make_unique<Ints>(std::vector<int32_t>(each, 1));
    for (int64_t i = 0; i < rotations; ++i) {
      const auto seed = static_cast<uint64_t>(10 + i);
      k_cache.push_back(std::make_unique<Bf16>(normal_bf16(cache_elems(), seed)));
      v_cache.push_back(std::make_unique<Bf16>(normal_bf16(cache_elems(), seed + 1000)));
    }
  }

  [[nodiscard]] int64_t cache_elems() const { return num_pages * kPage * hkv * kDim; }

  BlockAttentionParams params(bool on_device, int64_t rotation) {
    const int64_t tokens = rows * reqs;
    const auto index = static_cast<size_t>(rotation);
    BlockAttentionParams result;
    result.q = q->ref(on_device, DType::kBF16, {tokens, kHeads, kDim});
    result.k = k->ref(on_device, DType::kBF16, {tokens, hkv, kDim});
    result.v = v->ref(on_device, DType::kBF16, {tokens, hkv, kDim});
    result.out = out->ref(on_device, DType::kBF16, {tokens, kHeads, kDim});
    result.k_cache = k_cache[index]->ref(on_device, DType::kBF16, {num_pages, kPage, hkv, kDim});
    result.v_cache = v_cache[index]->ref(on_device, DType::kBF16, {num_pages, kPage, hkv, kDim});
    const int64_t width = static_cast<int64_t>(page_table->host.size()) / reqs;
    result.page_table = page_table->ref(on_device, DType::kI32, {reqs, width});
    result.cu_seqlens_q = cu_seqlens_q->ref(on_device, DType::kI32, {reqs + 1});
    result.context_lens = context_lens->ref(on_device, DType::kI32, {reqs});
    result.valid_slices = valid_slices->ref(on_device, DType::kI32, {reqs});
    result.mask_kinds = kinds->ref(on_device, DType::kI32, {reqs});
    result.scale = 1.0F / std::sqrt(static_cast<float>(kDim));
    result.block_size = 32;
    result.max_seqlen_q = static_cast<int32_t>(rows);
    result.max_context_len = static_cast<int32_t>(context);
    return result;
  }

  /// Largest difference from the CPU kernel on the last request (the CPU would need long for all).
  double worst_difference() {
    BlockAttentionParams host = params(false, 0);
    const int64_t last = reqs - 1;
    for (TensorRef* tensor : {&host.page_table, &host.context_lens, &host.valid_slices,
                              &host.mask_kinds, &host.cu_seqlens_q}) {
      tensor->data = static_cast<int32_t*>(tensor->data) + last * tensor->stride[0];
      tensor->size[0] = 1;
    }
    std::vector<int32_t> offsets = {0, static_cast<int32_t>(rows)};
    host.cu_seqlens_q.data = offsets.data();
    host.cu_seqlens_q.size[0] = 2;
    std::vector<int32_t> valid = {static_cast<int32_t>(rows)};
    host.valid_slices.data = valid.data();
    std::vector<uint16_t> want(static_cast<size_t>(rows * kHeads * kDim));
    for (TensorRef* tensor : {&host.q, &host.k, &host.v}) {
      tensor->data = static_cast<uint16_t*>(tensor->data) + last * rows * tensor->stride[0];
      tensor->size[0] = rows;
    }
    host.out.data = want.data();
    host.out.size[0] = rows;
    if (!block_attention(host, ExecContext()).ok()) {
      return INFINITY;
    }
    out->download();
    double worst = 0.0;
    const uint16_t* got = out->host.data() + last * rows * kHeads * kDim;
    for (size_t i = 0; i < want.size(); ++i) {
      const double difference =
          std::abs(static_cast<double>(bf16_to_float(got[i])) - bf16_to_float(want[i]));
      worst = std::isfinite(difference) ? std::max(worst, difference) : INFINITY;
    }
    return worst;
  }

  int64_t hkv, rows, reqs, context, num_pages = 0;
  std::unique_ptr<Bf16> q, k, v, out;
  std::unique_ptr<Ints> page_table, cu_seqlens_q, valid_slices, context_lens, kinds;
  std::vector<std::unique_ptr<Bf16>> k_cache, v_cache;
};

/// Arguments: Hkv, rows of a request, requests, context.
void BM_CudaBlockAttention(benchmark::State& state) {
  if (!has_device(state)) {
    return;
  }
  const int64_t hkv = state.range(0);
  const int64_t rows = state.range(1);
  const int64_t reqs = state.range(2);
  const int64_t context = state.range(3);
  const int64_t cache_bytes = 2 * reqs * context * hkv * DecodeBatch::kDim * 2;
  const int64_t rotations = std::min<int64_t>(num_rotations(cache_bytes), 16);
  DecodeBatch batch(hkv, rows, reqs, context, rotations);
  AttentionShape shape;
  shape.num_reqs = static_cast<int32_t>(reqs);
  shape.num_q_heads = DecodeBatch::kHeads;
  shape.num_kv_heads = static_cast<int32_t>(hkv);
  shape.head_dim = DecodeBatch::kDim;
  shape.max_seqlen_q = static_cast<int32_t>(rows);
  shape.max_context_len = static_cast<int32_t>(context);
  const size_t scratch = attention_workspace_bytes(shape, Device::kCuda);
  Mirrored<uint8_t> workspace{std::vector<uint8_t>(scratch)};
  ExecContext exec;
  exec.weights_settled = true;
  exec.device = Device::kCuda;
  exec.workspace = workspace.ref(true, DType::kU8, {static_cast<int64_t>(scratch)}).data;
  exec.workspace_bytes = scratch;
  const auto call = [&](int64_t rotation, cudaStream_t stream) {
    ExecContext local = exec;
    local.stream = stream;
    const Status status = block_attention(batch.params(true, rotation), local);
    if (!status.ok()) {
      throw std::runtime_error(status.message());
    }
  };
  call(0, nullptr);
  if (batch.worst_difference() > 2e-2) {
    state.SkipWithError("wrong result");
    return;
  }
  const double keys = static_cast<double>(context + rows);
  const double flops = 4.0 * DecodeBatch::kHeads * static_cast<double>(rows * reqs) * keys * 128.0;
  const double bytes = static_cast<double>(cache_bytes + 4 * reqs * rows * (hkv + 32) * 128);
  measure(state, rotations, bytes, flops, call);
}
BENCHMARK(BM_CudaBlockAttention)
    ->Args({8, 32, 1, 1024})
    ->Args({8, 32, 1, 8192})
    ->Args({8, 32, 8, 1024})
    ->Args({8, 32, 8, 8192})
    ->Args({8, 32, 64, 1024})
    ->Args({8, 128, 1, 8192})
    ->Args({8, 128, 8, 8192})
    ->Args({8, 4096, 1, 0})
    ->UseManualTime()
    ->Iterations(30)
    ->Unit(benchmark::kMicrosecond);

/// Arguments: V, rows, top-k, tempered.
void BM_CudaTokenStats(benchmark::State& state) {
  if (!has_device(state)) {
    return;
  }
  const int64_t vocab = state.range(0);
  const int64_t rows = state.range(1);
  const int64_t top_k = state.range(2);
  const int64_t bytes = vocab * rows * 2;
  const int64_t rotations = num_rotations(bytes);
  std::vector<std::unique_ptr<Bf16>> logits;
  for (int64_t i = 0; i < rotations; ++i) {
    logits.push_back(
        std::make_unique<Bf16>(normal_bf16(vocab * rows, 5 + static_cast<uint64_t>(i))));
  }
  Mirrored<int64_t> ids{std::vector<int64_t>(static_cast<size_t>(rows))};
  Mirrored<int64_t> topk_ids{std::vector<int64_t>(static_cast<size_t>(rows * 64))};
  Mirrored<float> topk_probs{std::vector<float>(static_cast<size_t>(rows * 64))};
  Mirrored<float> stats{std::vector<float>(static_cast<size_t>(rows * 8))};
  Mirrored<float> temperature{std::vector<float>(static_cast<size_t>(rows), 0.8F)};
  Mirrored<double> uniforms{std::vector<double>(static_cast<size_t>(rows), 0.37)};
  Mirrored<int64_t> forbidden{std::vector<int64_t>{vocab / 2}};
  const size_t scratch =
      token_stats_workspace_bytes(rows, vocab, static_cast<int32_t>(top_k), Device::kCuda);
  Mirrored<uint8_t> workspace{std::vector<uint8_t>(scratch)};
  const auto params = [&](bool on_device, int64_t rotation) {
    TokenStatsParams result;
    result.logits =
        logits[static_cast<size_t>(rotation)]->ref(on_device, DType::kBF16, {rows, vocab});
    result.forbidden_ids = forbidden.ref(on_device, DType::kI64, {1});
    if (state.range(3) != 0) {
      result.inv_temperature = temperature.ref(on_device, DType::kF32, {rows});
      result.uniforms = uniforms.ref(on_device, DType::kF64, {rows});
    }
    if (top_k > 0) {
      result.topk_ids = topk_ids.ref(on_device, DType::kI64, {rows, top_k});
      result.topk_probs = topk_probs.ref(on_device, DType::kF32, {rows, top_k});
    }
    result.ids = ids.ref(on_device, DType::kI64, {rows});
    result.stats = stats.ref(on_device, DType::kF32, {rows, 8});
    return result;
  };
  const auto call = [&](int64_t rotation, cudaStream_t stream) {
    ExecContext exec;
    exec.weights_settled = true;
    exec.device = Device::kCuda;
    exec.stream = stream;
    exec.workspace = workspace.ref(true, DType::kU8, {static_cast<int64_t>(scratch)}).data;
    exec.workspace_bytes = scratch;
    const Status status = token_stats(params(true, rotation), exec);
    if (!status.ok()) {
      throw std::runtime_error(status.message());
    }
  };
  call(0, nullptr);
  require(cudaDeviceSynchronize(), "check");
  ids.download();
  const std::vector<int64_t> got = ids.host;
  TokenStatsParams host = params(false, 0);
  const int64_t checked = std::min<int64_t>(rows, 4);
  for (TensorRef* tensor : {&host.logits, &host.ids, &host.stats, &host.topk_ids, &host.topk_probs,
                            &host.inv_temperature, &host.uniforms}) {
    tensor->size[0] = checked;
  }
  if (!token_stats(host, ExecContext()).ok() ||
      !std::equal(got.begin(), got.begin() + checked, ids.host.begin())) {
    state.SkipWithError("wrong result");
    return;
  }
  measure(state, rotations, static_cast<double>(bytes), 0.0, call);
}
BENCHMARK(BM_CudaTokenStats)
    ->Args({151936, 32, 0, 0})
    ->Args({151936, 256, 0, 0})
    ->Args({151936, 2048, 0, 0})
    ->Args({151936, 256, 8, 0})
    ->Args({151936, 256, 64, 0})
    ->Args({151936, 32, 0, 1})
    ->Args({151936, 256, 0, 1})
    ->UseManualTime()
    ->Iterations(30)
    ->Unit(benchmark::kMicrosecond);

/// Arguments: rows, width.
void BM_CudaRmsNorm(benchmark::State& state) {
  if (!has_device(state)) {
    return;
  }
  const int64_t rows = state.range(0);
  const int64_t width = state.range(1);
  const int64_t bytes = rows * width * 4;
  const int64_t rotations = num_rotations(bytes);
  std::vector<std::unique_ptr<Bf16>> x;
  std::vector<std::unique_ptr<Bf16>> out;
  for (int64_t i = 0; i < rotations; ++i) {
    x.push_back(std::make_unique<Bf16>(normal_bf16(rows * width, static_cast<uint64_t>(i))));
    out.push_back(std::make_unique<Bf16>(std::vector<uint16_t>(static_cast<size_t>(rows * width))));
  }
  Bf16 weight(normal_bf16(width, 99));
  const auto params = [&](bool on_device, int64_t rotation) {
    const auto index = static_cast<size_t>(rotation);
    RmsNormParams result;
    result.x = x[index]->ref(on_device, DType::kBF16, {rows, width});
    result.out = out[index]->ref(on_device, DType::kBF16, {rows, width});
    result.weight = weight.ref(on_device, DType::kBF16, {width});
    return result;
  };
  const auto call = [&](int64_t rotation, cudaStream_t stream) {
    ExecContext exec;
    exec.weights_settled = true;
    exec.device = Device::kCuda;
    exec.stream = stream;
    const Status status = rms_norm(params(true, rotation), exec);
    if (!status.ok()) {
      throw std::runtime_error(status.message());
    }
  };
  call(0, nullptr);
  require(cudaDeviceSynchronize(), "check");
  out[0]->download();
  const std::vector<uint16_t> got = out[0]->host;
  bool is_right = rms_norm(params(false, 0), ExecContext()).ok();
  for (size_t i = 0; i < got.size(); ++i) {
    const float want = bf16_to_float(out[0]->host[i]);
    is_right = is_right && std::abs(bf16_to_float(got[i]) - want) <= std::abs(want) / 64;
  }
  if (!is_right) {
    state.SkipWithError("wrong result");
    return;
  }
  measure(state, rotations, static_cast<double>(bytes), 0.0, call);
}
BENCHMARK(BM_CudaRmsNorm)
    ->Args({32, 4096})
    ->Args({8192, 4096})
    ->UseManualTime()
    ->Iterations(30)
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace diffulex::bench
