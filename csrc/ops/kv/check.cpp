// SPDX-License-Identifier: Apache-2.0
#include "ops/kv/check.h"

#include <string>

#include "ops/checks.h"
#include "ops/shared/tensor_checks.h"

namespace diffulex {
namespace {

bool is_page_size(int64_t page_size) {
  return page_size >= 4 && page_size <= 256 && (page_size & (page_size - 1)) == 0;
}

Status check_cache_dtype(const char* op, const char* name, const TensorRef& cache,
                         bool has_scales) {
  const ArgumentCheck check(op, name, cache);
  DIFFULEX_RETURN_IF_ERROR(check.present());
  if (has_scales) {
    return check.dtype({DType::kF8E4M3});
  }
  if (cache.dtype == DType::kF8E4M3) {
    return check.error(StatusCode::kInvalidArgument,
                       "dtype float32, float16 or bfloat16 without k_scale", "float8_e4m3fn");
  }
  return check.dtype({DType::kF32, DType::kF16, DType::kBF16});
}

/// Both scales or none, of bytes.
Status check_scale_pair(const char* op, const TensorRef& k_scale, const TensorRef& v_scale) {
  const ArgumentCheck v_check(op, "v_scale", v_scale);
  if (!k_scale.present()) {
    return v_scale.present() ? v_check.error(StatusCode::kInvalidArgument, "none without k_scale",
                                             "a tensor of shape " + shape_text(v_scale))
                             : Status{};
  }
  DIFFULEX_RETURN_IF_ERROR(ArgumentCheck(op, "k_scale", k_scale).dtype({DType::kU8}));
  if (!v_scale.present()) {
    return v_check.error(StatusCode::kInvalidArgument, "a tensor with k_scale", "none");
  }
  return v_check.dtype({DType::kU8});
}

/// The scales of checked unified caches: [num_pages, Hc, page_size].
Status check_scale_shapes(const KvCacheArguments& arguments) {
  const struct {
    const char* name;
    const TensorRef& scale;
    const TensorRef& cache;
  } sides[] = {{"k_scale", arguments.k_scale, arguments.k_cache},
               {"v_scale", arguments.v_scale, arguments.v_cache}};
  for (const auto& side : sides) {
    DIFFULEX_RETURN_IF_ERROR(
        ArgumentCheck(arguments.op, side.name, side.scale)
            .matches({DType::kU8}, {side.cache.size[0], side.cache.size[2], side.cache.size[1]}));
  }
  return {};
}

Status check_page_size(const char* op, const TensorRef& k_cache, int64_t page_size) {
  if (!is_page_size(page_size)) {
    return ArgumentCheck(op, "k_cache", k_cache)
        .error(StatusCode::kInvalidArgument, "a page size of 4, 8, 16, 32, 64, 128 or 256",
               std::to_string(page_size) + " in shape " + shape_text(k_cache));
  }
  return {};
}

Status check_unified(const KvCacheArguments& arguments) {
  const TensorRef& k_cache = arguments.k_cache;
  const ArgumentCheck k_check(arguments.op, "k_cache", k_cache);
  const std::string expected =
      "shape [num_pages, page_size, >= " + std::to_string(arguments.num_kv_heads) +
      ", >= " + std::to_string(arguments.head_dim) + "]";
  if (k_cache.rank != 4 || k_cache.size[2] < arguments.num_kv_heads ||
      k_cache.size[3] < arguments.head_dim) {
    return k_check.error(StatusCode::kInvalidArgument, expected, shape_text(k_cache));
  }
  DIFFULEX_RETURN_IF_ERROR(k_check.last_contiguous());
  const TensorRef& v_cache = arguments.v_cache;
  const ArgumentCheck v_check(arguments.op, "v_cache", v_cache);
  if (v_cache.rank != 4 || v_cache.size[0] != k_cache.size[0] ||
      v_cache.size[1] != k_cache.size[1] || v_cache.size[2] < arguments.num_kv_heads ||
      v_cache.size[3] < arguments.head_dim) {
    return v_check.error(StatusCode::kInvalidArgument,
                         expected + " with the pages of k_cache " + shape_text(k_cache),
                         shape_text(v_cache));
  }
  DIFFULEX_RETURN_IF_ERROR(v_check.last_contiguous());
  return check_page_size(arguments.op, k_cache, k_cache.size[1]);
}

Status check_distinct(const KvCacheArguments& arguments) {
  const TensorRef& k_cache = arguments.k_cache;
  const ArgumentCheck k_check(arguments.op, "k_cache", k_cache);
  const int64_t group = k_cache.rank == 5 ? k_cache.size[4] : 0;
  if (group < 1 || k_cache.size[1] != arguments.num_kv_heads || arguments.head_dim % group != 0 ||
      k_cache.size[2] != arguments.head_dim / group) {
    return k_check.error(StatusCode::kInvalidArgument,
                         "shape [num_pages, " + std::to_string(arguments.num_kv_heads) + ", " +
                             std::to_string(arguments.head_dim) + " / x, page_size, x]",
                         shape_text(k_cache));
  }
  DIFFULEX_RETURN_IF_ERROR(k_check.last_contiguous());
  const ArgumentCheck v_check(arguments.op, "v_cache", arguments.v_cache);
  DIFFULEX_RETURN_IF_ERROR(v_check.matches(
      {k_cache.dtype},
      {k_cache.size[0], arguments.num_kv_heads, arguments.head_dim, k_cache.size[3]}));
  return check_page_size(arguments.op, k_cache, k_cache.size[3]);
}

/// k and v rows of one op: [N, Hkv, D] of one activation dtype, heads and dims contiguous.
Status check_rows(const char* op, const char* k_name, const TensorRef& k, const char* v_name,
                  const TensorRef& v) {
  const ArgumentCheck k_check(op, k_name, k);
  DIFFULEX_RETURN_IF_ERROR(k_check.matches({DType::kF32, DType::kF16, DType::kBF16},
                                           {kAnyExtent, kAnyExtent, kAnyExtent}));
  DIFFULEX_RETURN_IF_ERROR(k_check.contiguous_from(1));
  const ArgumentCheck v_check(op, v_name, v);
  DIFFULEX_RETURN_IF_ERROR(v_check.matches({k.dtype}, {k.size[0], k.size[1], k.size[2]}));
  DIFFULEX_RETURN_IF_ERROR(v_check.contiguous_from(1));
  if (k.size[1] < 1 || k.size[2] < 1) {
    return k_check.error(StatusCode::kInvalidArgument, "at least one head and one dim",
                         shape_text(k));
  }
  return {};
}

}  // namespace

Status check_kv_cache(const KvCacheArguments& arguments) {
  const char* op = arguments.op;
  const bool has_scales = arguments.k_scale.present();
  DIFFULEX_RETURN_IF_ERROR(check_scale_pair(op, arguments.k_scale, arguments.v_scale));
  DIFFULEX_RETURN_IF_ERROR(check_cache_dtype(op, "k_cache", arguments.k_cache, has_scales));
  DIFFULEX_RETURN_IF_ERROR(check_cache_dtype(op, "v_cache", arguments.v_cache, has_scales));
  DIFFULEX_RETURN_IF_ERROR(
      ArgumentCheck(op, "v_cache", arguments.v_cache).dtype({arguments.k_cache.dtype}));
  switch (arguments.layout) {
    case KvLayout::kUnified:
      DIFFULEX_RETURN_IF_ERROR(check_unified(arguments));
      return has_scales ? check_scale_shapes(arguments) : Status{};
    case KvLayout::kDistinct:
      return has_scales ? scalar_error(op, "kv_layout", "0 (unified) with k_scale",
                                       static_cast<int32_t>(arguments.layout))
                        : check_distinct(arguments);
  }
  return scalar_error(op, "kv_layout", "0 (unified) or 1 (distinct)",
                      static_cast<int32_t>(arguments.layout));
}

KvCacheGeometry kv_cache_geometry(const TensorRef& k_cache, KvLayout layout, int64_t head_dim) {
  if (layout == KvLayout::kDistinct) {
    return KvCacheGeometry{k_cache.size[0], k_cache.size[3], k_cache.size[4]};
  }
  return KvCacheGeometry{k_cache.size[0], k_cache.size[1], head_dim};
}

Status check_store_kv_cache(const StoreKvCacheParams& params) {
  constexpr const char* kOp = "store_kv_cache";
  DIFFULEX_RETURN_IF_ERROR(check_rows(kOp, "k", params.k, "v", params.v));
  DIFFULEX_RETURN_IF_ERROR(
      check_kv_cache({kOp, params.k_cache, params.v_cache, params.k_scale, params.v_scale,
                      params.kv_layout, params.k.size[1], params.k.size[2]}));
  if (params.k_cache.numel() > 0 && params.v_cache.data == params.k_cache.data) {
    return ArgumentCheck(kOp, "v_cache", params.v_cache)
        .error(StatusCode::kInvalidArgument, "memory of its own", "the memory of k_cache");
  }
  return ArgumentCheck(kOp, "slot_mapping", params.slot_mapping)
      .matches({DType::kI32, DType::kI64}, {params.k.size[0]});
}

Status check_load_kv_cache(const LoadKvCacheParams& params) {
  constexpr const char* kOp = "load_kv_cache";
  DIFFULEX_RETURN_IF_ERROR(check_rows(kOp, "k_new", params.k_new, "v_new", params.v_new));
  const int64_t heads = params.k_new.size[1];
  const int64_t dim = params.k_new.size[2];
  DIFFULEX_RETURN_IF_ERROR(check_kv_cache({kOp, params.k_cache, params.v_cache, params.k_scale,
                                           params.v_scale, params.kv_layout, heads, dim}));
  DIFFULEX_RETURN_IF_ERROR(ArgumentCheck(kOp, "page_table", params.page_table)
                               .matches({DType::kI32}, {kAnyExtent, kAnyExtent}));
  const int64_t num_reqs = params.page_table.size[0];
  DIFFULEX_RETURN_IF_ERROR(
      ArgumentCheck(kOp, "context_lens", params.context_lens).matches({DType::kI32}, {num_reqs}));
  DIFFULEX_RETURN_IF_ERROR(ArgumentCheck(kOp, "cu_seqlens_q", params.cu_seqlens_q)
                               .matches({DType::kI32}, {num_reqs + 1}));
  DIFFULEX_RETURN_IF_ERROR(ArgumentCheck(kOp, "cu_seqlens_k", params.cu_seqlens_k)
                               .matches({DType::kI32}, {num_reqs + 1}));
  const ArgumentCheck k_out(kOp, "k_out", params.k_out);
  DIFFULEX_RETURN_IF_ERROR(k_out.matches({params.k_new.dtype}, {kAnyExtent, heads, dim}));
  DIFFULEX_RETURN_IF_ERROR(k_out.contiguous_from(1));
  const ArgumentCheck v_out(kOp, "v_out", params.v_out);
  DIFFULEX_RETURN_IF_ERROR(v_out.matches({params.k_new.dtype}, {params.k_out.size[0], heads, dim}));
  return v_out.contiguous_from(1);
}

Status check_copy_kv_pages(const CopyKvPagesParams& params) {
  constexpr const char* kOp = "copy_kv_pages";
  const bool has_scales = params.k_scale.present();
  DIFFULEX_RETURN_IF_ERROR(check_scale_pair(kOp, params.k_scale, params.v_scale));
  DIFFULEX_RETURN_IF_ERROR(check_cache_dtype(kOp, "k_cache", params.k_cache, has_scales));
  DIFFULEX_RETURN_IF_ERROR(check_cache_dtype(kOp, "v_cache", params.v_cache, has_scales));
  const ArgumentCheck v_check(kOp, "v_cache", params.v_cache);
  DIFFULEX_RETURN_IF_ERROR(v_check.dtype({params.k_cache.dtype}));
  for (const TensorRef* cache : {&params.k_cache, &params.v_cache}) {
    const ArgumentCheck check(kOp, cache == &params.k_cache ? "k_cache" : "v_cache", *cache);
    if (cache->rank < 4) {
      return check.error(StatusCode::kInvalidArgument, "a cache of rank 4 or 5",
                         shape_text(*cache));
    }
    DIFFULEX_RETURN_IF_ERROR(check.last_contiguous());
  }
  if (params.v_cache.size[0] != params.k_cache.size[0]) {
    return v_check.error(StatusCode::kInvalidArgument,
                         std::to_string(params.k_cache.size[0]) + " pages as k_cache",
                         shape_text(params.v_cache));
  }
  if (has_scales) {
    if (params.k_cache.rank != 4) {
      return ArgumentCheck(kOp, "k_cache", params.k_cache)
          .error(StatusCode::kInvalidArgument, "a cache of rank 4 with k_scale",
                 shape_text(params.k_cache));
    }
    if (params.v_cache.rank != 4) {
      return v_check.error(StatusCode::kInvalidArgument, "a cache of rank 4 with k_scale",
                           shape_text(params.v_cache));
    }
    DIFFULEX_RETURN_IF_ERROR(
        check_scale_shapes({kOp, params.k_cache, params.v_cache, params.k_scale, params.v_scale}));
    for (const TensorRef* scale : {&params.k_scale, &params.v_scale}) {
      DIFFULEX_RETURN_IF_ERROR(
          ArgumentCheck(kOp, scale == &params.k_scale ? "k_scale" : "v_scale", *scale)
              .last_contiguous());
    }
  }
  return ArgumentCheck(kOp, "src_dst", params.src_dst).matches({DType::kI32}, {kAnyExtent, 2});
}

}  // namespace diffulex
