// SPDX-License-Identifier: Apache-2.0
#include "diffulex/ops/kv.h"
#include "torch/ops.h"

namespace diffulex::torch_ops {

void store_kv_cache(const Tensor& k, const Tensor& v, const Tensor& k_cache, const Tensor& v_cache,
                    const Tensor& slot_mapping, const OptionalTensor& k_scale,
                    const OptionalTensor& v_scale, int64_t kv_layout) {
  OpArguments arguments("store_kv_cache");
  StoreKvCacheParams params;
  params.k = arguments.input("k", k);
  params.v = arguments.input("v", v);
  params.k_cache = arguments.output("k_cache", k_cache);
  params.v_cache = arguments.output("v_cache", v_cache);
  params.slot_mapping = arguments.input("slot_mapping", slot_mapping);
  params.k_scale = arguments.input("k_scale", k_scale);
  params.v_scale = arguments.input("v_scale", v_scale);
  params.kv_layout = arguments.enumeration<KvLayout>("kv_layout", kv_layout);
  arguments.run(&diffulex::store_kv_cache, params);
}

void load_kv_cache(const Tensor& k_cache, const Tensor& v_cache, const Tensor& k_new,
                   const Tensor& v_new, const Tensor& page_table, const Tensor& context_lens,
                   const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                   const OptionalTensor& k_scale, const OptionalTensor& v_scale,
                   const Tensor& k_out, const Tensor& v_out, int64_t kv_layout) {
  OpArguments arguments("load_kv_cache");
  LoadKvCacheParams params;
  params.k_cache = arguments.input("k_cache", k_cache);
  params.v_cache = arguments.input("v_cache", v_cache);
  params.k_new = arguments.input("k_new", k_new);
  params.v_new = arguments.input("v_new", v_new);
  params.page_table = arguments.input("page_table", page_table);
  params.context_lens = arguments.input("context_lens", context_lens);
  params.cu_seqlens_q = arguments.input("cu_seqlens_q", cu_seqlens_q);
  params.cu_seqlens_k = arguments.input("cu_seqlens_k", cu_seqlens_k);
  params.k_scale = arguments.input("k_scale", k_scale);
  params.v_scale = arguments.input("v_scale", v_scale);
  params.k_out = arguments.output("k_out", k_out);
  params.v_out = arguments.output("v_out", v_out);
  params.kv_layout = arguments.enumeration<KvLayout>("kv_layout", kv_layout);
  arguments.run(&diffulex::load_kv_cache, params);
}

void copy_kv_pages(const Tensor& k_cache, const Tensor& v_cache, const Tensor& src_dst) {
  OpArguments arguments("copy_kv_pages");
  CopyKvPagesParams params;
  params.k_cache = arguments.output("k_cache", k_cache);
  params.v_cache = arguments.output("v_cache", v_cache);
  params.src_dst = arguments.input("src_dst", src_dst);
  arguments.run(&diffulex::copy_kv_pages, params);
}

}  // namespace diffulex::torch_ops
