// SPDX-License-Identifier: Apache-2.0
#include "diffulex/ops/rope.h"
#include "torch/ops.h"

namespace diffulex::torch_ops {

void rotary_embedding(const Tensor& positions, const Tensor& q, const Tensor& k,
                      const Tensor& cos_sin_cache, int64_t head_dim, bool neox) {
  OpArguments arguments("rotary_embedding");
  RotaryParams params;
  params.positions = arguments.input("positions", positions);
  params.q = arguments.output("q", q);
  params.k = arguments.output("k", k);
  params.cos_sin_cache = arguments.input("cos_sin_cache", cos_sin_cache);
  params.head_dim = arguments.int32("head_dim", head_dim);
  params.neox = neox;
  arguments.run(&diffulex::rotary_embedding, params);
}

void qk_norm_rope(const Tensor& qkv, const Tensor& positions, const Tensor& cos_sin_cache,
                  const OptionalTensor& q_weight, const OptionalTensor& k_weight,
                  const OptionalTensor& v_out, int64_t num_q_heads, int64_t num_kv_heads,
                  int64_t head_dim, double eps, double weight_offset, bool neox, bool norm_v,
                  bool v_from_raw_k) {
  OpArguments arguments("qk_norm_rope");
  QkNormRopeParams params;
  params.qkv = arguments.output("qkv", qkv);
  params.positions = arguments.input("positions", positions);
  params.cos_sin_cache = arguments.input("cos_sin_cache", cos_sin_cache);
  params.q_weight = arguments.input("q_weight", q_weight);
  params.k_weight = arguments.input("k_weight", k_weight);
  params.v_out = arguments.output("v_out", v_out);
  params.num_q_heads = arguments.int32("num_q_heads", num_q_heads);
  params.num_kv_heads = arguments.int32("num_kv_heads", num_kv_heads);
  params.head_dim = arguments.int32("head_dim", head_dim);
  params.eps = static_cast<float>(eps);
  params.weight_offset = static_cast<float>(weight_offset);
  params.neox = neox;
  params.norm_v = norm_v;
  params.v_from_raw_k = v_from_raw_k;
  arguments.run(&diffulex::qk_norm_rope, params);
}

void qk_norm_rope_store(const Tensor& qkv, const Tensor& positions, const Tensor& cos_sin_cache,
                        const OptionalTensor& q_weight, const OptionalTensor& k_weight,
                        const OptionalTensor& v_out, const Tensor& k_cache, const Tensor& v_cache,
                        const Tensor& slot_mapping, const OptionalTensor& k_scale,
                        const OptionalTensor& v_scale, int64_t num_q_heads, int64_t num_kv_heads,
                        int64_t head_dim, double eps, double weight_offset, bool neox, bool norm_v,
                        bool v_from_raw_k, int64_t kv_layout) {
  OpArguments arguments("qk_norm_rope_store");
  QkNormRopeParams params;
  params.qkv = arguments.output("qkv", qkv);
  params.positions = arguments.input("positions", positions);
  params.cos_sin_cache = arguments.input("cos_sin_cache", cos_sin_cache);
  params.q_weight = arguments.input("q_weight", q_weight);
  params.k_weight = arguments.input("k_weight", k_weight);
  params.v_out = arguments.output("v_out", v_out);
  params.k_cache = arguments.output("k_cache", k_cache);
  params.v_cache = arguments.output("v_cache", v_cache);
  params.slot_mapping = arguments.input("slot_mapping", slot_mapping);
  params.k_scale = arguments.input("k_scale", k_scale);
  params.v_scale = arguments.input("v_scale", v_scale);
  params.num_q_heads = arguments.int32("num_q_heads", num_q_heads);
  params.num_kv_heads = arguments.int32("num_kv_heads", num_kv_heads);
  params.head_dim = arguments.int32("head_dim", head_dim);
  params.eps = static_cast<float>(eps);
  params.weight_offset = static_cast<float>(weight_offset);
  params.neox = neox;
  params.norm_v = norm_v;
  params.v_from_raw_k = v_from_raw_k;
  params.kv_layout = arguments.enumeration<KvLayout>("kv_layout", kv_layout);
  arguments.run(&diffulex::qk_norm_rope_store, params);
}

}  // namespace diffulex::torch_ops
