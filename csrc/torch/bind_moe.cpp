// SPDX-License-Identifier: Apache-2.0
#include "diffulex/ops/moe.h"
#include "diffulex/ops/routing.h"
#include "torch/ops.h"

namespace diffulex::torch_ops {

void moe_topk(const Tensor& logits, const OptionalTensor& bias, const OptionalTensor& expert_scale,
              const OptionalTensor& token_valid, const Tensor& weights, const Tensor& ids,
              int64_t top_k, int64_t scoring, bool renormalize, int64_t n_group, int64_t topk_group,
              int64_t group_score, double routed_scaling) {
  OpArguments arguments("moe_topk");
  MoeTopkParams params;
  params.logits = arguments.input("logits", logits);
  params.bias = arguments.input("bias", bias);
  params.expert_scale = arguments.input("expert_scale", expert_scale);
  params.token_valid = arguments.flags("token_valid", token_valid);
  params.weights = arguments.output("weights", weights);
  params.ids = arguments.output("ids", ids);
  params.top_k = arguments.int32("top_k", top_k);
  params.scoring = arguments.enumeration<RouterScoring>("scoring", scoring);
  params.renormalize = renormalize;
  params.n_group = arguments.int32("n_group", n_group);
  params.topk_group = arguments.int32("topk_group", topk_group);
  params.group_score = arguments.enumeration<GroupScore>("group_score", group_score);
  params.routed_scaling = static_cast<float>(routed_scaling);
  arguments.run(&diffulex::moe_topk, params);
}

void router_gemm(const Tensor& x, const Tensor& w, const Tensor& logits) {
  OpArguments arguments("router_gemm");
  RouterGemmParams params;
  params.x = arguments.input("x", x);
  params.w = arguments.input("w", w);
  params.logits = arguments.output("logits", logits);
  arguments.run(&diffulex::router_gemm, params);
}

void moe_permute(const Tensor& topk_ids, const OptionalTensor& expert_map,
                 const Tensor& sorted_slots, const Tensor& expert_offsets,
                 const Tensor& tile_expert, const Tensor& tile_start, const Tensor& counters,
                 int64_t num_local_experts, int64_t tile) {
  OpArguments arguments("moe_permute");
  MoePermuteParams params;
  params.topk_ids = arguments.input("topk_ids", topk_ids);
  params.expert_map = arguments.input("expert_map", expert_map);
  params.sorted_slots = arguments.output("sorted_slots", sorted_slots);
  params.expert_offsets = arguments.output("expert_offsets", expert_offsets);
  params.tile_expert = arguments.output("tile_expert", tile_expert);
  params.tile_start = arguments.output("tile_start", tile_start);
  params.counters = arguments.output("counters", counters);
  params.num_local_experts = arguments.int32("num_local_experts", num_local_experts);
  params.tile = arguments.int32("tile", tile);
  arguments.run(&diffulex::moe_permute, params);
}

void fused_moe(const Tensor& x, const Tensor& w13, const Tensor& w2, const Tensor& topk_weights,
               const Tensor& topk_ids, const OptionalTensor& expert_map,
               const OptionalTensor& w13_scale, const OptionalTensor& w2_scale,
               const OptionalTensor& addend, const Tensor& out, const Tensor& workspace,
               int64_t act, bool weight_on_input) {
  OpArguments arguments("fused_moe");
  FusedMoeParams params;
  params.x = arguments.input("x", x);
  params.w13 = arguments.input("w13", w13);
  params.w2 = arguments.input("w2", w2);
  params.topk_weights = arguments.input("topk_weights", topk_weights);
  params.topk_ids = arguments.input("topk_ids", topk_ids);
  params.expert_map = arguments.input("expert_map", expert_map);
  params.w13_scale = arguments.input("w13_scale", w13_scale);
  params.w2_scale = arguments.input("w2_scale", w2_scale);
  params.addend = arguments.input("addend", addend);
  params.out = arguments.output("out", out);
  arguments.set_workspace(workspace);
  params.act = arguments.enumeration<Activation>("act", act);
  params.weight_on_input = weight_on_input;
  arguments.run(&diffulex::fused_moe, params);
}

void fused_experts_packed(const Tensor& x, const Tensor& w13, const Tensor& w2,
                          const Tensor& expert_offsets, const OptionalTensor& row_weights,
                          const OptionalTensor& w13_scale, const OptionalTensor& w2_scale,
                          const Tensor& out, const Tensor& workspace, int64_t act,
                          int64_t rows_per_expert) {
  OpArguments arguments("fused_experts_packed");
  FusedExpertsPackedParams params;
  params.x = arguments.input("x", x);
  params.w13 = arguments.input("w13", w13);
  params.w2 = arguments.input("w2", w2);
  params.expert_offsets = arguments.input("expert_offsets", expert_offsets);
  params.row_weights = arguments.input("row_weights", row_weights);
  params.w13_scale = arguments.input("w13_scale", w13_scale);
  params.w2_scale = arguments.input("w2_scale", w2_scale);
  params.out = arguments.output("out", out);
  arguments.set_workspace(workspace);
  params.act = arguments.enumeration<Activation>("act", act);
  params.rows_per_expert = arguments.int32("rows_per_expert", rows_per_expert);
  arguments.run(&diffulex::fused_experts_packed, params);
}

void moe_combine(const Tensor& slot_out, const Tensor& topk_weights, const Tensor& topk_ids,
                 const OptionalTensor& addend, const Tensor& out) {
  OpArguments arguments("moe_combine");
  MoeCombineParams params;
  params.slot_out = arguments.input("slot_out", slot_out);
  params.topk_weights = arguments.input("topk_weights", topk_weights);
  params.topk_ids = arguments.input("topk_ids", topk_ids);
  params.addend = arguments.input("addend", addend);
  params.out = arguments.output("out", out);
  arguments.run(&diffulex::moe_combine, params);
}

}  // namespace diffulex::torch_ops
