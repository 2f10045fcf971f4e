// SPDX-License-Identifier: Apache-2.0

// CPU kernels in real time: block attention (decode and prefill), RMSNorm, gated activation,
// packed linear products, token_stats. The last argument of each benchmark is the number of
// threads.

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>

#include "diffulex/core/thread_pool.h"
#include "diffulex/ops/activation.h"
#include "diffulex/ops/attention.h"
#include "diffulex/ops/linear.h"
#include "diffulex/ops/norm.h"
#include "diffulex/ops/sampling.h"
#include "ops/shared/half.h"

namespace diffulex {
namespace {

/// bfloat16 tensor of N(0, 1) values.
class Bf16Tensor final {
 public:
  explicit Bf16Tensor(const std::vector<int64_t>& shape) {
    ref_.dtype = DType::kBF16;
    ref_.rank = static_cast<int32_t>(shape.size());
    int64_t stride = 1;
    for (size_t dim = shape.size(); dim-- > 0;) {
      ref_.size[dim] = shape[dim];
      ref_.stride[dim] = stride;
      stride *= shape[dim];
    }
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    // A short period suffices and keeps set-up of large tensors quick.
    std::vector<uint16_t> period(8191);
    for (uint16_t& value : period) {
      value = float_to_bf16(normal(random));
    }
    values_.resize(static_cast<size_t>(stride));
    for (size_t i = 0; i < values_.size(); ++i) {
      values_[i] = period[i % period.size()];
    }
    ref_.data = values_.data();
  }
  [[nodiscard]] const TensorRef& ref() const { return ref_; }

