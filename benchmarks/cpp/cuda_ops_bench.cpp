// SPDX-License-Identifier: Apache-2.0

// Device time of the small ops and of sample_filtered with a cold L2 (see cuda_timer.h). Each shape
// first checks its result against the CPU kernel; a wrong kernel is reported, never timed.

#include <cmath>
#include <memory>
#include <stdexcept>

#include <benchmark/benchmark.h>

#include "cuda_mirror.h"
#include "cuda_timer.h"
#include "diffulex/ops/activation.h"
#include "diffulex/ops/kv.h"
#include "diffulex/ops/norm.h"
#include "diffulex/ops/rope.h"
#include "diffulex/ops/routing.h"
#include "diffulex/ops/sampling.h"
#include "ops/shared/half.h"

namespace diffulex::bench {
namespace {

void expect_ok(const Status& status) {
  if (!status.ok()) {
    throw std::runtime_error(status.message());
  }
}

ExecContext on_device(cudaStream_t stream) {
  ExecContext context;
  context.weights_settled = true;
  context.device = Device::kCuda;
  context.stream = stream;
  return context;
}

/// Rotated buffer sets of one kind.
std::vector<std::unique_ptr<Bf16>> buffers(int64_t rotations, int64_t count, uint64_t seed) {
  std::vector<std::unique_ptr<Bf16>> sets;
  for (int64_t i = 0; i < rotations; ++i) {
    sets.push_back(std::make_unique<Bf16>(normal_bf16(count, seed + static_cast<uint64_t>(i))));
  }
  return sets;
}

/// Runs `op(params, context)` on the device and on the CPU over the same data and compares `out`.
template <typename Op, typename MakeParams>
bool is_right(const Op& op, const MakeParams& params, Bf16* out) {
  const std::vector<uint16_t> before = out->host;
  expect_ok(op(params(true, 0), on_device(nullptr)));
  require(cudaDeviceSynchronize(), "check");
  out->download();
  const std::vector<uint16_t> got = out->host;
  out->host = before;
  expect_ok(op(params(false, 0), ExecContext()));
  bool result = true;
  for (size_t i = 0; i < got.size(); ++i) {
    const float want = bf16_to_float(out->host[i]);
    const float difference = std::abs(bf16_to_float(got[i]) - want);
    result = result && difference <= std::abs(want) / 64 + 1e-2F;
  }
  out->host = before;
  return result;
}

/// Checks, then times.
template <typename Op, typename MakeParams>
void check_and_measure(benchmark::State& state, int64_t rotations, double bytes, const Op& op,
                       const MakeParams& params, Bf16* out) {
  if (!is_right(op, params, out)) {
    state.SkipWithError("wrong result");
    return;
  }
  measure(state, rotations, bytes, 0.0, [&](int64_t rotation, cudaStream_t stream) {
    expect_ok(op(params(true, rotation), on_device(stream)));
  });
}

/// Arguments: rows, width.
void BM_CudaAddRmsNorm(benchmark::State& state) {
  if (!has_device(state)) {
    return;
  }
  const int64_t rows = state.range(0);
  const int64_t width = state.range(1);
  const int64_t bytes = rows * width * 8;
  const int64_t rotations = num_rotations(bytes);
  const auto x = buffers(rotations, rows * width, 1);
  const auto residual = buffers(rotations, rows * width, 500);
  Bf16 weight(normal_bf16(width, 99));
  const auto params = [&](bool is_device, int64_t rotation) {
    const auto index = static_cast<size_t>(rotation);
    RmsNormParams result;
    result.x = x[index]->ref(is_device, DType::kBF16, {rows, width});
    result.residual = residual[index]->ref(is_device, DType::kBF16, {rows, width});
    result.weight = weight.ref(is_device, DType::kBF16, {width});
    return result;
  };
  check_and_measure(state, rotations, static_cast<double>(bytes), add_rms_norm, params, x[0].get());
}
BENCHMARK(BM_CudaAddRmsNorm)
    ->Args({32, 4096})
    ->Args({256, 4096})
    ->Args({8192, 4096})
    ->UseManualTime()
    ->Iterations(30)
    ->Unit(benchmark::kMicrosecond);

/// Arguments: rows. 32 query heads, 8 KV heads of 128, pages of 32.
void BM_CudaQkNormRopeStore(benchmark::State& state) {
  if (!has_device(state)) {
    return;
  }
  constexpr int64_t kQuery = 32;
  constexpr int64_t kKv = 8;
  constexpr int64_t kDim = 128;
  constexpr int64_t kPage = 32;
  const int64_t rows = state.range(0);
  const int64_t width = (kQuery + 2 * kKv) * kDim;
  const int64_t bytes = rows * kDim * (4 * (kQuery + kKv) + 2 * kKv + 4 * kKv);
  const int64_t rotations = num_rotations(bytes);
  const auto qkv = buffers(rotations, rows * width, 7);
  const int64_t pages = (rows + kPage - 1) / kPage;
  Bf16 k_cache(normal_bf16(pages * kPage * kKv * kDim, 11));
  Bf16 v_cache(normal_bf16(pages * kPage * kKv * kDim, 12));
  Bf16 q_weight(normal_bf16(kDim, 13));
  Bf16 k_weight(normal_bf16(kDim, 14));
  std::vector<int32_t> numbers;
  std::vector<float> angles;
  for (int64_t row = 0; row < rows; ++row) {
    numbers.push_back(static_cast<int32_t>(row));
    for (int64_t i = 0; i < kDim; ++i) {
      const double angle = 0.01 * static_cast<double>(row + i % (kDim / 2));
      angles.push_back(static_cast<float>(i < kDim / 2 ? std::cos(angle) : std::sin(angle)));
    }
  }
  Mirrored<int32_t> positions(numbers);
  Mirrored<float> cos_sin(angles);
  const auto params = [&](bool is_device, int64_t rotation) {
    QkNormRopeParams result;
    result.qkv = qkv[static_cast<size_t>(rotation)]->ref(is_device, DType::kBF16, {rows, width});
    result.positions = positions.ref(is_device, DType::kI32, {rows});
    result.slot_mapping = result.positions;
    result.cos_sin_cache = cos_sin.ref(is_device, DType::kF32, {rows, kDim});
    result.q_weight = q_weight.ref(is_device, DType::kBF16, {kDim});
    result.k_weight = k_weight.ref(is_device, DType::kBF16, {kDim});
    result.k_cache = k_cache.ref(is_device, DType::kBF16, {pages, kPage, kKv, kDim});
    result.v_cache = v_cache.ref(is_device, DType::kBF16, {pages, kPage, kKv, kDim});
    result.num_q_heads = kQuery;
    result.num_kv_heads = kKv;
    result.head_dim = kDim;
    return result;
  };
  check_and_measure(state, rotations, static_cast<double>(bytes), qk_norm_rope_store, params,
                    qkv[0].get());
}
BENCHMARK(BM_CudaQkNormRopeStore)
    ->Args({32})
    ->Args({256})
    ->Args({8192})
    ->UseManualTime()
    ->Iterations(30)
    ->Unit(benchmark::kMicrosecond);

/// Arguments: rows, inner width.
void BM_CudaActAndMul(benchmark::State& state) {
  if (!has_device(state)) {
    return;
  }
  const int64_t rows = state.range(0);
  const int64_t width = state.range(1);
  const int64_t bytes = rows * width * 6;
  const int64_t rotations = num_rotations(bytes);
  const auto x = buffers(rotations, rows * width * 2, 21);
  Bf16 out(std::vector<uint16_t>(static_cast<size_t>(rows * width)));
  const auto params = [&](bool is_device, int64_t rotation) {
    ActAndMulParams result;
    result.x = x[static_cast<size_t>(rotation)]->ref(is_device, DType::kBF16, {rows, 2 * width});
    result.out = out.ref(is_device, DType::kBF16, {rows, width});
    return result;
  };
  check_and_measure(state, rotations, static_cast<double>(bytes), act_and_mul, params, &out);
}
BENCHMARK(BM_CudaActAndMul)
    ->Args({32, 12288})
    ->Args({256, 12288})
    ->Args({8192, 12288})
    ->UseManualTime()
    ->Iterations(30)
    ->Unit(benchmark::kMicrosecond);

/// Arguments: rows. 8 heads of 128, pages of 32.
void BM_CudaStoreKvCache(benchmark::State& state) {
  if (!has_device(state)) {
    return;
  }
  constexpr int64_t kHeads = 8;
  constexpr int64_t kDim = 128;
  constexpr int64_t kPage = 32;
  const int64_t rows = state.range(0);
  const int64_t bytes = rows * kHeads * kDim * 8;
  const int64_t rotations = num_rotations(bytes);
  const auto k = buffers(rotations, rows * kHeads * kDim, 31);
  const auto v = buffers(rotations, rows * kHeads * kDim, 900);
  const int64_t pages = (rows + kPage - 1) / kPage;
  Bf16 k_cache(normal_bf16(pages * kPage * kHeads * kDim, 41));
  Bf16 v_cache(normal_bf16(pages * kPage * kHeads * kDim, 42));
  std::vector<int32_t> numbers;
  for (int64_t row = 0; row < rows; ++row) {
    numbers.push_back(static_cast<int32_t>(rows - 1 - row));
  }
  Mirrored<int32_t> slots(numbers);
  const auto params = [&](bool is_device, int64_t rotation) {
    const auto index = static_cast<size_t>(rotation);
    StoreKvCacheParams result;
    result.k = k[index]->ref(is_device, DType::kBF16, {rows, kHeads, kDim});
    result.v = v[index]->ref(is_device, DType::kBF16, {rows, kHeads, kDim});
    result.k_cache = k_cache.ref(is_device, DType::kBF16, {pages, kPage, kHeads, kDim});
    result.v_cache = v_cache.ref(is_device, DType::kBF16, {pages, kPage, kHeads, kDim});
    result.slot_mapping = slots.ref(is_device, DType::kI32, {rows});
    return result;
  };
  check_and_measure(state, rotations, static_cast<double>(bytes), store_kv_cache, params, &v_cache);
}
BENCHMARK(BM_CudaStoreKvCache)
    ->Args({32})
    ->Args({8192})
    ->UseManualTime()
    ->Iterations(30)
    ->Unit(benchmark::kMicrosecond);

/// Arguments: rows. LLaDA2-mini: 256 experts, top-8 of 4 of 8 groups, sigmoid.
void BM_CudaMoeTopk(benchmark::State& state) {
  if (!has_device(state)) {
    return;
  }
  constexpr int64_t kExperts = 256;
  constexpr int64_t kTopK = 8;
  const int64_t rows = state.range(0);
  Bf16 logits(normal_bf16(rows * kExperts, 51));
  Mirrored<float> bias(std::vector<float>(kExperts, 0.0F));
  Mirrored<float> weights(std::vector<float>(static_cast<size_t>(rows * kTopK)));
  Mirrored<int32_t> ids(std::vector<int32_t>(static_cast<size_t>(rows * kTopK)));
  const auto params = [&](bool is_device) {
    MoeTopkParams result;
    result.logits = logits.ref(is_device, DType::kBF16, {rows, kExperts});
    result.bias = bias.ref(is_device, DType::kF32, {kExperts});
    result.weights = weights.ref(is_device, DType::kF32, {rows, kTopK});
    result.ids = ids.ref(is_device, DType::kI32, {rows, kTopK});
    result.top_k = kTopK;
    result.scoring = RouterScoring::kSigmoid;
    result.renormalize = true;
    result.n_group = 8;
    result.topk_group = 4;
    return result;
  };
  expect_ok(moe_topk(params(true), on_device(nullptr)));
  require(cudaDeviceSynchronize(), "check");
  ids.download();
  const std::vector<int32_t> got = ids.host;
  expect_ok(moe_topk(params(false), ExecContext()));
  if (got != ids.host) {
    state.SkipWithError("wrong result");
    return;
  }
  measure(
      state, 1, static_cast<double>(rows * kExperts * 2), 0.0,
      [&](int64_t, cudaStream_t stream) { expect_ok(moe_topk(params(true), on_device(stream))); });
}
BENCHMARK(BM_CudaMoeTopk)
    ->Args({32})
    ->Args({1024})
    ->UseManualTime()
    ->Iterations(30)
    ->Unit(benchmark::kMicrosecond);

/// Arguments: V, rows, top-k, thousandths of top-p.
void BM_CudaSampleFiltered(benchmark::State& state) {
  if (!has_device(state)) {
    return;
  }
  const int64_t vocab = state.range(0);
  const int64_t rows = state.range(1);
  const int64_t bytes = vocab * rows * 2;
  const int64_t rotations = num_rotations(bytes);
  const auto logits = buffers(rotations, vocab * rows, 61);
  const auto count = static_cast<size_t>(rows);
  Mirrored<int64_t> ids{std::vector<int64_t>(count)};
  Mirrored<float> stats{std::vector<float>(count * kTokenStatsColumns)};
  Mirrored<float> inverse{std::vector<float>(count, 3.0F)};
  Mirrored<double> uniforms{std::vector<double>(count, 0.37)};
  Mirrored<int32_t> top_k{std::vector<int32_t>(count, static_cast<int32_t>(state.range(2)))};
  Mirrored<float> top_p{std::vector<float>(count, static_cast<float>(state.range(3)) / 1000.0F)};
  const auto params = [&](bool is_device, int64_t rotation) {
    SampleFilteredParams result;
    result.logits =
        logits[static_cast<size_t>(rotation)]->ref(is_device, DType::kBF16, {rows, vocab});
    result.inv_temperature = inverse.ref(is_device, DType::kF32, {rows});
    result.uniforms = uniforms.ref(is_device, DType::kF64, {rows});
    result.top_k = top_k.ref(is_device, DType::kI32, {rows});
    result.top_p = top_p.ref(is_device, DType::kF32, {rows});
    result.ids = ids.ref(is_device, DType::kI64, {rows});
    result.stats = stats.ref(is_device, DType::kF32, {rows, kTokenStatsColumns});
    return result;
  };
  expect_ok(sample_filtered(params(true, 0), on_device(nullptr)));
  require(cudaDeviceSynchronize(), "check");
  ids.download();
  const std::vector<int64_t> got = ids.host;
  expect_ok(sample_filtered(params(false, 0), ExecContext()));
  if (got != ids.host) {
    state.SkipWithError("wrong result");
    return;
  }
  measure(state, rotations, static_cast<double>(bytes), 0.0,
          [&](int64_t rotation, cudaStream_t stream) {
            expect_ok(sample_filtered(params(true, rotation), on_device(stream)));
          });
}
BENCHMARK(BM_CudaSampleFiltered)
    ->Args({151936, 1, 50, 900})
    ->Args({151936, 32, 50, 900})
    ->Args({151936, 32, 0, 900})
    ->Args({151936, 256, 50, 900})
    ->UseManualTime()
    ->Iterations(30)
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace diffulex::bench
