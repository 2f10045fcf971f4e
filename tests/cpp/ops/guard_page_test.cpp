// SPDX-License-Identifier: Apache-2.0

// Inputs and outputs that end exactly at an unmapped page: one element too far is a fault.

#include <gtest/gtest.h>

#include "diffulex/ops/activation.h"
#include "diffulex/ops/attention.h"
#include "diffulex/ops/kv.h"
#include "diffulex/ops/linear.h"
#include "diffulex/ops/norm.h"
#include "diffulex/ops/quantize.h"
#include "diffulex/ops/rope.h"
#include "diffulex/ops/routing.h"
#include "diffulex/ops/sampling.h"
#include "ops/attention_case.h"
#include "ops/guarded_tensor.h"
#include "ops/moe_case.h"

namespace diffulex::test {
namespace {

constexpr DType kDTypes[] = {DType::kF32, DType::kF16, DType::kBF16};

TEST(GuardPage, RowOps) {
  std::mt19937_64 random(1);
  for (const DType dtype : kDTypes) {
    for (const int64_t width : {1, 3, 7, 8, 15, 16, 17, 31, 33, 100}) {
      TestTensor x(dtype, {3, 2 * width});
      x.fill_normal(&random);
      TestTensor weight(dtype, {2 * width});
      TestTensor half(dtype, {3, width});
      const GuardedTensor guarded_x(x.ref());
      const GuardedTensor guarded_weight(weight.ref());
      const GuardedTensor guarded_residual(x.ref());
      const GuardedTensor guarded_out(x.ref());
      const GuardedTensor guarded_half(half.ref());
      RmsNormParams norm;
      norm.x = guarded_x.ref();
      norm.weight = guarded_weight.ref();
      norm.out = guarded_out.ref();
      ASSERT_TRUE(rms_norm(norm, ExecContext{}).ok());
      TestTensor codes(DType::kI8, {3, 2 * width});
      TestTensor code_scale(DType::kF32, {(2 * width + 127) / 128, 3});
      const GuardedTensor guarded_codes(codes.ref());
      const GuardedTensor guarded_scale(code_scale.ref());
      RmsNormParams coded = norm;
      coded.codes = guarded_codes.ref();
      coded.scale = guarded_scale.ref();
      ASSERT_TRUE(rms_norm(coded, ExecContext{}).ok());
      norm.residual = guarded_residual.ref();
      ASSERT_TRUE(rms_norm_add(norm, ExecContext{}).ok());
      ASSERT_TRUE(add_rms_norm(norm, ExecContext{}).ok());
      ActAndMulParams act;
      act.x = guarded_x.ref();
      act.out = guarded_half.ref();
      ASSERT_TRUE(act_and_mul(act, ExecContext{}).ok());
    }
  }
}

TEST(GuardPage, Rope) {
  for (const DType dtype : kDTypes) {
    for (const int64_t dim : {2, 6, 16, 20, 64}) {
      TestTensor qkv(dtype, {2, 4 * dim});
      TestTensor angles(DType::kF32, {3, dim});
      TestTensor weight(dtype, {dim});
      TestTensor cache(dtype, {1, 4, 1, dim});
      std::vector<int64_t> positions = {0, 2};
      std::vector<int32_t> slots = {0, 3};
      const GuardedTensor guarded_qkv(qkv.ref());
      const GuardedTensor guarded_angles(angles.ref());
      const GuardedTensor guarded_weight(weight.ref());
      const GuardedTensor guarded_k(cache.ref());
      const GuardedTensor guarded_v(cache.ref());
      const GuardedTensor guarded_positions(ref_of(positions));
      const GuardedTensor guarded_slots(ref_of(slots));
      QkNormRopeParams params;
      params.qkv = guarded_qkv.ref();
      params.positions = guarded_positions.ref();
      params.cos_sin_cache = guarded_angles.ref();
      params.q_weight = guarded_weight.ref();
      params.k_weight = guarded_weight.ref();
      params.k_cache = guarded_k.ref();
      params.v_cache = guarded_v.ref();
      params.slot_mapping = guarded_slots.ref();
      params.num_q_heads = 2;
      params.num_kv_heads = 1;
      params.head_dim = static_cast<int32_t>(dim);
      params.norm_v = true;
      for (const bool neox : {true, false}) {
        params.neox = neox;
        const Status status = qk_norm_rope_store(params, ExecContext{});
        ASSERT_TRUE(status.ok()) << status.message();
      }
    }
  }
}

TEST(GuardPage, LinearPacked) {
  std::mt19937_64 random(3);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t depth : {1, 7, 16, 257}) {
      for (const int64_t columns : {1, 31, 32, 33}) {
        for (const int64_t rows : {1, 5, 12, 13}) {
          TestTensor x(DType::kF32, {rows, depth});
          x.fill_normal(&random);
          TestTensor weight(dtype, {(columns + 31) / 32, depth, 32});
          TestTensor out(DType::kF32, {rows, columns});
          const GuardedTensor guarded_x(x.ref());
          const GuardedTensor guarded_weight(weight.ref());
          const GuardedTensor guarded_out(out.ref());
          LinearPackedParams params;
          params.x = guarded_x.ref();
          params.packed_weight = guarded_weight.ref();
          params.out = guarded_out.ref();
          params.out_features = static_cast<int32_t>(columns);
          ASSERT_TRUE(linear_packed(params, ExecContext{}).ok());
        }
      }
    }
  }
}

