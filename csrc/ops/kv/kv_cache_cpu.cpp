// SPDX-License-Identifier: Apache-2.0

// store_kv_cache, load_kv_cache and copy_kv_pages. N rows, Hkv heads of D values.

#include <cstring>

#include "ops/cpu_ops.h"
#include "ops/kv/check.h"
#include "ops/kv/pages_cpu.h"
#include "ops/kv/store_cpu.h"
#include "ops/shared/cpu_isa/kernel_table.h"
#include "ops/shared/data_checks_cpu.h"
#include "ops/shared/parallel.h"

namespace diffulex::cpu {
namespace {

struct LoadTag;
struct ConvertTag;
struct CodeTag;

/// Copies one head vector into contiguous memory of another float type.
void load_converted(const HeadVector& from, DType from_dtype, char* out, DType out_dtype,
                    int64_t head_dim) {
  const KernelTable& kernels = kernel_table();
  float* row = thread_floats<LoadTag>(head_dim);
  kernels.load(GatherArgs{from.data, from_dtype, head_dim, from.group, from.group_stride}, row);
  kernels.store(row, out_dtype, out, head_dim);
}

/// One output tensor of load_kv_cache and its two sources.
struct LoadSide {
  KvPages pages;
  const TensorRef& fresh;  // [T, Hkv, D]
  const TensorRef& out;    // [N_out, Hkv, D]
};

/// Where one output row comes from: a slot, an in-flight row, or nothing.
struct RowSource {
  int64_t page_id = -1;
  int64_t offset = 0;
  int64_t fresh_row = -1;
};

void load_row(const LoadSide& side, const RowSource& source, int64_t out_row) {
  const int64_t heads = side.out.size[1];
  const int64_t head_dim = side.out.size[2];
  const int64_t bytes = dtype_bytes(side.out.dtype);
  char* out = element_at(side.out, out_row * side.out.stride[0]);
  if (source.fresh_row >= 0) {
    std::memcpy(out, element_at(side.fresh, source.fresh_row * side.fresh.stride[0]),
                static_cast<size_t>(heads * head_dim * bytes));
    return;
  }
  if (source.page_id < 0) {
    std::memset(out, 0, static_cast<size_t>(heads * head_dim * bytes));
    return;
  }
  for (int64_t head = 0; head < heads; ++head) {
    char* target = out + head * head_dim * bytes;
    const HeadVector from = side.pages.at(source.page_id, source.offset, head);
    if (side.pages.has_scales()) {
      float* wide = thread_floats<CodeTag>(head_dim);
      decode_head(from.data, *side.pages.scale_at(source.page_id, source.offset, head), head_dim,
                  wide);
      kernel_table().store(wide, side.out.dtype, target, head_dim);
    } else if (side.pages.dtype() == side.out.dtype) {
      copy_head_vector(from, HeadVector{target, head_dim, head_dim}, head_dim, bytes);
    } else {
      load_converted(from, side.pages.dtype(), target, side.out.dtype, head_dim);
    }
  }
}

Status validate_load(const LoadKvCacheParams& params) {
  constexpr const char* kOp = "load_kv_cache";
  const int64_t num_reqs = params.page_table.size[0];
  DIFFULEX_RETURN_IF_ERROR(
      check_offsets(kOp, "cu_seqlens_q", params.cu_seqlens_q, params.k_new.size[0]));
  DIFFULEX_RETURN_IF_ERROR(
      check_offsets(kOp, "cu_seqlens_k", params.cu_seqlens_k, params.k_out.size[0]));
  const KvCacheGeometry geometry =
      kv_cache_geometry(params.k_cache, params.kv_layout, params.k_new.size[2]);
  for (int64_t request = 0; request < num_reqs; ++request) {
    const int64_t context_len = index_at(params.context_lens, request);
    DIFFULEX_RETURN_IF_ERROR(check_pages(PageTableCheck{
        kOp, params.page_table, request, context_len, geometry.num_pages, geometry.page_size}));
    const int64_t rows =
        index_at(params.cu_seqlens_q, request + 1) - index_at(params.cu_seqlens_q, request);
    const int64_t length =
        index_at(params.cu_seqlens_k, request + 1) - index_at(params.cu_seqlens_k, request);
    if (length != context_len + rows) {
      return data_error(
          kOp, "cu_seqlens_k", request,
          "context + rows = " + std::to_string(context_len + rows) + " rows per request", length);
    }
  }
  return {};
}

/// Copies dimensions [dim, rank) of one page; strides may leave gaps.
void copy_page(const TensorRef& cache, int32_t dim, const char* from, char* to) {
  const int64_t bytes = dtype_bytes(cache.dtype);
  // The second bound never decides; it shows the compiler where the recursion ends.
  if (dim == cache.rank - 1 || dim + 1 == TensorRef::kMaxRank) {
    std::memcpy(to, from, static_cast<size_t>(cache.size[dim] * bytes));
    return;
  }
  for (int64_t i = 0; i < cache.size[dim]; ++i) {
    copy_page(cache, dim + 1, from + i * cache.stride[dim] * bytes,
              to + i * cache.stride[dim] * bytes);
  }
}

Status validate_copy(const CopyKvPagesParams& params) {
  constexpr const char* kOp = "copy_kv_pages";
  const int64_t num_pages = params.k_cache.size[0];
  enum Role : uint8_t { kNone = 0, kSource = 1, kTarget = 2 };
  thread_local std::vector<uint8_t> roles;
  roles.assign(static_cast<size_t>(num_pages), kNone);
  const int32_t* pairs = params.src_dst.as<const int32_t>();
  for (int64_t pair = 0; pair < params.src_dst.size[0]; ++pair) {
    const int64_t source = pairs[pair * params.src_dst.stride[0]];
    const int64_t target = pairs[pair * params.src_dst.stride[0] + 1];
    if (source >= num_pages || target >= num_pages) {
      return data_error(kOp, "src_dst", pair, "page ids below " + std::to_string(num_pages),
                        std::max(source, target));
    }
    if (source >= 0 && target >= 0) {
      roles[static_cast<size_t>(source)] |= kSource;
      roles[static_cast<size_t>(target)] |= kTarget;
    }
  }
  for (size_t page = 0; page < roles.size(); ++page) {
    if (roles[page] == (kSource | kTarget)) {
      return make_error(StatusCode::kOutOfRange, "diffulex::", kOp,
                        ": src_dst: expected disjoint sources and destinations, got page ", page,
                        " as both");
    }
  }
  return {};
}

/// Writes one head as codes; see store_head.
void store_codes(const KvPages& pages, const KvRow& row, const SlotHead& target) {
  float* wide = thread_floats<CodeTag>(row.head_dim);
  const KernelTable& kernels = kernel_table();
  kernels.load(GatherArgs{row.data, row.dtype, row.head_dim, row.head_dim, row.head_dim}, wide);
  char* codes = pages.at(target.page_id, target.offset, target.head).data;
  const uint8_t scale = encode_head(wide, row.head_dim, codes);
  *pages.scale_at(target.page_id, target.offset, target.head) = scale;
  if (row.write_back != nullptr) {
    decode_head(codes, scale, row.head_dim, wide);
    kernels.store(wide, row.dtype, row.write_back, row.head_dim);
  }
}

}  // namespace

void store_head(const KvPages& pages, const KvRow& row, const SlotHead& target) {
  if (pages.has_scales()) {
    store_codes(pages, row, target);
    return;
  }
  const char* source = row.data;
  if (row.dtype != pages.dtype()) {
    // fp32 in the first half of the buffer, the converted head in the second.
    float* wide = thread_floats<ConvertTag>(2 * row.head_dim);
    const KernelTable& kernels = kernel_table();
    kernels.load(GatherArgs{row.data, row.dtype, row.head_dim, row.head_dim, row.head_dim}, wide);
    kernels.store(wide, pages.dtype(), wide + row.head_dim, row.head_dim);
    source = static_cast<const char*>(static_cast<const void*>(wide + row.head_dim));
  }
  const HeadVector from{const_cast<char*>(source), row.head_dim, row.head_dim};
  copy_head_vector(from, pages.at(target.page_id, target.offset, target.head), row.head_dim,
                   dtype_bytes(pages.dtype()));
}

void store_row(const KvPages& pages, const KvRow& row, int64_t page_id, int64_t offset) {
  const int64_t head_bytes = row.head_dim * dtype_bytes(row.dtype);
  for (int64_t head = 0; head < row.heads; ++head) {
    char* back = row.write_back == nullptr ? nullptr : row.write_back + head * head_bytes;
    store_head(pages, KvRow{row.data + head * head_bytes, row.dtype, 1, row.head_dim, back},
               SlotHead{page_id, offset, head});
  }
}

Status store_kv_cache(const StoreKvCacheParams& params, const ExecContext& context) {
  const int64_t num_tokens = params.k.size[0];
  const int64_t heads = params.k.size[1];
  const int64_t head_dim = params.k.size[2];
  const KvCacheGeometry geometry = kv_cache_geometry(params.k_cache, params.kv_layout, head_dim);
  DIFFULEX_RETURN_IF_ERROR(
      check_slots("store_kv_cache", params.slot_mapping, geometry.num_pages * geometry.page_size));
  const KvPages k_pages = KvPages::keys(params.k_cache, params.k_scale, params.kv_layout, head_dim);
  const KvPages v_pages =
      KvPages::values(params.v_cache, params.v_scale, params.kv_layout, head_dim);
  parallel_ranges(context, num_tokens, row_grain(2 * heads * head_dim),
                  [&](int64_t begin, int64_t end) {
                    for (int64_t row = begin; row < end; ++row) {
                      const int64_t slot = index_at(params.slot_mapping, row);
                      if (slot < 0) {
                        continue;
                      }
                      const int64_t page_id = slot / geometry.page_size;
                      const int64_t offset = slot % geometry.page_size;
                      store_row(k_pages,
                                KvRow{element_at(params.k, row * params.k.stride[0]),
                                      params.k.dtype, heads, head_dim, nullptr},
                                page_id, offset);
                      store_row(v_pages,
                                KvRow{element_at(params.v, row * params.v.stride[0]),
                                      params.v.dtype, heads, head_dim, nullptr},
                                page_id, offset);
                    }
                  });
  return {};
}

Status load_kv_cache(const LoadKvCacheParams& params, const ExecContext& context) {
  DIFFULEX_RETURN_IF_ERROR(validate_load(params));
  const int64_t head_dim = params.k_new.size[2];
  const KvCacheGeometry geometry = kv_cache_geometry(params.k_cache, params.kv_layout, head_dim);
  const LoadSide sides[] = {
      {KvPages::keys(params.k_cache, params.k_scale, params.kv_layout, head_dim), params.k_new,
       params.k_out},
      {KvPages::values(params.v_cache, params.v_scale, params.kv_layout, head_dim), params.v_new,
       params.v_out}};
  const int64_t num_reqs = params.page_table.size[0];
  const int64_t rows_out = params.k_out.size[0];
  const int32_t* pages = params.page_table.as<const int32_t>();
  parallel_ranges(
      context, rows_out, row_grain(2 * params.k_new.size[1] * head_dim),
      [&](int64_t begin, int64_t end) {
        int64_t request = 0;
        for (int64_t row = begin; row < end; ++row) {
          while (request < num_reqs && row >= index_at(params.cu_seqlens_k, request + 1)) {
            ++request;
          }
          RowSource source;
          if (request < num_reqs) {
            const int64_t token = row - index_at(params.cu_seqlens_k, request);
            const int64_t context_len = index_at(params.context_lens, request);
            if (token >= context_len) {
              source.fresh_row = index_at(params.cu_seqlens_q, request) + token - context_len;
            } else {
              source.page_id = pages[request * params.page_table.stride[0] +
                                     token / geometry.page_size * params.page_table.stride[1]];
              source.offset = token % geometry.page_size;
            }
          }
          load_row(sides[0], source, row);
          load_row(sides[1], source, row);
        }
      });
  return {};
}

Status copy_kv_pages(const CopyKvPagesParams& params, const ExecContext& context) {
  DIFFULEX_RETURN_IF_ERROR(validate_copy(params));
  const int32_t* pairs = params.src_dst.as<const int32_t>();
  parallel_ranges(context, params.src_dst.size[0], 1, [&](int64_t begin, int64_t end) {
    for (int64_t pair = begin; pair < end; ++pair) {
      const int64_t source = pairs[pair * params.src_dst.stride[0]];
      const int64_t target = pairs[pair * params.src_dst.stride[0] + 1];
      if (source < 0 || target < 0) {
        continue;
      }
      for (const TensorRef* part :
           {&params.k_cache, &params.v_cache, &params.k_scale, &params.v_scale}) {
        if (part->present()) {
          copy_page(*part, 1, element_at(*part, source * part->stride[0]),
                    element_at(*part, target * part->stride[0]));
        }
      }
    }
  });
  return {};
}

}  // namespace diffulex::cpu
