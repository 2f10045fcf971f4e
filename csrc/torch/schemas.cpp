// SPDX-License-Identifier: Apache-2.0
#include <torch/csrc/stable/library.h>

// Every op writes tensors of the caller and returns nothing, so that it can run inside CUDA graph
// capture. No argument may be called `mode`, `self`, `_mutable_op` or `_all_bases`: torch.compile
// passes keywords of these names itself.
STABLE_TORCH_LIBRARY(diffulex, library) {
  library.def(
      "block_attention("
      "Tensor q, Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, "
      "Tensor page_table, Tensor cu_seqlens_q, Tensor context_lens, Tensor valid_slices, "
      "Tensor mask_kinds, Tensor? prefix_lens, Tensor? padded_prefix_lens, Tensor? q_starts, "
      "Tensor? k_scale, Tensor? v_scale, "
      "Tensor(a!) out, Tensor(b!)? lse, Tensor(c!)? workspace, *, "
      "float scale, float softcap=0.0, int block_size, int sliding_window=0, "
      "int max_seqlen_q, int max_context_len, int num_splits=0, int kv_layout=0) -> ()");

  library.def(
      "store_kv_cache("
      "Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, "
      "Tensor? k_scale, Tensor? v_scale, *, int kv_layout=0) -> ()");
  library.def(
      "load_kv_cache("
      "Tensor k_cache, Tensor v_cache, Tensor k_new, Tensor v_new, Tensor page_table, "
      "Tensor context_lens, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
      "Tensor? k_scale, Tensor? v_scale, Tensor(a!) k_out, Tensor(b!) v_out, *, "
      "int kv_layout=0) -> ()");
  library.def("copy_kv_pages(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor src_dst) -> ()");

  library.def(
      "rms_norm(Tensor x, Tensor? weight, Tensor(a!) out, *, "
      "float eps, float weight_offset=0.0) -> ()");
  library.def(
      "add_rms_norm(Tensor(a!) x, Tensor(b!) residual, Tensor? weight, *, "
      "float eps, float weight_offset=0.0) -> ()");
  library.def(
      "rms_norm_add(Tensor x, Tensor residual, Tensor? weight, Tensor? out_scale, "
      "Tensor(a!) out, *, float eps, float weight_offset=0.0) -> ()");

  library.def(
      "rotary_embedding(Tensor positions, Tensor(a!) q, Tensor(b!) k, Tensor cos_sin_cache, *, "
      "int head_dim, bool neox=True) -> ()");
  library.def(
      "qk_norm_rope("
      "Tensor(a!) qkv, Tensor positions, Tensor cos_sin_cache, Tensor? q_weight, "
      "Tensor? k_weight, Tensor(b!)? v_out, *, "
      "int num_q_heads, int num_kv_heads, int head_dim, float eps, float weight_offset=0.0, "
      "bool neox=True, bool norm_v=False, bool v_from_raw_k=False) -> ()");
  library.def(
      "qk_norm_rope_store("
      "Tensor(a!) qkv, Tensor positions, Tensor cos_sin_cache, Tensor? q_weight, "
      "Tensor? k_weight, Tensor(b!)? v_out, Tensor(c!) k_cache, Tensor(d!) v_cache, "
      "Tensor slot_mapping, Tensor? k_scale, Tensor? v_scale, *, "
      "int num_q_heads, int num_kv_heads, int head_dim, float eps, float weight_offset=0.0, "
      "bool neox=True, bool norm_v=False, bool v_from_raw_k=False, int kv_layout=0) -> ()");

  library.def("act_and_mul(Tensor x, Tensor(a!) out, *, int act) -> ()");

  library.def(
      "linear_packed(Tensor x, Tensor packed_weight, Tensor(a!) out, *, int out_features) -> ()");

  library.def(
      "linear_few_rows(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) out, *, int act=-1) "
      "-> ()");

  library.def(
      "moe_topk("
      "Tensor logits, Tensor? bias, Tensor? expert_scale, Tensor? token_valid, "
      "Tensor(a!) weights, Tensor(b!) ids, *, "
      "int top_k, int scoring, bool renormalize, int n_group=0, int topk_group=0, "
      "int group_score=0, float routed_scaling=1.0) -> ()");
  library.def("router_gemm(Tensor x, Tensor w, Tensor(a!) logits) -> ()");
  library.def(
      "moe_permute("
      "Tensor topk_ids, Tensor? expert_map, Tensor(a!) sorted_slots, Tensor(b!) expert_offsets, "
      "Tensor(c!) tile_expert, Tensor(d!) tile_start, Tensor(e!) counters, *, "
      "int num_local_experts, int tile) -> ()");
  library.def(
      "fused_moe("
      "Tensor x, Tensor w13, Tensor w2, Tensor topk_weights, Tensor topk_ids, Tensor? expert_map, "
      "Tensor? w13_scale, Tensor? w2_scale, Tensor? addend, Tensor(a!) out, "
      "Tensor(b!) workspace, *, int act=0, bool weight_on_input=False) -> ()");
  library.def(
      "fused_experts_packed("
      "Tensor x, Tensor w13, Tensor w2, Tensor expert_offsets, Tensor? row_weights, "
      "Tensor? w13_scale, Tensor? w2_scale, Tensor(a!) out, Tensor(b!) workspace, *, "
      "int act=0, int rows_per_expert=0) -> ()");
  library.def(
      "moe_combine("
      "Tensor slot_out, Tensor topk_weights, Tensor topk_ids, Tensor? addend, "
      "Tensor(a!) out) -> ()");

  library.def(
      "token_stats("
      "Tensor logits, Tensor? extra_logits, Tensor? row_index, Tensor? inv_temperature, "
      "Tensor? uniforms, Tensor? forbidden_ids, Tensor? penalty_ids, "
      "Tensor(a!) ids, Tensor(b!) stats, Tensor(c!)? topk_ids, Tensor(d!)? topk_probs, "
      "Tensor(e!)? workspace, *, int vocab_limit=-1, float softcap=0.0, float penalty=0.0, "
      "int exclusion=0, int vocab_start=0, bool partial=False) -> ()");
  library.def(
      "merge_token_stats("
      "Tensor part_ids, Tensor part_stats, Tensor? part_topk_ids, Tensor? part_topk_vals, "
      "Tensor(a!) ids, Tensor(b!) stats, Tensor(c!)? topk_ids, Tensor(d!)? topk_probs) -> ()");
  library.def(
      "sample_filtered("
      "Tensor logits, Tensor? extra_logits, Tensor? row_index, Tensor inv_temperature, "
      "Tensor uniforms, Tensor? top_k, Tensor? top_p, Tensor? min_p, Tensor? forbidden_ids, "
      "Tensor(a!) ids, Tensor(b!) stats, Tensor(c!)? workspace, *, int vocab_limit=-1, "
      "float softcap=0.0, int exclusion=0, int filter_order=0, int confidence_space=0) -> ()");
  library.def(
      "entropy_bound_mask(Tensor entropy, Tensor segments, Tensor(a!) mask, *, float bound) -> ()");
  library.def(
      "accept_mask_fill("
      "Tensor tokens, Tensor row_index, Tensor editable_start, Tensor? valid_len, Tensor gate, "
      "Tensor accept_threshold, Tensor open_steps, Tensor ids, Tensor stats, "
      "Tensor(a!) write_ids, Tensor(b!) confidence, Tensor(c!) masks_left, Tensor(d!) flags, *, "
      "int mask_token_id, int rule=0, int confidence_kind=0, bool raw_confidence=False, "
      "int denoising_steps=0, bool force_accept_last_step=False, float factor=1.0, "
      "float entropy_bound=0.0, float low_threshold=0.0) -> ()");
  library.def(
      "accept_edit("
      "Tensor tokens, Tensor row_index, Tensor editable_start, Tensor? valid_len, Tensor gate, "
      "Tensor accept_threshold, Tensor edit_threshold, Tensor open_steps, Tensor post_edit_steps, "
      "Tensor ids, Tensor stats, Tensor(a!) write_ids, Tensor(b!) confidence, "
      "Tensor(c!) masks_left, Tensor(d!) flags, Tensor(e!) same_token_ratio, *, "
      "int mask_token_id, int max_post_edit_steps, int confidence_kind=0, "
      "bool raw_confidence=True) -> ()");
  library.def(
      "accept_dmax("
      "Tensor tokens, Tensor row_index, Tensor editable_start, Tensor? valid_len, Tensor gate, "
      "Tensor accept_threshold, Tensor open_steps, Tensor ids, Tensor stats, Tensor? argmax_ids, "
      "Tensor? topk_ids, Tensor? topk_probs, Tensor(a!) write_ids, Tensor(b!) confidence, "
      "Tensor(c!) masks_left, Tensor(d!) flags, Tensor(e!) same_token_ratio, "
      "Tensor(f!)? merge_valid, Tensor(g!)? merge_ids, Tensor(h!)? merge_probs, "
      "Tensor(i!)? merge_residual, *, int mask_token_id, bool fast_path=False) -> ()");
  library.def(
      "accept_gemma("
      "Tensor tokens, Tensor row_index, Tensor? valid_len, Tensor prev_argmax, "
      "Tensor stable_run, Tensor steps_left, Tensor renoise_ids, Tensor ids, Tensor stats, "
      "Tensor argmax_ids, Tensor(a!) write_ids, Tensor(b!) argmax, Tensor(c!) confidence, "
      "Tensor(d!) flags, *, float entropy_bound, int stability_threshold, "
      "float confidence_threshold) -> ()");

  library.def(
      "advance_decode("
      "Tensor(a!) requests, Tensor(b!) windows, Tensor page_tables, "
      "Tensor write_ids, Tensor flags, Tensor same_token_ratio, "
      "Tensor(c!) input_ids, Tensor(d!) positions, Tensor(e!) slot_mapping, "
      "Tensor(f!) context_lens, Tensor(g!) valid_slices, "
      "Tensor(h!) tokens, Tensor(i!) row_index, Tensor(j!) editable_start, "
      "Tensor(k!) valid_len, Tensor(l!) gate, Tensor(m!) accept_threshold, "
      "Tensor(n!)? edit_threshold, Tensor(o!) open_steps, Tensor(p!) total_steps, "
      "Tensor(q!) post_edit_steps, Tensor(r!) inv_temperature, Tensor(s!) uniforms, "
      "Tensor(t!) top_k, Tensor(u!) top_p, Tensor(v!) min_p, "
      "Tensor? merge_valid, Tensor? merge_ids, Tensor? merge_probs, Tensor? merge_residual, "
      "Tensor(w!)? row_merge_mask, Tensor(x!)? row_merge_ids, Tensor(y!)? row_merge_probs, "
      "Tensor(z!)? row_merge_residual, Tensor(a1!)? last_row_index, "
      "Tensor(b1!)? logits_source, Tensor? pending_next_token, Tensor(c1!)? seed_row, "
      "Tensor(d1!)? mask_kinds, Tensor(e1!)? prev_argmax, Tensor? canvas_argmax, "
      "Tensor(f1!)? stable_run, Tensor(g1!)? steps_left, Tensor(h1!)? renoise_ids, "
      "Tensor(i1!)? block_slot, Tensor(j1!)? row_pass_kind, Tensor(k1!)? row_self_cond, *, "
      "int page_size, int first_saved_row=0, bool masked_rows_only=True, "
      "bool has_block_cache=True, bool is_entry=False) -> ()");

  library.def(
      "token_merge_embed("
      "Tensor(a!) hidden, Tensor embedding, Tensor merge_mask, Tensor topk_ids, "
      "Tensor topk_probs, Tensor residual_probs, *, int mask_token_id, int merge_kind, "
      "bool renormalize, float weight) -> ()");
  library.def(
      "token_merge_partial("
      "Tensor embedding, Tensor merge_mask, Tensor topk_ids, Tensor topk_probs, "
      "Tensor residual_probs, Tensor(a!) partial, *, int mask_token_id, int merge_kind, "
      "int vocab_start) -> ()");
  library.def(
      "token_merge_finalize("
      "Tensor partial, Tensor merge_mask, Tensor(a!) hidden, *, int merge_kind, "
      "bool renormalize, float weight) -> ()");
  library.def(
      "soft_embedding("
      "Tensor logits, Tensor lse, Tensor? inv_temperature, Tensor embedding, Tensor? row_valid, "
      "Tensor(a!) out, Tensor(b!)? workspace, *, float normalizer, float softcap=0.0, "
      "int vocab_limit=-1, int vocab_start=0) -> ()");
}
