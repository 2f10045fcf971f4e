// SPDX-License-Identifier: Apache-2.0

// rotary_embedding, qk_norm_rope and qk_norm_rope_store. T rows, heads of D values.

#include "ops/cpu_ops.h"
#include "ops/kv/check.h"
#include "ops/kv/pages_cpu.h"
#include "ops/kv/store_cpu.h"
#include "ops/shared/cpu_isa/kernel_table.h"
#include "ops/shared/data_checks_cpu.h"
#include "ops/shared/parallel.h"

namespace diffulex::cpu {
namespace {

struct RopeTag;

void set_angles(const TensorRef& cos_sin_cache, int64_t position, RopeHeadArgs* args) {
  args->rotary_dim = cos_sin_cache.size[1];
  args->cosines = cos_sin_cache.as<const float>() + position * cos_sin_cache.stride[0];
  args->sines = args->cosines + args->rotary_dim / 2;
}

/// `count` heads of D elements, `head_bytes` apart, transformed in place.
void rope_heads(char* data, int64_t count, int64_t head_bytes, RopeHeadArgs args) {
  const KernelTable& kernels = kernel_table();
  for (int64_t head = 0; head < count; ++head) {
    args.x = data + head * head_bytes;
    args.out = data + head * head_bytes;
    kernels.rope_head(args);
  }
}

void rotate_tensor(const TensorRef& tensor, int64_t row, RopeHeadArgs args) {
  const bool split = tensor.rank == 3;
  const int64_t heads = split ? tensor.size[1] : tensor.size[1] / args.dim;
  const int64_t head_stride = split ? tensor.stride[1] : args.dim;
  args.dtype = tensor.dtype;
  rope_heads(element_at(tensor, row * tensor.stride[0]), heads,
             head_stride * dtype_bytes(tensor.dtype), args);
}

/// The finished V of one row; with v_from_raw_k it must run before K is rotated.
char* finish_values(const QkNormRopeParams& params, int64_t row, char* raw_k, RopeHeadArgs args) {
  const int64_t bytes = dtype_bytes(params.qkv.dtype);
  const int64_t head_bytes = params.head_dim * bytes;
  args.rotary_dim = 0;
  args.weight = nullptr;
  args.normalize = true;
  if (!params.v_from_raw_k) {
    char* v = raw_k + params.num_kv_heads * head_bytes;
    if (params.norm_v) {
      rope_heads(v, params.num_kv_heads, head_bytes, args);
    }
    return v;
  }
  char* v = element_at(params.v_out, row * params.v_out.stride[0]);
  for (int64_t head = 0; head < params.num_kv_heads; ++head) {
    args.x = raw_k + head * head_bytes;
    args.out = v + head * params.v_out.stride[1] * bytes;
    kernel_table().rope_head(args);
  }
  return v;
}

void norm_rope_heads(char* data, int64_t heads, const TensorRef& weight, RopeHeadArgs args) {
  args.normalize = weight.present();
  args.weight = weight.present() ? weight.data : nullptr;
  args.weight_dtype = weight.dtype;
  rope_heads(data, heads, args.dim * dtype_bytes(args.dtype), args);
}

/// Where qk_norm_rope_store puts K and V; absent for qk_norm_rope.
struct StoreTarget {
  const KvPages* k_pages = nullptr;
  const KvPages* v_pages = nullptr;
  int64_t page_size = 1;
};

void store_values(const QkNormRopeParams& params, const KvPages& pages, char* v, int64_t slot,
                  int64_t page_size) {
  const DType dtype = params.qkv.dtype;
  const int64_t head_stride =
      params.v_from_raw_k ? params.v_out.stride[1] : int64_t{params.head_dim};
  if (head_stride == params.head_dim) {
    store_row(pages, KvRow{v, dtype, params.num_kv_heads, params.head_dim, v}, slot / page_size,
              slot % page_size);
    return;
  }
  // v_out may have gaps between heads: one head at a time, addressed through the page.
  for (int64_t head = 0; head < params.num_kv_heads; ++head) {
    char* source = v + head * head_stride * dtype_bytes(dtype);
    store_head(pages, KvRow{source, dtype, 1, params.head_dim, source},
               SlotHead{slot / page_size, slot % page_size, head});
  }
}

Status run_fused(const QkNormRopeParams& params, const ExecContext& context,
                 const StoreTarget& target) {
  const int64_t head_bytes = params.head_dim * dtype_bytes(params.qkv.dtype);
  parallel_ranges(
      context, params.qkv.size[0], row_grain(params.qkv.size[1]), [&](int64_t begin, int64_t end) {
        RopeHeadArgs args;
        args.dim = params.head_dim;
        args.dtype = params.qkv.dtype;
        args.neox = params.neox;
        args.eps = params.eps;
        args.weight_offset = params.weight_offset;
        args.scratch = thread_floats<RopeTag>(params.head_dim + kDimPad);
        for (int64_t row = begin; row < end; ++row) {
          char* q = element_at(params.qkv, row * params.qkv.stride[0]);
          char* k = q + params.num_q_heads * head_bytes;
          set_angles(params.cos_sin_cache, index_at(params.positions, row), &args);
          char* v = finish_values(params, row, k, args);
          norm_rope_heads(q, params.num_q_heads, params.q_weight, args);
          norm_rope_heads(k, params.num_kv_heads, params.k_weight, args);
          const int64_t slot = target.k_pages != nullptr ? index_at(params.slot_mapping, row) : -1;
          if (slot >= 0) {
            store_row(*target.k_pages,
                      KvRow{k, params.qkv.dtype, params.num_kv_heads, params.head_dim, k},
                      slot / target.page_size, slot % target.page_size);
            store_values(params, *target.v_pages, v, slot, target.page_size);
          }
        }
      });
  return {};
}

}  // namespace

Status rotary_embedding(const RotaryParams& params, const ExecContext& context) {
  DIFFULEX_RETURN_IF_ERROR(
      check_positions("rotary_embedding", params.positions, params.cos_sin_cache.size[0]));
  const int64_t row_elements = (params.q.numel() + params.k.numel()) / params.q.size[0];
  parallel_ranges(context, params.q.size[0], row_grain(row_elements),
                  [&](int64_t begin, int64_t end) {
                    RopeHeadArgs args;
                    args.dim = params.head_dim;
                    args.neox = params.neox;
                    args.scratch = thread_floats<RopeTag>(params.head_dim + kDimPad);
                    for (int64_t row = begin; row < end; ++row) {
                      set_angles(params.cos_sin_cache, index_at(params.positions, row), &args);
                      rotate_tensor(params.q, row, args);
                      rotate_tensor(params.k, row, args);
                    }
                  });
  return {};
}

Status qk_norm_rope(const QkNormRopeParams& params, const ExecContext& context) {
  DIFFULEX_RETURN_IF_ERROR(
      check_positions("qk_norm_rope", params.positions, params.cos_sin_cache.size[0]));
  return run_fused(params, context, StoreTarget{});
}

Status qk_norm_rope_store(const QkNormRopeParams& params, const ExecContext& context) {
  constexpr const char* kOp = "qk_norm_rope_store";
  DIFFULEX_RETURN_IF_ERROR(check_positions(kOp, params.positions, params.cos_sin_cache.size[0]));
  const KvCacheGeometry geometry =
      kv_cache_geometry(params.k_cache, params.kv_layout, params.head_dim);
  DIFFULEX_RETURN_IF_ERROR(
      check_slots(kOp, params.slot_mapping, geometry.num_pages * geometry.page_size));
  const KvPages k_pages =
      KvPages::keys(params.k_cache, params.k_scale, params.kv_layout, params.head_dim);
  const KvPages v_pages =
      KvPages::values(params.v_cache, params.v_scale, params.kv_layout, params.head_dim);
  return run_fused(params, context, StoreTarget{&k_pages, &v_pages, geometry.page_size});
}

}  // namespace diffulex::cpu
