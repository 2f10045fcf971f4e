// SPDX-License-Identifier: Apache-2.0
#pragma once

// The vectorised inner kernels, compiled once per instruction set and reached through one table.
// Only plain data crosses this border: a variant file may not share inline functions with others.

#include <cstdint>

#include "diffulex/ops/activation.h"
#include "diffulex/ops/dtype.h"
#include "diffulex/ops/linear.h"
#include "diffulex/ops/sampling.h"

namespace diffulex::cpu {

/// Keys per block of the attention loop; row length of the score and packed key buffers.
inline constexpr int32_t kKeyBlock = 64;
/// Head dims are padded with zeros to a multiple of this in fp32 scratch.
inline constexpr int32_t kDimPad = 16;
/// Panel rows per pass of linear_packed: 32 KiB of float32, kept by the caches between row tiles.
inline constexpr int32_t kLinearDepthBlock = 256;
/// Floats between rows of the copy of x that linear_packed reads. One cache line more than a depth
/// block, because rows a power of two apart share their cache sets and evict each other.
inline constexpr int32_t kLinearRowStride = kLinearDepthBlock + 16;

/// `count` elements in contiguous groups of `group`, groups `group_stride` elements apart.
struct GatherArgs {
  const void* source = nullptr;
  DType dtype = DType::kF32;
  int64_t count = 0;
  int64_t group = 0;
  int64_t group_stride = 0;
};

/// Memory that is read after a product, which asks for some pieces of it with each of its tiles:
/// all at once they would wait for each other.
struct LinesAhead {
  const char* pieces[2 * kKeyBlock] = {};
  int64_t piece_bytes = 0;
  int32_t count = 0;
  int32_t next = 0;  // the first one that was not asked for
};

/// Rows that see the same keys [key_begin, key_end) of one key block: online softmax update.
struct AttendArgs {
  const float* q = nullptr;       // [rows, padded_dim], scaled
  const float* keys = nullptr;    // [padded_dim, kKeyBlock], transposed keys
  const float* values = nullptr;  // [kKeyBlock, padded_dim]
  float* scores = nullptr;        // [rows, kKeyBlock] scratch
  float* out = nullptr;           // [rows, padded_dim] unnormalised
  float* row_max = nullptr;       // [rows]
  float* row_sum = nullptr;       // [rows]
  int32_t rows = 0;
  int32_t key_begin = 0;
  int32_t key_end = 0;
  int32_t head_dim = 0;
  int32_t padded_dim = 0;
  float softcap = 0.0F;
  LinesAhead* ahead = nullptr;  // may be null
};

/// What norm_row does besides normalising.
enum class NormKind : int32_t { kPlain = 0, kAddFirst = 1, kAddAfter = 2 };

/// One row of the RMSNorm family.
struct NormRowArgs {
  const void* x = nullptr;
  void* residual = nullptr;  // read by both adding kinds, written by kAddFirst
  void* out = nullptr;
  const void* weight = nullptr;  // null = 1
  float* scratch = nullptr;      // [n rounded up to 16] floats
  int64_t n = 0;
  DType dtype = DType::kF32;
  DType weight_dtype = DType::kF32;
  NormKind kind = NormKind::kPlain;
  float eps = 0.0F;
  float weight_offset = 0.0F;
  float out_scale = 1.0F;
};

/// One head: optional RMSNorm, then rotary; `out` may be `x`.
struct RopeHeadArgs {
  const void* x = nullptr;
  void* out = nullptr;
  const void* weight = nullptr;  // null = 1
  const float* cosines = nullptr;
  const float* sines = nullptr;
  float* scratch = nullptr;  // [dim rounded up to 16] floats
  int64_t dim = 0;
  int64_t rotary_dim = 0;  // 0 = no rotation
  DType dtype = DType::kF32;
  DType weight_dtype = DType::kF32;
  bool normalize = false;
  bool neox = true;
  float eps = 0.0F;
  float weight_offset = 0.0F;
};

/// out[i] = act(gate[i]) * up[i].
struct ActRowArgs {
  const void* gate = nullptr;
  const void* up = nullptr;
  void* out = nullptr;
  int64_t n = 0;
  DType dtype = DType::kF32;
  Activation act = Activation::kSilu;
};

/// One depth block of one row tile and panel: out (+)= x panel. All 32 columns are written.
struct LinearTileArgs {
  const float* x = nullptr;     // [rows, depth], kLinearRowStride apart
  const void* panel = nullptr;  // [depth, kLinearPanelColumns] float32, or bfloat16 if is_bf16
  float* out = nullptr;         // [rows, kLinearPanelColumns]
  int64_t out_stride = 0;
  int32_t rows = 0;   // 1 to linear_tile_rows
  int32_t depth = 0;  // 1 to kLinearDepthBlock
  bool is_bf16 = false;
  bool accumulate = false;  // start from `out` instead of 0
};

/// Values to codes of one byte: int8 or float8_e4m3fn.
struct CodeArgs {
  const float* values = nullptr;
  int64_t count = 0;
  float factor = 1.0F;  // of each value, before it is rounded
  DType dtype = DType::kI8;
};

/// Rows [first, last) of the depth of one panel of nibbles, which share scales and zeros.
struct NibbleArgs {
  const uint8_t* codes = nullptr;  // [ceil(last / 2), kLinearPanelColumns], low nibble first
  const float* scale = nullptr;    // [kLinearPanelColumns], a NaN without payload
  const float* zero = nullptr;     // [kLinearPanelColumns] integers up to 255
  float* out = nullptr;            // [last - first, kLinearPanelColumns]
  int32_t first = 0;
  int32_t last = 0;
};

/// sums (+)= (row_scale * factor) products, for rows of kLinearPanelColumns.
struct PromoteArgs {
  const float* products = nullptr;
  const float* row_scale = nullptr;
  const float* column_scale = nullptr;  // given with `bias`: sums = sums * scale + bias
  const float* bias = nullptr;
  float* sums = nullptr;
  float factor = 1.0F;
  int32_t rows = 0;
  bool accumulate = false;  // start from `sums` instead of 0
};

/// out[r][c] = sum over k of x[r][k] weight[c][k], in float32.
struct DotRowsArgs {
  const float* const* x = nullptr;  // [rows] rows of `depth` floats
  const void* weight = nullptr;     // [columns, depth], rows weight_stride elements apart
  float* out = nullptr;             // [rows, columns]
  int64_t weight_stride = 0;
  int64_t out_stride = 0;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t depth = 0;
  DType weight_dtype = DType::kF32;
};

/// One chunk of a vocabulary row. Columns are relative to the chunk.
struct StatsChunkArgs {
  const void* logits = nullptr;
  float* key = nullptr;  // [kStatsChunkColumns] scratch: what the greedy choice compares
  float* z = nullptr;    // [kStatsChunkColumns] scratch: transformed logits before temperature
  const int32_t* excluded = nullptr;  // forbidden columns, each below candidate_end
  int32_t num_excluded = 0;
  int32_t candidate_end = 0;  // columns from here on are forbidden
  int32_t n = 0;
  int32_t penalty_column = -1;
  DType dtype = DType::kF32;
  ExclusionMode exclusion = ExclusionMode::kExclude;
  float penalty = 0.0F;
  float softcap = 0.0F;
  float inv_temperature = 0.0F;  // 0 = temperature 1 and no draw
};

/// Partial statistics of one chunk; -1 columns and -inf values where nothing is there.
struct StatsRecord {
  float max = 0.0F;       // of z over the normaliser
  float sum = 0.0F;       // sum exp(z - max)
  float weighted = 0.0F;  // sum exp(z - max) (z - max)
  float candidate_max = 0.0F;
  float candidate_sum = 0.0F;
  float raw_max = 0.0F;  // as max and sum, at temperature 1
  float raw_sum = 0.0F;
  float best_key = 0.0F;
  float best_z = 0.0F;  // before temperature
  float second_key = 0.0F;
  float second_z = 0.0F;
  int32_t best_column = -1;
  int32_t second_column = -1;
  int32_t bad_count = 0;
};

/// One instruction set's kernels.
struct KernelTable {
  const char* name;
  void (*load)(const GatherArgs& args, float* out);
  void (*store)(const float* values, DType dtype, void* out, int64_t n);
  void (*pack_keys)(const float* rows, int64_t count, int64_t padded_dim, float* packed);
  void (*attend)(const AttendArgs& args);
  /// Adds to each element its products in the order of depth, whatever the number of rows.
  void (*linear_tile)(const LinearTileArgs& args);
  int32_t linear_tile_rows;
  /// Each element is the same bits whatever the numbers of rows and columns.
  void (*dot_rows)(const DotRowsArgs& args);
  /// acc[i] += factor * values[i].
  void (*add_scaled)(float* acc, const float* values, float factor, int64_t n);
  void (*scale)(float* values, float factor, int64_t n);
  void (*norm_row)(const NormRowArgs& args);
  void (*rope_head)(const RopeHeadArgs& args);
  void (*act_row)(const ActRowArgs& args);
  /// Statistics of one chunk.
  void (*stats_chunk)(const StatsChunkArgs& args, StatsRecord* record);
  /// Fills key and z of the candidates, -inf elsewhere.
  void (*stats_values)(const StatsChunkArgs& args);
  /// values[i] <- exp(values[i] * factor - shift), with 0 at -inf; in place.
  void (*exp_shifted)(float* values, float factor, float shift, int64_t n);
  /// First index in [from, n) with values[index] >= threshold, or n.
  int64_t (*find_at_least)(const float* values, int64_t from, int64_t n, float threshold);
  /// The largest magnitude, which a NaN is not; 0 of no values.
  float (*largest_of)(const float* values, int64_t n);
  void (*to_codes)(const CodeArgs& args, uint8_t* out);
  /// Values of n codes of float8_e4m3fn.
  void (*widen_e4m3)(const uint8_t* codes, float* out, int64_t n);
  /// bfloat16((nibble - zero) * scale).
  void (*widen_nibbles)(const NibbleArgs& args);
  /// One rounding for each multiply-add.
  void (*promote)(const PromoteArgs& args);
};

/// The best table this machine can run; chosen once, thread-safe.
[[nodiscard]] const KernelTable& kernel_table();
/// The tables this machine can run, best last; `index` below the returned count of num_tables.
[[nodiscard]] int32_t num_kernel_tables();
[[nodiscard]] const KernelTable& kernel_table_at(int32_t index);

/// Tables of the variants; only those compiled for this architecture are defined.
[[nodiscard]] const KernelTable& kernel_table_base();
[[nodiscard]] const KernelTable& kernel_table_v3();
[[nodiscard]] const KernelTable& kernel_table_v4();

}  // namespace diffulex::cpu