TEST(GuardPage, Routing) {
  std::mt19937_64 random(4);
  for (const DType dtype : kDTypes) {
    for (const int64_t depth : {1, 7, 16, 33}) {
      for (const int64_t experts : {4, 15, 33}) {
        TestTensor x(dtype, {5, depth});
        TestTensor w(DType::kBF16, {experts, depth});
        x.fill_normal(&random);
        w.fill_normal(&random);
        TestTensor logits(DType::kF32, {5, experts});
        std::vector<float> bias(static_cast<size_t>(experts));
        std::vector<uint8_t> valid(5, 1);
        std::vector<float> weights(15);
        std::vector<int32_t> ids(15);
        const GuardedTensor guarded_x(x.ref());
        const GuardedTensor guarded_w(w.ref());
        const GuardedTensor guarded_logits(logits.ref());
        const GuardedTensor guarded_bias(ref_of(bias));
        const GuardedTensor guarded_valid(ref_of(valid));
        const GuardedTensor guarded_weights(ref_of(weights, {5, 3}));
        const GuardedTensor guarded_ids(ref_of(ids, {5, 3}));
        RouterGemmParams gemm;
        gemm.x = guarded_x.ref();
        gemm.w = guarded_w.ref();
        gemm.logits = guarded_logits.ref();
        ASSERT_TRUE(router_gemm(gemm, ExecContext{}).ok());
        MoeTopkParams params;
        params.logits = guarded_logits.ref();
        params.bias = guarded_bias.ref();
        params.token_valid = guarded_valid.ref();
        params.weights = guarded_weights.ref();
        params.ids = guarded_ids.ref();
        params.top_k = 3;
        params.scoring = RouterScoring::kSigmoid;
        ASSERT_TRUE(moe_topk(params, ExecContext{}).ok());
      }
    }
  }
}

TEST(GuardPage, FusedMoe) {
  uint64_t seed = 0;
  for (const DType dtype : kDTypes) {
    for (const int64_t hidden : {2, 14, 66}) {
      for (const int64_t width : {2, 18, 70}) {
        MoeCaseShape shape;
        shape.dtype = dtype;
        shape.hidden = hidden;
        shape.width = width;
        shape.has_map = true;
        shape.has_addend = true;
        MoeCase moe(shape, ++seed);
        FusedMoeParams params = moe.params();
        const GuardedTensor x(params.x);
        const GuardedTensor w13(params.w13);
        const GuardedTensor w2(params.w2);
        const GuardedTensor weights(params.topk_weights);
        const GuardedTensor ids(params.topk_ids);
        const GuardedTensor map(params.expert_map);
        const GuardedTensor addend(params.addend);
        const GuardedTensor out(params.out);
        params.x = x.ref();
        params.w13 = w13.ref();
        params.w2 = w2.ref();
        params.topk_weights = weights.ref();
        params.topk_ids = ids.ref();
        params.expert_map = map.ref();
        params.addend = addend.ref();
        params.out = out.ref();
        const Status status = fused_moe(params, ExecContext{});
        ASSERT_TRUE(status.ok()) << status.message();
      }
    }
  }
}

