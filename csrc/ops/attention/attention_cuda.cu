// SPDX-License-Identifier: Apache-2.0
//
// Host side of block_attention: path, tile and split choice from host shapes, then the launches.
#include <atomic>
#include <cstdint>
#include <random>

#include "ops/attention/args.cuh"
#include "ops/attention/check.h"
#include "ops/attention/combine.h"
#include "ops/attention/config.h"
#include "ops/attention/generic.h"
#include "ops/attention/sm90/table.h"
#include "ops/attention/table.h"
#include "ops/cuda_ops.h"
#include "ops/prepare.h"
#include "ops/shared/cuda/check_data.h"
#include "ops/shared/cuda/device_facts.h"
#include "ops/shared/cuda/hopper.h"
#include "ops/shared/cuda/launch.cuh"

namespace diffulex::cuda {
namespace {

constexpr const char* kWhere = "diffulex::block_attention";
constexpr int32_t kEmptyPageShift = 7;

template <typename Strides>
void copy_strides(const TensorRef& tensor, Strides& strides) {
  for (int32_t dim = 0; dim < tensor.rank; ++dim) {
    strides[dim] = tensor.stride[dim];
  }
}

const int32_t* optional_i32(const TensorRef& tensor) {
  return tensor.present() ? tensor.as<const int32_t>() : nullptr;
}

/// log2 of a power of two, -1 for other numbers.
int32_t log2_or_none(int32_t value) {
  int32_t shift = 0;
  while (shift < 30 && (1 << shift) < value) {
    ++shift;
  }
  return (1 << shift) == value ? shift : -1;
}

CodedAttentionArgs make_args(const BlockAttentionParams& params, const AttentionShape& shape) {
  CodedAttentionArgs args{};
  args.q = params.q.data;
  args.k = params.k.data;
  args.v = params.v.data;
  args.out = params.out.data;
  copy_strides(params.q, args.q_stride);
  copy_strides(params.k, args.k_stride);
  copy_strides(params.v, args.v_stride);
  copy_strides(params.out, args.out_stride);
  if (params.lse.present()) {
    args.lse = params.lse.as<float>();
    copy_strides(params.lse, args.lse_stride);
  }
  args.k_cache = CacheView::of_keys(params.k_cache, params.kv_layout);
  args.v_cache = CacheView::of_values(params.v_cache, params.kv_layout);
  args.k_scales = KvScales::of(params.k_scale);
  args.v_scales = KvScales::of(params.v_scale);
  if (args.k_cache.page_size < 1) {  // an empty cache may have no page size
    args.k_cache.page_size = 1;
    args.v_cache.page_size = 1;
  }
  args.page_table = params.page_table.as<const int32_t>();
  args.page_table_stride = params.page_table.stride[0];
  args.max_pages = static_cast<int32_t>(params.page_table.size[1]);
  while ((1 << args.page_shift) < args.k_cache.page_size) {
    ++args.page_shift;
  }
  args.cu_seqlens_q = params.cu_seqlens_q.as<const int32_t>();
  args.context_lens = params.context_lens.as<const int32_t>();
  args.valid_slices = params.valid_slices.as<const int32_t>();
  args.mask_kinds = params.mask_kinds.as<const int32_t>();
  args.prefix_lens = optional_i32(params.prefix_lens);
  args.padded_prefix_lens = optional_i32(params.padded_prefix_lens);
  args.q_starts = optional_i32(params.q_starts);
  args.scale = params.scale;
  args.softcap = params.softcap;
  args.num_tokens = static_cast<int32_t>(params.q.size[0]);
  args.num_reqs = shape.num_reqs;
  args.num_q_heads = shape.num_q_heads;
  args.num_kv_heads = shape.num_kv_heads;
  args.group = shape.num_q_heads / shape.num_kv_heads;
  args.head_dim = shape.head_dim;
  args.block_size = params.block_size;
  args.block_shift = log2_or_none(params.block_size);
  args.by_group = FastDiv::of(static_cast<uint32_t>(args.group));
  args.by_kv_heads = FastDiv::of(static_cast<uint32_t>(args.num_kv_heads));
  args.sliding_window = params.sliding_window;
  args.max_seqlen_q = params.max_seqlen_q;
  return args;
}

bool has_aligned_rows(const TensorRef& tensor) {
  const int64_t bytes = dtype_bytes(tensor.dtype);
  return is_aligned16(tensor.data) && tensor.stride[2] == 1 && tensor.stride[0] * bytes % 16 == 0 &&
         tensor.stride[1] * bytes % 16 == 0;
}

/// True when every row can move in 16-byte pieces and pages are found by shifts.
bool is_tensor_core_ready(const BlockAttentionParams& params, const AttentionArgs& args) {
  const int32_t page_size = args.k_cache.page_size;
  const int64_t bytes = dtype_bytes(params.k_cache.dtype);
  const int64_t piece = params.k_scale.present() ? 8 : 16;  // bytes of a cached head in one access
  const bool is_cache_ready =
      args.k_cache.num_pages == 0 ||
      (args.k_cache.is_row_aligned(piece, bytes) && args.v_cache.is_row_aligned(piece, bytes));
  return params.kv_layout == KvLayout::kUnified && (page_size & (page_size - 1)) == 0 &&
         has_aligned_rows(params.q) && has_aligned_rows(params.k) && has_aligned_rows(params.v) &&
         has_aligned_rows(params.out) && is_cache_ready;
}

const TensorCoreEntry* find_tensor_core(DType dtype, bool is_coded, int32_t head_dim,
                                        const AttentionConfig& config) {
  for (const TensorCoreEntry& entry : tensor_core_kernels()) {
    if (entry.dtype == dtype && entry.is_coded == is_coded && entry.tile.head_dim == head_dim &&
        entry.tile.rows == config.rows_per_tile && entry.tile.stages == config.stages) {
      return &entry;
    }
  }
  return nullptr;
}

/// What the choices may count on.
AttentionDevice attention_device(const ExecContext& context) {
  AttentionDevice device;
  device.num_processors = device_processors(context.device_index);
  device.shared_memory = device_shared_memory(context.device_index);
  if (context.shared_memory_limit > 0 && context.shared_memory_limit < device.shared_memory) {
    device.shared_memory = context.shared_memory_limit;
  }
  return device;
}

/// True when scale bytes can move four at a time.
bool has_aligned_scales(const KvScales& scales) {
  return reinterpret_cast<uintptr_t>(scales.data) % 4 == 0 && scales.token_stride == 1 &&
         scales.page_stride % 4 == 0 && scales.head_stride % 4 == 0;
}

/// True when the copy engine can fetch the caches: pages of 8 to 256 tokens fill whole rows of the
/// shared-memory swizzle, strides are positive, and heads, also of codes, lie at multiples of 16
/// bytes.
bool is_copied_cache(const BlockAttentionParams& params, const CodedAttentionArgs& args) {
  const int32_t page_size = args.k_cache.page_size;
  const int64_t bytes = dtype_bytes(params.k_cache.dtype);
  const auto is_ready = [bytes](const CacheView& cache) {
    return cache.page_stride > 0 && cache.token_stride > 0 && cache.head_stride > 0 &&
           cache.is_row_aligned16(bytes);
  };
  if (args.k_cache.num_pages == 0) {
    return true;
  }
  return page_size >= 8 && page_size <= 256 && is_ready(args.k_cache) && is_ready(args.v_cache) &&
         (!params.k_scale.present() ||
          (has_aligned_scales(args.k_scales) && has_aligned_scales(args.v_scales)));
}

/// True when the copy engine can fetch every operand.
bool is_copy_engine_ready(const BlockAttentionParams& params, const CodedAttentionArgs& args) {
  const auto has_steps = [](const TensorRef& tensor) {
    return tensor.stride[0] > 0 && tensor.stride[1] > 0;
  };
  return is_tensor_core_ready(params, args) && is_copied_cache(params, args) &&
         has_steps(params.q) && has_steps(params.k) && has_steps(params.v) && args.num_tokens > 0;
}

const sm90::AttentionEntry* find_hopper(const BlockAttentionParams& params, int32_t rows_per_tile,
                                        bool writes_codes) {
  for (const sm90::AttentionEntry& entry : sm90::attention_entries()) {
    if (entry.dtype == params.q.dtype && entry.is_coded == params.k_scale.present() &&
        entry.head_dim == params.q.size[2] && entry.rows_per_tile == rows_per_tile &&
        entry.writes_codes == writes_codes) {
      return &entry;
    }
  }
  return nullptr;
}

void apply_config(AttentionArgs& args, const AttentionConfig& config) {
  args.rows_per_tile = config.rows_per_tile;
  args.tokens_per_tile = config.tokens_per_tile;
  args.by_tile_tokens = FastDiv::of(static_cast<uint32_t>(config.tokens_per_tile));
  args.tiles_per_request = config.tiles_per_request;
  args.num_splits = config.num_splits;
  args.keys_per_split = config.keys_per_split;
  args.cluster_size = config.cluster_size;
}

Status require_workspace(size_t needed, const AttentionShape& shape, const ExecContext& context) {
  if (context.workspace == nullptr || context.workspace_bytes < needed) {
    return make_error(StatusCode::kInvalidArgument, kWhere, ": workspace: expected at least ",
                      attention_workspace_bytes(shape, Device::kCuda), " bytes, got ",
                      context.workspace == nullptr ? 0 : context.workspace_bytes);
  }
  if (reinterpret_cast<uintptr_t>(context.workspace) % 256 != 0) {
    return make_error(StatusCode::kInvalidArgument, kWhere,
                      ": workspace: expected a 256-byte aligned address, got ", context.workspace);
  }
  return Status::ok_status();
}

Status bind_workspace(AttentionArgs& args, const AttentionShape& shape,
                      const ExecContext& context) {
  if (args.num_splits <= 1) {
    return Status::ok_status();
  }
  const int64_t records =
      int64_t{args.num_splits} * args.num_reqs * args.max_seqlen_q * args.num_q_heads;
  const int64_t stats_bytes = (records * 8 + 15) / 16 * 16;
  const int64_t needed = stats_bytes + records * args.head_dim * 4;
  DIFFULEX_RETURN_IF_ERROR(require_workspace(static_cast<size_t>(needed), shape, context));
  args.partial_stats = static_cast<float2*>(context.workspace);
  args.partial_out =
      reinterpret_cast<float*>(static_cast<uint8_t*>(context.workspace) + stats_bytes);
  return Status::ok_status();
}

/// A random number of 56 bits above a byte of zeros, another one for every launch of the process.
uint64_t next_launch_tag() {
  static std::atomic<uint64_t> count{std::random_device{}() * uint64_t{0x9E3779B97F4A7C15}};
  uint64_t bits = count.fetch_add(0x9E3779B97F4A7C15, std::memory_order_relaxed);
  bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9;
  bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB;
  return (bits ^ (bits >> 31)) << 8;
}

/// Workspace of the Hopper kernels: values, statistics and counters of the units.
Status bind_hopper_workspace(AttentionArgs& args, const AttentionConfig& config,
                             const AttentionShape& shape, const ExecContext& context) {
  if (args.num_splits <= 1) {
    return Status::ok_status();
  }
  const HopperScratch scratch = hopper_scratch(shape, config);
  DIFFULEX_RETURN_IF_ERROR(require_workspace(scratch.bytes(), shape, context));
  uint8_t* const base = static_cast<uint8_t*>(context.workspace);
  args.partial_out = reinterpret_cast<float*>(base);
  args.partial_stats = reinterpret_cast<float2*>(base + scratch.value_bytes);
  args.arrivals = reinterpret_cast<uint64_t*>(base + scratch.value_bytes + scratch.stat_bytes);
  args.launch_tag = next_launch_tag();
  return Status::ok_status();
}

Status check_indices(const BlockAttentionParams& params, const AttentionArgs& args,
                     const ExecContext& context) {
  if (!context.check_data) {
    return Status::ok_status();
  }
  DIFFULEX_RETURN_IF_ERROR(
      check_offsets(kWhere, "cu_seqlens_q", params.cu_seqlens_q, args.num_tokens, context));
  const int64_t capacity = int64_t{args.max_pages} * args.k_cache.page_size;
  DIFFULEX_RETURN_IF_ERROR(
      check_range(kWhere, "context_lens", params.context_lens, 0, capacity + 1, context));
  return check_range(kWhere, "page_table", params.page_table, INT64_MIN, args.k_cache.num_pages,
                     context);
}

/// Second pass of the portable kernels.
Status add_up_splits(const AttentionArgs& args, DType dtype, const ExecContext& context) {
  if (args.num_splits <= 1 || args.num_reqs == 0) {
    return Status::ok_status();
  }
  return attention_combine(args, dtype, context);
}

/// Whether codes in place of rows save time. The end of a tile whose keys are whole is much code,
/// which a CTA of one unit reads from memory once: that takes longer than a second launch.
bool is_worth_codes(const AttentionArgs& args, int32_t device_index) {
  return args.num_splits > 1 ||
         int64_t{args.num_reqs} * args.num_kv_heads * args.tiles_per_request >
             device_processors(device_index);
}

/// Launches a Hopper kernel, one that writes the wanted codes where there is one, and tells whether
/// it does.
Status launch_hopper(const BlockAttentionParams& params, CodedAttentionArgs& args,
                     const sm90::AttentionEntry* entry, bool& has_written_codes,
                     const ExecContext& context) {
  CodeRows rows;
  if (params.codes.present() && is_worth_codes(args, context.device_index)) {
    rows = CodeRows::of(params.codes, params.codes_scale);
    const auto* writer = find_hopper(params, entry->rows_per_tile, true);
    has_written_codes = writer != nullptr && !rows.is_int8 && rows.has_pieces(params.codes.last());
    if (has_written_codes) {
      entry = writer;
      args.out = params.codes_only ? nullptr : args.out;
    }
  }
  return entry->kernel.launch(args, rows, context.device_index, context.stream);
}

Status launch_paths(const BlockAttentionParams& params, const AttentionShape& shape,
                    CodedAttentionArgs& args, bool& has_written_codes, const ExecContext& context) {
  const bool is_coded = params.k_scale.present();
  const AttentionDevice device = attention_device(context);
  const AttentionConfig hopper = hopper_attention_config(shape, context.batch_invariant, device);
  if (args.group <= hopper.rows_per_tile && device.shared_memory >= kLargeSharedMemory &&
      is_hopper_device(context.device_index) && is_copy_engine_ready(params, args)) {
    const sm90::AttentionEntry* entry = find_hopper(params, hopper.rows_per_tile, false);
    if (entry != nullptr) {
      apply_config(args, hopper);
      if (args.k_cache.num_pages == 0) {  // no page is ever found; whole tiles keep boxes aligned
        args.k_cache.page_size = 1 << kEmptyPageShift;
        args.page_shift = kEmptyPageShift;
      }
      DIFFULEX_RETURN_IF_ERROR(bind_hopper_workspace(args, hopper, shape, context));
      return launch_hopper(params, args, entry, has_written_codes, context);
    }
  }
  const AttentionConfig config = attention_config(shape, context.batch_invariant, device);
  const TensorCoreEntry* entry = nullptr;
  // A tile must hold at least one token.
  if (args.group <= config.rows_per_tile && is_tensor_core_ready(params, args)) {
    entry = find_tensor_core(params.q.dtype, is_coded, shape.head_dim, config);
  }
  if (entry != nullptr) {
    apply_config(args, config);
    DIFFULEX_RETURN_IF_ERROR(bind_workspace(args, shape, context));
    DIFFULEX_RETURN_IF_ERROR(entry->kernel.launch(args, context.device_index, context.stream));
    return add_up_splits(args, params.q.dtype, context);
  }
  const GenericKernel generic = generic_kernel_of(params.q.dtype, is_coded);
  if (generic.launch == nullptr) {
    return make_error(StatusCode::kNoKernel, kWhere, ": q: expected a dtype of this build, got ",
                      to_string(params.q.dtype));
  }
  const int32_t tile = generic_attention_tile(shape.head_dim, device.shared_memory);
  apply_config(args, attention_config_for_tile(shape, tile, tile, context.batch_invariant, device));
  // Rows are packed without regard to tokens; as many tokens a tile are enough to zero every dead
  // row.
  args.tokens_per_tile = tile;
  args.tiles_per_request =
      static_cast<int32_t>(ceil_div(int64_t{args.max_seqlen_q} * args.group, tile));
  DIFFULEX_RETURN_IF_ERROR(bind_workspace(args, shape, context));
  DIFFULEX_RETURN_IF_ERROR(generic.launch(args, context.device_index, context.stream));
  return add_up_splits(args, params.q.dtype, context);
}

}  // namespace

Status block_attention(const BlockAttentionParams& params, const ExecContext& context) {
  DeviceGuard guard(context);
  DIFFULEX_RETURN_IF_ERROR(guard.status(kWhere));
  const AttentionShape shape = attention_shape(params);
  CodedAttentionArgs args = make_args(params, shape);
  DIFFULEX_RETURN_IF_ERROR(check_indices(params, args, context));
  bool has_written_codes = false;
  DIFFULEX_RETURN_IF_ERROR(launch_paths(params, shape, args, has_written_codes, context));
  if (!params.codes.present() || has_written_codes) {
    return Status::ok_status();
  }
  return cuda::quantize_rows(
      code_rows_of(attention_rows(params.out), params.codes, params.codes_scale), context);
}

Status prepare_attention_kernels(const ExecContext& context) {
  if (is_hopper_device(context.device_index)) {
    for (const sm90::AttentionEntry& entry : sm90::attention_entries()) {
      DIFFULEX_RETURN_IF_ERROR(entry.kernel.prepare(context.device_index));
    }
  }
  const int32_t shared_memory = device_shared_memory(context.device_index);
  for (const TensorCoreEntry& entry : tensor_core_kernels()) {
    if (entry.tile.shared_bytes() <= shared_memory) {  // others are never chosen here
      DIFFULEX_RETURN_IF_ERROR(entry.kernel.prepare(context.device_index));
    }
  }
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const bool is_coded : {false, true}) {
      const GenericKernel generic = generic_kernel_of(dtype, is_coded);
      if (generic.prepare != nullptr) {
        DIFFULEX_RETURN_IF_ERROR(generic.prepare(context.device_index));
      }
    }
  }
  return prepare_attention_combine();
}

}  // namespace diffulex::cuda
