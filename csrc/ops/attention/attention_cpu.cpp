// SPDX-License-Identifier: Apache-2.0

// Block-diffusion paged attention on the CPU. R requests, Hkv KV heads, G query heads per KV head,
// D head dim. A work item is (request, KV head, tile of tokens); its rows are token * G + g. Keys
// are gathered 64 at a time to fp32; invisible keys (hole, unmapped pages) are never read.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <vector>

#include "diffulex/ops/row_interval.h"
#include "ops/attention/check.h"
#include "ops/cpu_ops.h"
#include "ops/kv/check.h"
#include "ops/kv/pages_cpu.h"
#include "ops/kv/store_cpu.h"
#include "ops/quant/code_rows.h"
#include "ops/shared/cpu_isa/kernel_table.h"
#include "ops/shared/data_checks_cpu.h"
#include "ops/shared/parallel.h"

namespace diffulex::cpu {
namespace {

constexpr const char* kOp = "block_attention";
constexpr int32_t kRowsPerItem = 64;
// Below this many multiply-adds waking a thread pool costs more than it saves.
constexpr int64_t kSerialWork = int64_t{1} << 18;

struct AttentionTag;
struct RoundTag;

struct Request {
  RequestMask mask;
  int32_t first_row = 0;  // packed row of token 0
  int32_t num_rows = 0;   // with padding rows
};

struct WorkItem {
  int32_t request = 0;
  int32_t head = 0;
  int32_t first_token = 0;
  int32_t num_tokens = 0;
  int64_t work = 0;
};

/// One call: arguments, derived shapes and the validated requests.
struct Problem {
  const BlockAttentionParams& params;
  KvPages k_pages;
  KvPages v_pages;
  KvCacheGeometry geometry;
  int32_t num_kv_heads = 0;
  int32_t group = 0;       // G
  int32_t head_dim = 0;    // D
  int32_t padded_dim = 0;  // D rounded up to kDimPad
  const std::vector<Request>& requests;
};

/// fp32 buffers of one thread.
struct Buffers {
  float* q;         // [rows, padded_dim]
  float* out;       // [rows, padded_dim]
  float* scores;    // [rows, kKeyBlock]
  float* row_max;   // [rows]
  float* row_sum;   // [rows]
  float* key_rows;  // [kKeyBlock, padded_dim]
  float* keys;      // [padded_dim, kKeyBlock]
  float* values;    // [kKeyBlock, padded_dim]
};

/// Visible keys of one block in ascending order.
struct KeyBlock {
  int32_t ids[kKeyBlock];
  int32_t count = 0;
};

int32_t optional_at(const TensorRef& tensor, int64_t index, int32_t absent) {
  return tensor.present() ? static_cast<int32_t>(index_at(tensor, index)) : absent;
}

Status check_request(const BlockAttentionParams& params, const KvCacheGeometry& geometry,
                     int64_t index) {
  const int64_t context_len = index_at(params.context_lens, index);
  DIFFULEX_RETURN_IF_ERROR(check_pages(PageTableCheck{kOp, params.page_table, index, context_len,
                                                      geometry.num_pages, geometry.page_size}));
  if (context_len > params.max_context_len) {
    return data_error(kOp, "context_lens", index,
                      "at most max_context_len " + std::to_string(params.max_context_len),
                      context_len);
  }
  const int64_t rows =
      index_at(params.cu_seqlens_q, index + 1) - index_at(params.cu_seqlens_q, index);
  if (rows > params.max_seqlen_q) {
    return data_error(kOp, "cu_seqlens_q", index,
                      "at most max_seqlen_q " + std::to_string(params.max_seqlen_q) + " rows",
                      rows);
  }
  const int64_t kind = index_at(params.mask_kinds, index);
  const int64_t base_kind = kind & ~int64_t{kMaskHoleBit | kMaskAnchorBit};
  if (base_kind < 0 || base_kind > static_cast<int64_t>(MaskKind::kCacheOnly)) {
    return data_error(kOp, "mask_kinds", index,
                      "a kind 0 to 4, optionally with bits 0x100 and 0x200", kind);
  }
  if (params.q_starts.present() && index_at(params.q_starts, index) < 0) {
    return data_error(kOp, "q_starts", index, "a position >= 0", index_at(params.q_starts, index));
  }
  return {};
}

Status read_requests(const BlockAttentionParams& params, const KvCacheGeometry& geometry,
                     std::vector<Request>* requests) {
  requests->clear();
  DIFFULEX_RETURN_IF_ERROR(
      check_offsets(kOp, "cu_seqlens_q", params.cu_seqlens_q, params.q.size[0]));
  for (int64_t index = 0; index < params.page_table.size[0]; ++index) {
    DIFFULEX_RETURN_IF_ERROR(check_request(params, geometry, index));
    Request request;
    request.first_row = static_cast<int32_t>(index_at(params.cu_seqlens_q, index));
    const auto end = static_cast<int32_t>(index_at(params.cu_seqlens_q, index + 1));
    request.num_rows = end - request.first_row;
    RequestMask& mask = request.mask;
    mask.context_len = static_cast<int32_t>(index_at(params.context_lens, index));
    mask.num_valid = num_valid_rows(request.first_row, end,
                                    static_cast<int32_t>(index_at(params.valid_slices, index)));
    mask.start_position = optional_at(params.q_starts, index, mask.context_len);
    mask.prefix_len = optional_at(params.prefix_lens, index, 0);
    mask.padded_prefix_len = optional_at(params.padded_prefix_lens, index, 0);
    const auto bits = static_cast<int32_t>(index_at(params.mask_kinds, index));
    mask.kind = bits & 0xFF;
    mask.block_size = params.block_size;
    mask.block_origin = mask_block_origin(mask);
    mask.sliding_window = params.sliding_window;
    mask.is_anchored = (bits & kMaskAnchorBit) != 0;
    mask.hole = mask_hole(bits, mask.context_len, mask.prefix_len, mask.padded_prefix_len);
    requests->push_back(request);
  }
  return {};
}

/// All items, largest first; returns the total number of multiply-adds.
int64_t list_items(const Problem& problem, std::vector<WorkItem>* items) {
  items->clear();
  const int32_t tile = std::max(1, kRowsPerItem / problem.group);
  int64_t total = 0;
  for (size_t index = 0; index < problem.requests.size(); ++index) {
    const RequestMask& mask = problem.requests[index].mask;
    for (int32_t token = 0; token < mask.num_valid; token += tile) {
      const int32_t count = std::min(tile, mask.num_valid - token);
      const KeyRange range =
          tile_key_range(row_interval(mask, token), row_interval(mask, token + count - 1));
      const int64_t work =
          int64_t{std::max(range.end - range.begin, 0)} * count * problem.group * problem.head_dim;
      total += work * problem.num_kv_heads;
      for (int32_t head = 0; head < problem.num_kv_heads; ++head) {
        items->push_back(WorkItem{static_cast<int32_t>(index), head, token, count, work});
      }
    }
  }
  std::sort(items->begin(), items->end(), [](const WorkItem& a, const WorkItem& b) {
    return a.work != b.work ? a.work > b.work
           : a.request != b.request
               ? a.request < b.request
               : (a.head != b.head ? a.head < b.head : a.first_token < b.first_token);
  });
  return total;
}

Buffers take_buffers(const Problem& problem) {
  const int64_t rows = std::max(1, kRowsPerItem / problem.group) * int64_t{problem.group};
  // Every buffer starts at a multiple of 16 floats, so that no vector straddles a cache line.
  const int64_t vector_rows = (rows + kDimPad - 1) / kDimPad * kDimPad;
  const int64_t dim = problem.padded_dim;
  float* next = thread_floats<AttentionTag>(2 * rows * dim + rows * kKeyBlock + 2 * vector_rows +
                                            3 * kKeyBlock * dim);
  Buffers buffers{};
  const auto take = [&next](int64_t count) {
    float* taken = next;
    next += count;
    return taken;
  };
  buffers.q = take(rows * dim);
  buffers.out = take(rows * dim);
  buffers.scores = take(rows * kKeyBlock);
  buffers.row_max = take(vector_rows);
  buffers.row_sum = take(vector_rows);
  buffers.key_rows = take(kKeyBlock * dim);
  buffers.keys = take(kKeyBlock * dim);
  buffers.values = take(kKeyBlock * dim);
  return buffers;
}

void load_queries(const Problem& problem, const WorkItem& item, const Buffers& buffers) {
  const KernelTable& kernels = kernel_table();
  const TensorRef& q = problem.params.q;
  const int64_t first_row =
      problem.requests[static_cast<size_t>(item.request)].first_row + item.first_token;
  const int64_t dim = problem.head_dim;
  float* row = buffers.q;
  for (int64_t token = 0; token < item.num_tokens; ++token) {
    for (int64_t g = 0; g < problem.group; ++g) {
      const int64_t head = int64_t{item.head} * problem.group + g;
      kernels.load(GatherArgs{element_at(q, (first_row + token) * q.stride[0] + head * q.stride[1]),
                              q.dtype, dim, dim, dim},
                   row);
      kernels.scale(row, problem.params.scale, dim);
      row += problem.padded_dim;
    }
  }
  const int64_t rows = int64_t{item.num_tokens} * problem.group;
  std::fill_n(buffers.out, rows * problem.padded_dim, 0.0F);
  std::fill_n(buffers.row_max, rows, -INFINITY);
  std::fill_n(buffers.row_sum, rows, 0.0F);
  // Padding dims of values reach the output buffer; those of keys are never multiplied.
  std::fill_n(buffers.values, kKeyBlock * int64_t{problem.padded_dim}, 0.0F);
  std::fill_n(buffers.key_rows, kKeyBlock * int64_t{problem.padded_dim}, 0.0F);
}

void load_key(const Problem& problem, const HeadVector& k, const HeadVector& v,
              const Buffers& buffers, int32_t slot) {
  const KernelTable& kernels = kernel_table();
  const DType dtype = problem.params.q.dtype;
  const int64_t offset = int64_t{slot} * problem.padded_dim;
  kernels.load(GatherArgs{k.data, dtype, problem.head_dim, k.group, k.group_stride},
               buffers.key_rows + offset);
  kernels.load(GatherArgs{v.data, dtype, problem.head_dim, v.group, v.group_stride},
               buffers.values + offset);
}

/// One head of a cached key or value: codes are numbers of the dtype of q, as in a cache of it.
void load_codes(const Problem& problem, const KvPages& pages, const SlotHead& place, float* out) {
  decode_head(pages.at(place.page_id, place.offset, place.head).data,
              *pages.scale_at(place.page_id, place.offset, place.head), problem.head_dim, out);
  if (problem.params.q.dtype == DType::kF16) {  // the others hold every value
    const int64_t dim = problem.head_dim;
    float* half = thread_floats<RoundTag>(dim);
    kernel_table().store(out, DType::kF16, half, dim);
    kernel_table().load(GatherArgs{half, DType::kF16, dim, dim, dim}, out);
  }
}

void load_cached(const Problem& problem, const SlotHead& place, const Buffers& buffers,
                 int32_t slot) {
  if (!problem.k_pages.has_scales()) {
    load_key(problem, problem.k_pages.at(place.page_id, place.offset, place.head),
             problem.v_pages.at(place.page_id, place.offset, place.head), buffers, slot);
    return;
  }
  const int64_t offset = int64_t{slot} * problem.padded_dim;
  load_codes(problem, problem.k_pages, place, buffers.key_rows + offset);
  load_codes(problem, problem.v_pages, place, buffers.values + offset);
}

/// Calls visit(key, place) for up to kKeyBlock visible keys of `rest`, whose place is null where a
/// key is a row of this call; returns the key to go on with.
template <typename Visit>
int32_t visit_keys(const Problem& problem, const WorkItem& item, KeyRange rest,
                   const Visit& visit) {
  const TensorRef& table = problem.params.page_table;
  const RequestMask& mask = problem.requests[static_cast<size_t>(item.request)].mask;
  const int32_t* pages = table.as<const int32_t>() + int64_t{item.request} * table.stride[0];
  const auto page_size = static_cast<int32_t>(problem.geometry.page_size);
  int32_t count = 0;
  int32_t key = rest.begin;
  while (key < rest.end && count < kKeyBlock) {
    if (contains(mask.hole, key)) {
      key = mask.hole.end;
      continue;
    }
    if (key >= mask.context_len) {
      visit(key++, nullptr);
      ++count;
      continue;
    }
    const int32_t page_start = key / page_size * page_size;
    const int64_t page_id = pages[int64_t{key / page_size} * table.stride[1]];
    if (page_id < 0) {
      key = min_i32(page_start + page_size, mask.context_len);
      continue;
    }
    const SlotHead place{page_id, key - page_start, item.head};
    visit(key++, &place);
    ++count;
  }
  return key;
}

/// Gathers up to kKeyBlock visible keys from `rest.begin` on; returns the key to go on with.
int32_t gather_block(const Problem& problem, const WorkItem& item, const Buffers& buffers,
                     KeyRange rest, KeyBlock* block) {
  const BlockAttentionParams& params = problem.params;
  const Request& request = problem.requests[static_cast<size_t>(item.request)];
  const int64_t dim = problem.head_dim;
  block->count = 0;
  return visit_keys(problem, item, rest, [&](int32_t key, const SlotHead* place) {
    if (place != nullptr) {
      load_cached(problem, *place, buffers, block->count);
    } else {
      const int64_t row = int64_t{request.first_row} + key - request.mask.context_len;
      const TensorRef& k = params.k;
      const TensorRef& v = params.v;
      load_key(problem,
               HeadVector{element_at(k, row * k.stride[0] + item.head * k.stride[1]), dim, dim},
               HeadVector{element_at(v, row * v.stride[0] + item.head * v.stride[1]), dim, dim},
               buffers, block->count);
    }
    block->ids[block->count++] = key;
  });
}

/// The cached heads among the first keys of `rest`: each lies on another page of memory, so that no
/// processor looks ahead by itself. Only of caches that have the values of a head together.
void list_ahead(const Problem& problem, const WorkItem& item, KeyRange rest, LinesAhead* ahead) {
  ahead->count = ahead->next = 0;
  ahead->piece_bytes = problem.head_dim * dtype_bytes(problem.k_pages.dtype());
  rest.end =
      std::min(rest.end, problem.requests[static_cast<size_t>(item.request)].mask.context_len);
  visit_keys(problem, item, rest, [&](int32_t /*key*/, const SlotHead* place) {
    for (const KvPages* pages : {&problem.k_pages, &problem.v_pages}) {
      const HeadVector head = pages->at(place->page_id, place->offset, place->head);
      if (head.group == problem.head_dim) {
        ahead->pieces[ahead->count++] = head.data;
      }
    }
  });
}

/// Attends all rows of the item to one key block, runs of rows with equal ranges together.
void attend_block(const Problem& problem, const WorkItem& item, const Buffers& buffers,
                  const KeyBlock& block, LinesAhead* ahead) {
  const KernelTable& kernels = kernel_table();
  const RequestMask& mask = problem.requests[static_cast<size_t>(item.request)].mask;
  kernels.pack_keys(buffers.key_rows, block.count, problem.padded_dim, buffers.keys);
  const int32_t* first = block.ids;
  const int32_t* last = block.ids + block.count;
  const auto range_of = [&](int32_t token) {
    const KeyRange interval = row_interval(mask, item.first_token + token);
    return KeyRange{static_cast<int32_t>(std::lower_bound(first, last, interval.begin) - first),
                    static_cast<int32_t>(std::lower_bound(first, last, interval.end) - first)};
  };
  int32_t token = 0;
  while (token < item.num_tokens) {
    const KeyRange range = range_of(token);
    int32_t run_end = token + 1;
    while (run_end < item.num_tokens) {
      const KeyRange next = range_of(run_end);
      if (next.begin != range.begin || next.end != range.end) {
        break;
      }
      ++run_end;
    }
    if (range.begin < range.end) {
      const int64_t row = int64_t{token} * problem.group;
      kernels.attend(AttendArgs{buffers.q + row * problem.padded_dim, buffers.keys, buffers.values,
                                buffers.scores + row * kKeyBlock,
                                buffers.out + row * problem.padded_dim, buffers.row_max + row,
                                buffers.row_sum + row, (run_end - token) * problem.group,
                                range.begin, range.end, problem.head_dim, problem.padded_dim,
                                problem.params.softcap, ahead});
    }
    token = run_end;
  }
}

void store_result(const Problem& problem, const WorkItem& item, const Buffers& buffers) {
  const KernelTable& kernels = kernel_table();
  const TensorRef& out = problem.params.out;
  const TensorRef& lse = problem.params.lse;
  const int64_t first_row =
      problem.requests[static_cast<size_t>(item.request)].first_row + item.first_token;
  for (int64_t token = 0; token < item.num_tokens; ++token) {
    for (int64_t g = 0; g < problem.group; ++g) {
      const int64_t index = token * problem.group + g;
      const int64_t head = int64_t{item.head} * problem.group + g;
      const float sum = buffers.row_sum[index];
      float* row = buffers.out + index * problem.padded_dim;
      kernels.scale(row, sum == 0.0F ? 0.0F : 1.0F / sum, problem.head_dim);
      kernels.store(row, out.dtype,
                    element_at(out, (first_row + token) * out.stride[0] + head * out.stride[1]),
                    problem.head_dim);
      if (lse.present()) {
        lse.as<float>()[(first_row + token) * lse.stride[0] + head * lse.stride[1]] =
            sum == 0.0F ? -INFINITY : buffers.row_max[index] + std::log(sum);
      }
    }
  }
}

KeyRange keys_of(const Problem& problem, const WorkItem& item) {
  const RequestMask& mask = problem.requests[static_cast<size_t>(item.request)].mask;
  return tile_key_range(row_interval(mask, item.first_token),
                        row_interval(mask, item.first_token + item.num_tokens - 1));
}

/// `next_item()` is one that may be run next, or null.
template <typename NextItem>
void run_item(const Problem& problem, const WorkItem& item, const Buffers& buffers,
              const NextItem& next_item) {
  load_queries(problem, item, buffers);
  KeyRange rest = keys_of(problem, item);
  KeyBlock block;
  LinesAhead ahead;
  while (rest.begin < rest.end) {
    rest.begin = gather_block(problem, item, buffers, rest, &block);
    list_ahead(problem, item, rest, &ahead);
    const WorkItem* following = rest.begin < rest.end ? nullptr : next_item();
    if (following != nullptr) {
      list_ahead(problem, *following, keys_of(problem, *following), &ahead);
    }
    if (block.count > 0) {
      attend_block(problem, item, buffers, block, &ahead);
    }
  }
  store_result(problem, item, buffers);
}

/// Rows without a query: output 0, lse -inf.
void clear_rows(const BlockAttentionParams& params, int64_t begin, int64_t end) {
  const TensorRef& out = params.out;
  const auto row_bytes = static_cast<size_t>(out.size[2] * dtype_bytes(out.dtype));
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t head = 0; head < out.size[1]; ++head) {
      std::memset(element_at(out, row * out.stride[0] + head * out.stride[1]), 0, row_bytes);
      if (params.lse.present()) {
        params.lse.as<float>()[row * params.lse.stride[0] + head * params.lse.stride[1]] =
            -INFINITY;
      }
    }
  }
}