TEST(GuardPage, TokenStats) {
  std::mt19937_64 random(2);
  for (const DType dtype : kDTypes) {
    for (const int64_t vocab : {1, 7, 16, 33, 2047, 2048, 2050, 4097}) {
      TestTensor logits(dtype, {2, vocab});
      logits.fill_normal(&random);
      std::vector<int64_t> ids(2);
      std::vector<int64_t> topk_ids(6);
      std::vector<float> stats(16);
      std::vector<float> topk_probs(6);
      std::vector<float> inverse = {1.5F, 0.0F};
      std::vector<double> uniforms = {.999, .5};
      const GuardedTensor guarded_logits(logits.ref());
      const GuardedTensor guarded_ids(ref_of(ids));
      const GuardedTensor guarded_stats(ref_of(stats, {2, 8}));
      const GuardedTensor guarded_topk_ids(ref_of(topk_ids, {2, 3}));
      const GuardedTensor guarded_topk_probs(ref_of(topk_probs, {2, 3}));
      TokenStatsParams params;
      params.logits = guarded_logits.ref();
      params.inv_temperature = ref_of(inverse);
      params.uniforms = ref_of(uniforms);
      params.ids = guarded_ids.ref();
      params.stats = guarded_stats.ref();
      params.topk_ids = guarded_topk_ids.ref();
      params.topk_probs = guarded_topk_probs.ref();
      for (const float softcap : {0.0F, 30.0F}) {
        params.softcap = softcap;
        const Status status = token_stats(params, ExecContext{});
        ASSERT_TRUE(status.ok()) << status.message();
      }
    }
  }
}

TEST(GuardPage, Attention) {
  for (const KvLayout layout : {KvLayout::kUnified, KvLayout::kDistinct}) {
    for (const int64_t dim : {8, 24, 64, 128}) {
      for (const DType dtype : kDTypes) {
        CaseShape shape;
        shape.dtype = dtype;
        shape.layout = layout;
        shape.head_dim = dim;
        shape.group = 3;
        AttentionCase attention_case(shape, {{5, 5, 13, 1, false, 0, 0, 13}}, 3);
        BlockAttentionParams params = attention_case.params();
        const GuardedTensor q(params.q);
        const GuardedTensor k(params.k);
        const GuardedTensor v(params.v);
        const GuardedTensor k_cache(params.k_cache);
        const GuardedTensor v_cache(params.v_cache);
        const GuardedTensor page_table(params.page_table);
        const GuardedTensor cu_seqlens_q(params.cu_seqlens_q);
        const GuardedTensor context_lens(params.context_lens);
        const GuardedTensor out(params.out);
        const GuardedTensor lse(params.lse);
        params.q = q.ref();
        params.k = k.ref();
        params.v = v.ref();
        params.k_cache = k_cache.ref();
        params.v_cache = v_cache.ref();
        params.page_table = page_table.ref();
        params.cu_seqlens_q = cu_seqlens_q.ref();
        params.context_lens = context_lens.ref();
        params.out = out.ref();
        params.lse = lse.ref();
        TestTensor code_room(DType::kI8, {5, 3 * dim});
        TestTensor scale_room(DType::kF32, {3, 5});
        const GuardedTensor codes(code_room.ref());
        const GuardedTensor codes_scale(scale_room.ref());
        if (dim % kQuantGroup == 0) {
          params.codes = codes.ref();
          params.codes_scale = codes_scale.ref();
        }
        const Status status = block_attention(params, ExecContext{});
        ASSERT_TRUE(status.ok()) << status.message();
      }
    }
  }
}

}  // namespace
}  // namespace diffulex::test
