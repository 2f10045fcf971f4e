// SPDX-License-Identifier: Apache-2.0

// Every shape, dtype and scalar violation: code, and the text `diffulex::<op>: <argument>: ...`.

#include <functional>

#include <gtest/gtest.h>

#include "diffulex/ops/activation.h"
#include "diffulex/ops/attention.h"
#include "diffulex/ops/kv.h"
#include "diffulex/ops/linear.h"
#include "diffulex/ops/norm.h"
#include "diffulex/ops/rope.h"
#include "diffulex/ops/sampling.h"
#include "ops/attention_case.h"

namespace diffulex::test {
namespace {

void expect_error(const Status& status, const std::string& text,
                  StatusCode code = StatusCode::kInvalidArgument) {
  EXPECT_EQ(status.code(), code) << status.message();
  EXPECT_NE(status.message().find(text), std::string::npos)
      << "expected: " << text << "\ngot: " << status.message();
}

template <typename Params>
struct Violation {
  std::function<void(Params*)> spoil;
  std::string text;
  StatusCode code = StatusCode::kInvalidArgument;
};

template <typename Params>
void expect_all(const char* op, const Params& good,
                Status (*run)(const Params&, const ExecContext&),
                const std::vector<Violation<Params>>& violations) {
  const Status status = run(good, ExecContext{});
  ASSERT_TRUE(status.ok()) << status.message();
  for (const Violation<Params>& violation : violations) {
    Params bad = good;
    violation.spoil(&bad);
    expect_error(run(bad, ExecContext{}), std::string("diffulex::") + op + ": " + violation.text,
                 violation.code);
  }
}

TEST(KernelErrors, BlockAttention) {
  CaseShape shape;
  shape.group = 2;
  AttentionCase attention_case(shape, {{5, 5, 9, 1, false, 0, 0, 9}}, 1);
  TestTensor other(DType::kF32, {1});
  using P = BlockAttentionParams;
  expect_all<P>(
      "block_attention", attention_case.params(), block_attention,
      {{[](P* p) { p->q = TensorRef{}; }, "q: expected a tensor, got none"},
       {[](P* p) { p->q.dtype = DType::kF64; },
        "q: expected dtype float32, float16 or bfloat16, got float64"},
       {[](P* p) { p->q.rank = 2; }, "q: expected shape [*, *, *], got [5, 2]"},
       {[](P* p) { p->q.stride[2] = 2; }, "q: expected a contiguous last dimension, got stride 2"},
       {[](P* p) { p->k.dtype = DType::kF16; }, "k: expected dtype float32, got float16"},
       {[](P* p) { p->k.size[2] = 8; }, "k: expected shape [5, *, 16], got [5, 1, 8]"},
       {[](P* p) { p->v.size[1] = 2; }, "v: expected shape [5, 1, 16], got [5, 2, 16]"},
       {[](P* p) {
          p->q.size[1] = 3;
          p->k.size[1] = 2;
          p->v.size[1] = 2;
        },
        "q: expected a number of heads divisible by 2 kv heads, got 3"},
       {[](P* p) { p->out.size[1] = 1; }, "out: expected shape [5, 2, 16], got [5, 1, 16]"},
       {[](P* p) { p->out.data = p->q.data; },
        "out: expected memory of its own, got the memory of q"},
       {[](P* p) { p->lse.dtype = DType::kF64; }, "lse: expected dtype float32, got float64"},
       {[](P* p) { p->scale = 0.0F; }, "scale: expected a finite value > 0, got 0"},
       {[](P* p) { p->scale = std::nanf(""); }, "scale: expected a finite value > 0, got nan"},
       {[](P* p) { p->softcap = -1.0F; }, "softcap: expected a finite value >= 0, got -1"},
       {[](P* p) { p->block_size = 0; }, "block_size: expected a value >= 1, got 0"},
       {[](P* p) { p->sliding_window = -1; }, "sliding_window: expected a value >= 0, got -1"},
       {[](P* p) { p->max_seqlen_q = 0; }, "max_seqlen_q: expected a value >= 1, got 0"},
       {[](P* p) { p->max_context_len = -1; }, "max_context_len: expected a value >= 0, got -1"},
       {[](P* p) { p->num_splits = -1; }, "num_splits: expected a value >= 0, got -1"},
       {[](P* p) { p->kv_layout = static_cast<KvLayout>(2); },
        "kv_layout: expected 0 (unified) or 1 (distinct), got 2"},
       {[](P* p) { p->k_cache.dtype = DType::kF8E4M3; },
        "k_cache: expected dtype float32, float16 or bfloat16 without k_scale, got float8_e4m3fn"},
       {[&](P* p) { p->k_scale = other.ref(); }, "k_scale: expected dtype uint8, got float32"},
       {[&](P* p) { p->v_scale = other.ref(); }, "v_scale: expected none without k_scale, got"},
       {[](P* p) {
          p->k_cache.dtype = DType::kF16;
          p->v_cache.dtype = DType::kF16;
        },
        "k_cache: expected dtype float32, got float16"},
       {[](P* p) { p->v_cache.dtype = DType::kF16; },
        "v_cache: expected dtype float32, got float16"},
       {[](P* p) {
          p->k_cache.size[1] = 5;
          p->v_cache.size[1] = 5;
        },
        "k_cache: expected a page size of 4, 8, 16, 32, 64, 128 or 256, got 5"},
       {[](P* p) { p->k_cache.size[2] = 0; },
        "k_cache: expected shape [num_pages, page_size, >= 1, >= 16]"},
       {[](P* p) { p->v_cache.size[3] = 15; }, "v_cache: expected shape [num_pages, page_size"},
       {[](P* p) { p->kv_layout = KvLayout::kDistinct; },
        "k_cache: expected shape [num_pages, 1, 16 / x, page_size, x]"},
       {[](P* p) { p->page_table.dtype = DType::kI64; },
        "page_table: expected dtype int32, got int64"},
       {[](P* p) { p->cu_seqlens_q.size[0] = 3; }, "cu_seqlens_q: expected shape [2], got [3]"},
       {[](P* p) { p->context_lens.size[0] = 2; }, "context_lens: expected shape [1], got [2]"},
       {[](P* p) { p->valid_slices = TensorRef{}; }, "valid_slices: expected a tensor, got none"},
       {[](P* p) {
          p->mask_kinds.rank = 2;
          p->mask_kinds.size[1] = 1;
        },
        "mask_kinds: expected shape [1], got [1, 1]"},
       {[](P* p) { p->prefix_lens.dtype = DType::kF32; },
        "prefix_lens: expected dtype int32, got float32"},
       {[](P* p) { p->padded_prefix_lens.size[0] = 4; }, "padded_prefix_lens: expected shape [1]"},
       {[](P* p) { p->q_starts.size[0] = 0; }, "q_starts: expected shape [1], got [0]"}});
}

TEST(KernelErrors, CodesOfAttention) {
  CaseShape shape;
  shape.group = 2;
  shape.head_dim = 128;
  AttentionCase attention_case(shape, {{5, 5, 9, 1, false, 0, 0, 9}}, 1);
  TestTensor codes(DType::kI8, {5, 256});
  std::vector<float> scales(10);
  BlockAttentionParams params = attention_case.params();
  params.codes = codes.ref();
  params.codes_scale = ref_of(scales, {2, 5});
  using P = BlockAttentionParams;
  expect_all<P>(
      "block_attention", params, block_attention,
      {{[](P* p) {
          for (TensorRef* tensor : {&p->q, &p->k, &p->v, &p->out}) {
            tensor->size[2] = 64;
          }
        },
        "q: expected a head dim of a multiple of 128 with codes, got 64"},
       {[](P* p) { p->codes = TensorRef{}; }, "codes: expected a tensor, got none"},
       {[](P* p) { p->codes_scale = TensorRef{}; }, "codes_scale: expected a tensor, got none"},
       {[](P* p) { p->codes.dtype = DType::kF16; },
        "codes: expected dtype float8_e4m3fn or int8, got float16"},
       {[](P* p) { p->codes.size[1] = 255; }, "codes: expected shape [5, 256], got [5, 255]"},
       {[](P* p) { p->codes_scale.size[0] = 1; }, "codes_scale: expected shape [2, *], got [1, 5]"},
       {[](P* p) { p->codes_scale.size[1] = 4; },
        "codes_scale: expected at least 5 columns, got [2, 4]"},
       {[](P* p) { p->out.stride[1] = 136; }, "out: expected "}});
}

TEST(KernelErrors, CudaNeedsACudaBuildAndAWorkspace) {
  CaseShape shape;
  AttentionCase attention_case(shape, {{5, 5, 2000, 1, false, 0, 0, 2000}}, 1);
  ExecContext context;
  context.device = Device::kCuda;
  const BlockAttentionParams params = attention_case.params();
  expect_error(block_attention(params, context), "block_attention: workspace: expected at least ");
  std::vector<uint8_t> workspace((1U << 20U) + 512);
  context.workspace =
      workspace.data() + 256 - reinterpret_cast<uintptr_t>(workspace.data()) % 256 + 1;
  context.workspace_bytes = 1U << 20U;
  expect_error(block_attention(params, context),
               "workspace: expected a 256-byte aligned address, got remainder 1");
}

TEST(KernelErrors, KvCache) {
  TestTensor rows(DType::kF32, {2, 2, 8});
  TestTensor cache(DType::kF32, {1, 4, 2, 8});
  TestTensor k_cache = cache;
  std::vector<int32_t> slots = {0, 1};
  StoreKvCacheParams store;
  store.k = rows.ref();
  store.v = rows.ref();
  store.k_cache = k_cache.ref();
  store.v_cache = cache.ref();
  store.slot_mapping = ref_of(slots);
  using S = StoreKvCacheParams;
  expect_all<S>(
      "store_kv_cache", store, store_kv_cache,
      {{[](S* p) { p->k.stride[1] = 9; },
        "k: expected contiguous dimensions from 1 on, got stride 9 in dimension 1"},
       {[](S* p) { p->v.dtype = DType::kF16; }, "v: expected dtype float32, got float16"},
       {[](S* p) { p->slot_mapping.size[0] = 1; }, "slot_mapping: expected shape [2], got [1]"},
       {[](S* p) { p->slot_mapping.dtype = DType::kF32; },
        "slot_mapping: expected dtype int32 or int64, got float32"},
       {[](S* p) { p->k_cache.dtype = DType::kI8; }, "k_cache: expected dtype float32"},
       {[](S* p) { p->k_cache.dtype = DType::kF8E4M3; }, "k_cache: expected dtype"}});
  std::vector<int32_t> pages = {0};
  std::vector<int32_t> context = {0};
  std::vector<int32_t> offsets = {0, 2};
  TestTensor k_out(DType::kF32, {2, 2, 8});
  TestTensor v_out(DType::kF32, {2, 2, 8});
  LoadKvCacheParams load;
  load.k_cache = k_cache.ref();
  load.v_cache = cache.ref();
  load.k_new = rows.ref();
  load.v_new = rows.ref();
  load.page_table = ref_of(pages, {1, 1});
  load.context_lens = ref_of(context);
  load.cu_seqlens_q = ref_of(offsets);
  load.cu_seqlens_k = ref_of(offsets);
  load.k_out = k_out.ref();
  load.v_out = v_out.ref();
  using L = LoadKvCacheParams;
  expect_all<L>("load_kv_cache", load, load_kv_cache,
                {{[](L* p) { p->k_out.dtype = DType::kF16; }, "k_out: expected dtype float32"},
                 {[](L* p) { p->v_out.size[0] = 1; }, "v_out: expected shape [2, 2, 8]"},
                 {[](L* p) { p->cu_seqlens_k.size[0] = 1; }, "cu_seqlens_k: expected shape [2]"},
                 {[](L* p) { p->context_lens.size[0] = 2; }, "context_lens: expected shape [1]"}});
  std::vector<int32_t> pairs = {-1, 0};
  CopyKvPagesParams copy;
  copy.k_cache = k_cache.ref();
  copy.v_cache = cache.ref();
  copy.src_dst = ref_of(pairs, {1, 2});
  using C = CopyKvPagesParams;
  expect_all<C>("copy_kv_pages", copy, copy_kv_pages,
                {{[](C* p) { p->src_dst.size[1] = 1; }, "src_dst: expected shape [*, 2]"},
                 {[](C* p) { p->k_cache.rank = 3; }, "k_cache: expected a cache of rank 4 or 5"},
                 {[](C* p) { p->v_cache.size[0] = 3; }, "v_cache: expected 1 pages as k_cache"}});
}

TEST(KernelErrors, Norm) {
  TestTensor x(DType::kBF16, {2, 8});
  TestTensor residual(DType::kBF16, {2, 8});
  TestTensor weight(DType::kF32, {8});
  RmsNormParams params;
  params.x = x.ref();
  params.weight = weight.ref();
  params.out = x.ref();
  using P = RmsNormParams;
  expect_all<P>(
      "rms_norm", params, rms_norm,
      {{[](P* p) { p->weight.size[0] = 7; }, "weight: expected shape [8], got [7]"},
       {[](P* p) { p->weight.dtype = DType::kF16; },
        "weight: expected dtype bfloat16 or float32, got float16"},
       {[](P* p) { p->eps = -1.0F; }, "eps: expected a value >= 0, got -1"},
       {[](P* p) { p->x.size[1] = 0; }, "x: expected a last dimension >= 1, got [2, 0]"},
       {[](P* p) { p->out.dtype = DType::kF32; }, "out: expected dtype bfloat16, got float32"},
       {[](P* p) { p->out.size[0] = 3; }, "out: expected the shape of x [2, 8], got [3, 8]"}});
  TestTensor codes(DType::kI8, {2, 8});
  TestTensor code_scale(DType::kF32, {1, 2});
  params.codes = codes.ref();
  params.scale = code_scale.ref();
  expect_all<P>(
      "rms_norm", params, rms_norm,
      {{[](P* p) { p->scale = TensorRef{}; }, "scale: expected a tensor, got none"},
       {[](P* p) { p->codes = TensorRef{}; }, "codes: expected a tensor, got none"},
       {[](P* p) { p->scale.size[1] = 1; }, "scale: expected at least 2 columns, got [1, 1]"},
       {[](P* p) { p->codes.size[1] = 7; }, "codes: expected shape [2, 8], got [2, 7]"},
       {[](P* p) {
          for (TensorRef* rows : {&p->x, &p->out}) {
            rows->rank = 3;
            rows->size[1] = 1;
            rows->size[2] = 8;
            rows->stride[2] = 1;
          }
        },
        "x: expected 2 dimensions with codes, got [2, 1, 8]"}});
  params.codes = params.scale = TensorRef{};
  params.residual = residual.ref();
  expect_all<P>("add_rms_norm", params, add_rms_norm,
                {{[](P* p) { p->residual = TensorRef{}; }, "residual: expected a tensor, got none"},
                 {[](P* p) { p->residual.dtype = DType::kF32; },
                  "residual: expected dtype bfloat16, got float32"},
                 {[](P* p) { p->residual.data = p->x.data; },
                  "residual: expected memory of its own, got the memory of x"}});
  TestTensor scale(DType::kF32, {1});
  params.out_scale = scale.ref();
  expect_all<P>(
      "rms_norm_add", params, rms_norm_add,
      {{[](P* p) { p->out_scale.size[0] = 2; }, "out_scale: expected one element, got [2]"},
       {[](P* p) { p->out_scale.dtype = DType::kF16; }, "out_scale: expected dtype"}});
}

TEST(KernelErrors, Activation) {
  TestTensor x(DType::kF32, {2, 8});
  TestTensor out(DType::kF32, {2, 4});
  ActAndMulParams params;
  params.x = x.ref();
  params.out = out.ref();
  using P = ActAndMulParams;
  expect_all<P>("act_and_mul", params, act_and_mul,
                {{[](P* p) { p->x.size[1] = 7; }, "x: expected an even last dimension, got [2, 7]"},
                 {[](P* p) { p->out.size[1] = 8; }, "out: expected shape [2, 4], got [2, 8]"},
                 {[](P* p) { p->out.dtype = DType::kF16; }, "out: expected dtype float32"},
                 {[](P* p) { p->act = static_cast<Activation>(3); },
                  "act: expected 0 (silu), 1 (gelu tanh) or 2 (gelu erf), got 3"}});
}

TEST(KernelErrors, Linear) {
  TestTensor x(DType::kF32, {2, 8});
  TestTensor weight(DType::kF32, {2, 8, 32});
  TestTensor out(DType::kF32, {2, 40});
  LinearPackedParams params;
  params.x = x.ref();
  params.packed_weight = weight.ref();
  params.out = out.ref();
  params.out_features = 40;
  using P = LinearPackedParams;
  expect_all<P>(
      "linear_packed", params, linear_packed,
      {{[](P* p) { p->x.dtype = DType::kBF16; }, "x: expected dtype float32, got bfloat16"},
       {[](P* p) { p->x.rank = 1; }, "x: expected shape [*, *], got [2]"},
       {[](P* p) { p->x.stride[1] = 2; }, "x: expected a contiguous last dimension, got stride 2"},
       {[](P* p) { p->x.size[1] = 0; }, "x: expected a last dimension >= 1, got [2, 0]"},
       {[](P* p) { p->out_features = 0; }, "out_features: expected a value >= 1, got 0"},
       {[](P* p) { p->out_features = 65; },
        "packed_weight: expected shape [3, 8, 32], got [2, 8, 32]"},
       {[](P* p) { p->out_features = 41; }, "out: expected shape [2, 41], got [2, 40]"},
       {[](P* p) { p->packed_weight.size[1] = 7; }, "packed_weight: expected shape [2, 8, 32]"},
       {[](P* p) { p->packed_weight.dtype = DType::kF16; },
        "packed_weight: expected dtype float32 or bfloat16, got float16"},
       {[](P* p) { p->packed_weight.stride[0] = 512; },
        "packed_weight: expected contiguous dimensions from 0 on, got stride 512"},
       {[](P* p) { p->out.dtype = DType::kF16; }, "out: expected dtype float32, got float16"},
       {[](P* p) { p->out.size[0] = 3; }, "out: expected shape [2, 40], got [3, 40]"},
       {[](P* p) { p->out.data = p->x.data; },
        "out: expected memory of its own, got the memory of x"}});
  ExecContext context;
  context.device = Device::kCuda;
  expect_error(linear_packed(params, context),
               "diffulex::linear_packed: x: expected a CPU tensor, got cuda",
               StatusCode::kUnsupported);
}

TEST(KernelErrors, Rope) {
  TestTensor q(DType::kF32, {2, 2, 8});
  TestTensor k(DType::kF32, {2, 8});
  TestTensor angles(DType::kF32, {4, 8});
  std::vector<int64_t> positions = {0, 1};
  RotaryParams params;
  params.positions = ref_of(positions);
  params.q = q.ref();
  params.k = k.ref();
  params.cos_sin_cache = angles.ref();
  params.head_dim = 8;
  using P = RotaryParams;
  expect_all<P>(
      "rotary_embedding", params, rotary_embedding,
      {{[](P* p) { p->cos_sin_cache.dtype = DType::kBF16; },
        "cos_sin_cache: expected dtype float32, got bfloat16"},
       {[](P* p) { p->cos_sin_cache.size[1] = 7; },
        "cos_sin_cache: expected an even rotary dim of at most head_dim 8, got 7"},
       {[](P* p) { p->cos_sin_cache.size[1] = 10; }, "cos_sin_cache: expected an even rotary dim"},
       {[](P* p) { p->head_dim = 0; }, "head_dim: expected a value >= 1, got 0"},
       {[](P* p) { p->q.size[2] = 7; },
        "q: expected shape [T, heads * 8] or [T, heads, 8], got [2, 2, 7]"},
       {[](P* p) { p->k.dtype = DType::kF16; }, "k: expected dtype float32, got float16"},
       {[](P* p) { p->k.size[0] = 1; }, "k: expected 2 rows as q, got [1, 8]"},
       {[](P* p) { p->positions.size[0] = 1; }, "positions: expected shape [2], got [1]"},
       {[](P* p) { p->positions.dtype = DType::kF32; },
        "positions: expected dtype int64 or int32, got float32"}});
  TestTensor qkv(DType::kF32, {2, 32});
  TestTensor weight(DType::kF32, {8});
  TestTensor cache(DType::kF32, {1, 4, 1, 8});
  std::vector<int32_t> slots = {-1, -1};
  QkNormRopeParams fused;
  fused.qkv = qkv.ref();
  fused.positions = ref_of(positions);
  fused.cos_sin_cache = angles.ref();
  fused.q_weight = weight.ref();
  fused.num_q_heads = 2;
  fused.num_kv_heads = 1;
  fused.head_dim = 8;
  using Q = QkNormRopeParams;
  expect_all<Q>("qk_norm_rope", fused, qk_norm_rope,
                {{[](Q* p) { p->qkv.size[1] = 24; }, "qkv: expected shape [*, 32], got [2, 24]"},
                 {[](Q* p) { p->v_from_raw_k = true; }, "qkv: expected shape [*, 24], got [2, 32]"},
                 {[](Q* p) {
                    p->v_from_raw_k = true;
                    p->qkv.size[1] = 24;
                  },
                  "v_out: expected a tensor, got none"},
                 {[](Q* p) { p->v_out = p->qkv; }, "v_out: expected none without v_from_raw_k"},
                 {[](Q* p) { p->q_weight.size[0] = 4; }, "q_weight: expected shape [8], got [4]"},
                 {[](Q* p) { p->k_weight = p->qkv; }, "k_weight: expected shape [8], got [2, 32]"},
                 {[](Q* p) { p->num_q_heads = 0; }, "num_q_heads: expected a value >= 1, got 0"},
                 {[](Q* p) { p->num_kv_heads = 0; }, "num_kv_heads: expected a value >= 1, got 0"},
                 {[](Q* p) { p->eps = -1.0F; }, "eps: expected a value >= 0, got -1"}});
  fused.k_cache = cache.ref();
  fused.v_cache = cache.ref();
  fused.slot_mapping = ref_of(slots);
  expect_all<Q>("qk_norm_rope_store", fused, qk_norm_rope_store,
                {{[](Q* p) { p->slot_mapping = TensorRef{}; }, "slot_mapping: expected a tensor"},
                 {[](Q* p) { p->k_cache = TensorRef{}; }, "k_cache: expected a tensor, got none"}});
}

TEST(KernelErrors, TokenStats) {
  TestTensor logits(DType::kF32, {2, 8});
  std::vector<int64_t> ids(2);
  std::vector<float> stats(16);
  std::vector<int64_t> many(9, 0);
  std::vector<float> inverse(2, 0.0F);
  std::vector<double> uniforms(2, 0.5);
  std::vector<int64_t> wide_ids(130);
  std::vector<float> wide_probs(130);
  TokenStatsParams params;
  params.logits = logits.ref();
  params.ids = ref_of(ids);
  params.stats = ref_of(stats, {2, 8});
  using P = TokenStatsParams;
  expect_all<P>(
      "token_stats", params, token_stats,
      {{[](P* p) { p->logits.dtype = DType::kI32; }, "logits: expected dtype float32"},
       {[](P* p) { p->logits.size[1] = 0; },
        "logits: expected 1 to 2147483647 columns, got [2, 0]"},
       {[](P* p) {
          p->extra_logits = p->logits;
          p->extra_logits.size[1] = 7;
        },
        "extra_logits: expected shape [*, 8], got [2, 7]"},
       {[](P* p) { p->row_index = p->logits; },
        "row_index: expected dtype int32 or int64, got float32"},
       {[](P* p) { p->ids.size[0] = 1; }, "ids: expected shape [2], got [1]"},
       {[](P* p) { p->stats.size[1] = 6; }, "stats: expected shape [2, 8], got [2, 6]"},
       {[&](P* p) { p->inv_temperature = ref_of(inverse); },
        "uniforms: expected a tensor with inv_temperature, got none"},
       {[&](P* p) { p->uniforms = ref_of(uniforms); },
        "uniforms: expected none without inv_temperature, got a tensor of shape [2]"},
       {[&](P* p) {
          p->inv_temperature = ref_of(inverse);
          p->uniforms = ref_of(uniforms);
          p->partial = true;
        },
        "inv_temperature: expected none with partial, got a tensor"},
       {[&](P* p) { p->forbidden_ids = ref_of(many); },
        "forbidden_ids: expected at most 8 ids, got 9"},
       {[&](P* p) { p->penalty_ids = ref_of(many); },
        "penalties: expected a tensor with penalty_ids, got none"},
       {[&](P* p) {
          p->penalty_ids = ref_of(many);
          p->penalties = ref_of(inverse);
        },
        "penalty_ids: expected shape [2], got [9]"},
       {[&](P* p) { p->topk_ids = ref_of(wide_ids, {2, 65}); },
        "topk_probs: expected a tensor with topk_ids, got none"},
       {[&](P* p) {
          p->topk_ids = ref_of(wide_ids, {2, 65});
          p->topk_probs = ref_of(wide_probs, {2, 65});
        },
        "topk_ids: expected 1 to 64 columns, got 65"},
       {[](P* p) { p->vocab_limit = -2; }, "vocab_limit: expected a value >= -1, got -2"},
       {[](P* p) { p->softcap = -1.0F; }, "softcap: expected a finite value >= 0, got -1"},
       {[](P* p) { p->exclusion = static_cast<ExclusionMode>(3); },
        "exclusion: expected 0 (exclude), 1 (renormalize) or 2 (off), got 3"},
       {[](P* p) { p->vocab_start = -1; }, "vocab_start: expected a value >= 0, got -1"}});
  std::vector<int64_t> part_ids(2, -1);
  MergeTokenStatsParams merge;
  merge.part_ids = ref_of(part_ids, {1, 2});
  merge.part_stats = ref_of(stats, {1, 2, 8});
  merge.ids = ref_of(ids);
  std::vector<float> merged(16);
  merge.stats = ref_of(merged, {2, 8});
  using M = MergeTokenStatsParams;
  expect_all<M>("merge_token_stats", merge, merge_token_stats,
                {{[](M* p) { p->part_ids.size[0] = 0; }, "part_ids: expected at least one part"},
                 {[](M* p) { p->part_stats.size[0] = 2; }, "part_stats: expected shape [1, 2, 8]"},
                 {[](M* p) { p->part_topk_ids = p->part_ids; },
                  "part_topk_vals: expected a tensor with part_topk_ids, got none"},
                 {[](M* p) { p->topk_ids = p->part_ids; }, "topk_probs: expected a tensor with"}});
}

TEST(KernelErrors, AcceptMaskFill) {
  std::vector<int64_t> tokens(4, 0);
  std::vector<int64_t> writes(4);
  std::vector<int64_t> ids(1);
  std::vector<int32_t> rows(4, 0);
  std::vector<int32_t> zero(1, 0);
  std::vector<int32_t> left(1);
  std::vector<int32_t> flags(1);
  std::vector<uint8_t> gate(1, 1);
  std::vector<float> threshold(1, 0.5F);
  std::vector<float> stats(8);
  std::vector<float> confidence(4);
  AcceptMaskFillParams params;
  params.tokens = ref_of(tokens, {1, 4});
  params.row_index = ref_of(rows, {1, 4});
  params.editable_start = ref_of(zero);
  params.gate = ref_of(gate);
  params.accept_threshold = ref_of(threshold);
  params.open_steps = ref_of(zero);
  params.ids = ref_of(ids);
  params.stats = ref_of(stats, {1, 8});
  params.write_ids = ref_of(writes, {1, 4});
  params.confidence = ref_of(confidence, {1, 4});
  params.masks_left = ref_of(left);
  params.flags = ref_of(flags);
  params.mask_token_id = 7;
  using P = AcceptMaskFillParams;
  expect_all<P>(
      "accept_mask_fill", params, accept_mask_fill,
      {{[](P* p) { p->tokens.dtype = DType::kI32; }, "tokens: expected dtype int64, got int32"},
       {[](P* p) { p->tokens.size[1] = 0; }, "tokens: expected at least one position per block"},
       {[](P* p) { p->row_index.size[1] = 3; }, "row_index: expected shape [1, 4], got [1, 3]"},
       {[](P* p) { p->editable_start = TensorRef{}; }, "editable_start: expected a tensor"},
       {[](P* p) { p->valid_len = p->ids; }, "valid_len: expected dtype int32, got int64"},
       {[](P* p) { p->gate.dtype = DType::kI32; }, "gate: expected dtype uint8, got int32"},
       {[](P* p) { p->accept_threshold.size[0] = 2; }, "accept_threshold: expected shape [1]"},
       {[](P* p) { p->open_steps.size[0] = 0; }, "open_steps: expected shape [1], got [0]"},
       {[](P* p) {
          p->ids.rank = 2;
          p->ids.size[1] = 1;
        },
        "ids: expected shape [*], got [1, 1]"},
       {[](P* p) { p->stats.size[1] = 6; }, "stats: expected shape [1, 8], got [1, 6]"},
       {[](P* p) { p->write_ids.size[0] = 2; }, "write_ids: expected shape [1, 4]"},
       {[](P* p) { p->confidence.dtype = DType::kF16; }, "confidence: expected dtype float32"},
       {[](P* p) { p->masks_left = TensorRef{}; }, "masks_left: expected a tensor, got none"},
       {[](P* p) { p->flags.dtype = DType::kU8; }, "flags: expected dtype int32, got uint8"},
       {[](P* p) { p->rule = static_cast<AcceptRule>(9); }, "rule: expected 0 (threshold), 1"},
       {[](P* p) { p->confidence_kind = static_cast<ConfidenceKind>(3); },
        "confidence_kind: expected 0 (max_prob), 1 (margin) or 2 (neg_entropy), got 3"},
       {[](P* p) { p->mask_token_id = -1; }, "mask_token_id: expected a value >= 0, got -1"},
       {[](P* p) { p->denoising_steps = -1; }, "denoising_steps: expected a value >= 0, got -1"},
       {[](P* p) { p->factor = std::nanf(""); }, "factor: expected a number, got nan"},
       {[](P* p) { p->entropy_bound = std::nanf(""); }, "entropy_bound: expected a number"}});
}

}  // namespace
}  // namespace diffulex::test