void clear_padding(const Problem& problem) {
  int64_t packed_end = 0;
  for (const Request& request : problem.requests) {
    clear_rows(problem.params, int64_t{request.first_row} + request.mask.num_valid,
               int64_t{request.first_row} + request.num_rows);
    packed_end = int64_t{request.first_row} + request.num_rows;
  }
  clear_rows(problem.params, packed_end, problem.params.q.size[0]);
}

}  // namespace

Status block_attention(const BlockAttentionParams& params, const ExecContext& context) {
  // Reused between calls: a decode step makes one call per layer.
  thread_local std::vector<Request> requests;
  thread_local std::vector<WorkItem> items;
  const KvCacheGeometry geometry =
      kv_cache_geometry(params.k_cache, params.kv_layout, params.q.size[2]);
  DIFFULEX_RETURN_IF_ERROR(read_requests(params, geometry, &requests));
  const AttentionShape shape = attention_shape(params);
  const Problem problem{
      params,
      KvPages::keys(params.k_cache, params.k_scale, params.kv_layout, shape.head_dim),
      KvPages::values(params.v_cache, params.v_scale, params.kv_layout, shape.head_dim),
      geometry,
      shape.num_kv_heads,
      shape.num_q_heads / shape.num_kv_heads,
      shape.head_dim,
      (shape.head_dim + kDimPad - 1) / kDimPad * kDimPad,
      requests};
  const int64_t work = list_items(problem, &items);
  clear_padding(problem);
  const auto num_items = static_cast<int64_t>(items.size());
  const std::vector<WorkItem>& shared_items = items;
  // Threads draw items in order, largest first; a result depends on its item alone.
  std::atomic<int64_t> next{0};
  parallel_ranges(context, num_items, work < kSerialWork ? num_items : 1,
                  [&](int64_t /*begin*/, int64_t /*end*/) {
                    const Buffers buffers = take_buffers(problem);
                    const auto next_item = [&] {
                      const auto index = static_cast<size_t>(next.load());
                      return index < shared_items.size() ? &shared_items[index] : nullptr;
                    };
                    for (int64_t index = next++; index < num_items; index = next++) {
                      run_item(problem, shared_items[static_cast<size_t>(index)], buffers,
                               next_item);
                    }
                  });
  return params.codes.present() ? cpu::quantize_rows(code_rows_of(attention_rows(params.out),
                                                                  params.codes, params.codes_scale),
                                                     context)
                                : Status{};
}

}  // namespace diffulex::cpu