 private:
  TensorRef ref_;
  std::vector<uint16_t> values_;
};

template <typename T>
TensorRef vector_ref(std::vector<T>& values, DType dtype, std::vector<int64_t> shape) {
  TensorRef ref;
  ref.data = values.data();
  ref.dtype = dtype;
  ref.rank = static_cast<int32_t>(shape.size());
  int64_t stride = 1;
  for (size_t dim = shape.size(); dim-- > 0;) {
    ref.size[dim] = shape[dim];
    ref.stride[dim] = stride;
    stride *= shape[dim];
  }
  return ref;
}

ExecContext make_context(ThreadPool* pool) {
  ExecContext context;
  context.parallel_for = ThreadPool::parallel_for;
  context.parallel_pool = pool;
  return context;
}

void require(benchmark::State& state, const Status& status) {
  if (!status.ok()) {
    state.SkipWithError(status.message().c_str());
  }
}

/// Arguments: requests, rows per request, context, threads. 16 query heads, 8 KV heads, D = 128.
void bench_attention(benchmark::State& state) {
  const int64_t num_reqs = state.range(0);
  const int64_t rows = state.range(1);
  const int64_t context_len = state.range(2);
  constexpr int64_t kHeads = 16;
  constexpr int64_t kKvHeads = 8;
  constexpr int64_t kDim = 128;
  constexpr int64_t kPage = 32;
  const int64_t pages = context_len / kPage + 1;
  const Bf16Tensor q({num_reqs * rows, kHeads, kDim});
  const Bf16Tensor k({num_reqs * rows, kKvHeads, kDim});
  const Bf16Tensor out({num_reqs * rows, kHeads, kDim});
  const Bf16Tensor cache({num_reqs * pages, kPage, kKvHeads, kDim});
  std::vector<int32_t> page_table(static_cast<size_t>(num_reqs * pages));
  std::iota(page_table.begin(), page_table.end(), 0);
  std::shuffle(page_table.begin(), page_table.end(), std::mt19937(2));
  std::vector<int32_t> cu_seqlens_q;
  std::vector<int32_t> valid;
  for (int64_t r = 0; r <= num_reqs; ++r) {
    cu_seqlens_q.push_back(static_cast<int32_t>(r * rows));
  }
  valid.assign(cu_seqlens_q.begin() + 1, cu_seqlens_q.end());
  std::vector<int32_t> context_lens(static_cast<size_t>(num_reqs),
                                    static_cast<int32_t>(context_len));
  std::vector<int32_t> kinds(static_cast<size_t>(num_reqs), 1);
  BlockAttentionParams params;
  params.q = q.ref();
  params.k = k.ref();
  params.v = k.ref();
  params.k_cache = cache.ref();
  params.v_cache = cache.ref();
  params.page_table = vector_ref(page_table, DType::kI32, {num_reqs, pages});
  params.cu_seqlens_q = vector_ref(cu_seqlens_q, DType::kI32, {num_reqs + 1});
  params.context_lens = vector_ref(context_lens, DType::kI32, {num_reqs});
  params.valid_slices = vector_ref(valid, DType::kI32, {num_reqs});
  params.mask_kinds = vector_ref(kinds, DType::kI32, {num_reqs});
  params.out = out.ref();
  params.scale = 0.088F;
  params.block_size = 4;
  params.max_seqlen_q = static_cast<int32_t>(rows);
  params.max_context_len = static_cast<int32_t>(context_len);
  ThreadPool pool(static_cast<int32_t>(state.range(3)));
  const ExecContext context = make_context(&pool);
  for (auto _ : state) {
    require(state, block_attention(params, context));
  }
  // Visible pairs only: block-causal rows see the context and, on average, half of the chunk.
  const double pairs =
      static_cast<double>(num_reqs * kHeads) *
      (static_cast<double>(rows * context_len) + static_cast<double>(rows * (rows + 4)) / 2.0);
  state.counters["flops"] =
      benchmark::Counter(4.0 * kDim * pairs, benchmark::Counter::kIsIterationInvariantRate);
}

/// Arguments: rows, hidden size, threads.
void bench_rms_norm(benchmark::State& state) {
  const Bf16Tensor x({state.range(0), state.range(1)});
  const Bf16Tensor weight({state.range(1)});
  const Bf16Tensor out({state.range(0), state.range(1)});
  RmsNormParams params;
  params.x = x.ref();
  params.weight = weight.ref();
  params.out = out.ref();
  ThreadPool pool(static_cast<int32_t>(state.range(2)));
  const ExecContext context = make_context(&pool);
  for (auto _ : state) {
    require(state, rms_norm(params, context));
  }
  state.SetBytesProcessed(state.iterations() * state.range(0) * state.range(1) * 4);
}

/// Arguments: rows, intermediate size, threads.
void bench_act_and_mul(benchmark::State& state) {
  const Bf16Tensor x({state.range(0), 2 * state.range(1)});
  const Bf16Tensor out({state.range(0), state.range(1)});
  ActAndMulParams params;
  params.x = x.ref();
  params.out = out.ref();
  ThreadPool pool(static_cast<int32_t>(state.range(2)));
  const ExecContext context = make_context(&pool);
  for (auto _ : state) {
    require(state, act_and_mul(params, context));
  }
  state.SetBytesProcessed(state.iterations() * state.range(0) * state.range(1) * 6);
}

/// Arguments: rows, in features, out features, 1 = bfloat16 panels, threads.
void bench_linear_packed(benchmark::State& state) {
  const int64_t rows = state.range(0);
  const int64_t depth = state.range(1);
  const int64_t columns = state.range(2);
  const std::vector<int64_t> shape = {(columns + 31) / 32, depth, 32};
  const Bf16Tensor bf16_weight(shape);
  std::vector<float> x(static_cast<size_t>(rows * depth), 0.5F);
  std::vector<float> weight(static_cast<size_t>(shape[0] * depth * 32), 0.25F);
  std::vector<float> out(static_cast<size_t>(rows * columns));
  LinearPackedParams params;
  params.x = vector_ref(x, DType::kF32, {rows, depth});
  params.packed_weight =
      state.range(3) != 0 ? bf16_weight.ref() : vector_ref(weight, DType::kF32, shape);
  params.out = vector_ref(out, DType::kF32, {rows, columns});
  params.out_features = static_cast<int32_t>(columns);
  ThreadPool pool(static_cast<int32_t>(state.range(4)));
  const ExecContext context = make_context(&pool);
  for (auto _ : state) {
    require(state, linear_packed(params, context));
  }
  state.counters["flops"] = benchmark::Counter(2.0 * static_cast<double>(rows * depth * columns),
                                               benchmark::Counter::kIsIterationInvariantRate);
  state.SetBytesProcessed(state.iterations() * depth * columns * (state.range(3) != 0 ? 2 : 4));
}

/// Arguments: rows, vocabulary, 1 = draw at temperature 0.8, threads.
void bench_token_stats(benchmark::State& state) {
  const int64_t rows = state.range(0);
  const Bf16Tensor logits({rows, state.range(1)});
  std::vector<int64_t> ids(static_cast<size_t>(rows));
  std::vector<float> stats(static_cast<size_t>(rows * kTokenStatsColumns));
  std::vector<int64_t> forbidden = {state.range(1) - 100};
  std::vector<float> inverse(static_cast<size_t>(rows), 1.25F);
  std::vector<double> uniforms(static_cast<size_t>(rows), 0.4);
  TokenStatsParams params;
  params.logits = logits.ref();
  params.forbidden_ids = vector_ref(forbidden, DType::kI64, {1});
  params.ids = vector_ref(ids, DType::kI64, {rows});
  params.stats = vector_ref(stats, DType::kF32, {rows, kTokenStatsColumns});
  if (state.range(2) != 0) {
    params.inv_temperature = vector_ref(inverse, DType::kF32, {rows});
    params.uniforms = vector_ref(uniforms, DType::kF64, {rows});
  }
  ThreadPool pool(static_cast<int32_t>(state.range(3)));
  const ExecContext context = make_context(&pool);
  for (auto _ : state) {
    require(state, token_stats(params, context));
  }
  state.SetBytesProcessed(state.iterations() * rows * state.range(1) * 2);
}

BENCHMARK(bench_attention)
    ->Name("cpu_attention")
    ->ArgNames({"reqs", "rows", "context", "threads"})
    ->Args({1, 4, 1024, 1})
    ->Args({1, 16, 1024, 1})
    ->Args({1, 16, 1024, 2})
    ->Args({8, 32, 1024, 1})
    ->Args({8, 32, 1024, 2})
    ->Args({1, 512, 0, 1})
    ->Args({1, 512, 0, 2})
    ->UseRealTime();
BENCHMARK(bench_rms_norm)
    ->Name("cpu_rms_norm")
    ->ArgNames({"rows", "hidden", "threads"})
    ->Args({8, 1024, 2})
    ->Args({128, 1024, 1})
    ->Args({128, 4096, 1})
    ->Args({2048, 4096, 2})
    ->UseRealTime();
BENCHMARK(bench_act_and_mul)
    ->Name("cpu_act_and_mul")
    ->ArgNames({"rows", "width", "threads"})
    ->Args({8, 3072, 1})
    ->Args({128, 3072, 2})
    ->UseRealTime();
BENCHMARK(bench_linear_packed)
    ->Name("cpu_linear_packed")
    ->ArgNames({"rows", "in", "out", "bf16", "threads"})
    ->Args({8, 256, 1280, 0, 1})
    ->Args({8, 256, 1280, 0, 2})
    ->Args({32, 256, 1280, 0, 2})
    ->Args({8, 1024, 6144, 0, 1})
    ->Args({8, 1024, 6144, 0, 2})
    ->Args({8, 1024, 6144, 1, 2})
    ->Args({32, 1024, 6144, 0, 2})
    ->Args({256, 1024, 6144, 0, 2})
    ->Args({32, 1024, 151936, 0, 2})
    ->UseRealTime();
BENCHMARK(bench_token_stats)
    ->Name("cpu_token_stats")
    ->ArgNames({"rows", "vocab", "draw", "threads"})
    ->Args({1, 151936, 0, 1})
    ->Args({1, 151936, 0, 2})
    ->Args({8, 151936, 0, 2})
    ->Args({32, 151936, 0, 2})
    ->Args({32, 151936, 1, 2})
    ->Args({32, 512, 0, 2})
    ->UseRealTime();

}  // namespace
}  // namespace diffulex
