// SPDX-License-Identifier: Apache-2.0

// soft_probabilities, and soft_embedding: the vocabulary is taken in chunks of columns. For each
// chunk the probabilities of a block of rows are written to scratch that stays in the caches, then
// every thread multiplies them with its columns of the table, gathered 32 at a time to the panels
// of linear_tile. The sums run over ascending vocabulary ids, whatever the number of rows and of
// threads.

#include <algorithm>
#include <cstring>

#include "ops/cpu_ops.h"
#include "ops/sampling/token_stats_config.h"
#include "ops/shared/cpu_isa/kernel_table.h"
#include "ops/shared/half.h"
#include "ops/shared/parallel.h"

namespace diffulex::cpu {
namespace {

struct ProbabilityTag;
struct SumTag;
struct ValueTag;
struct TablePanelTag;

// Bounds the scratch: 192 rows x 2048 columns of probabilities are 1.6 MiB.
constexpr int64_t kMaxRowBlock = 192;
constexpr int64_t kDepthBlocks = kStatsChunkColumns / kLinearDepthBlock;

void round_to(DType dtype, float* values, int64_t n) {
  if (dtype == DType::kBF16) {
    std::transform(values, values + n, values,
                   [](float value) { return bf16_to_float(float_to_bf16(value)); });
  } else if (dtype == DType::kF16) {
    std::transform(values, values + n, values,
                   [](float value) { return f16_to_float(float_to_f16(value)); });
  }
}

bool is_valid(const SoftmaxRows& rows, int64_t row) {
  const TensorRef& valid = rows.row_valid;
  return !valid.present() || valid.as<const uint8_t>()[row * valid.stride[0]] != 0;
}

/// Writes the probabilities of `columns` ids from column `start` on, which a type holds, to
/// `values`; `key` is scratch.
void probabilities_of(const SoftmaxRows& rows, int64_t row, int64_t start, int64_t columns,
                      DType dtype, float* key, float* values) {
  if (!is_valid(rows, row)) {
    std::fill_n(values, columns, 0.0F);
    return;
  }
  StatsChunkArgs args;
  args.logits = element_at(rows.logits, row * rows.logits.stride[0] + start);
  args.key = key;
  args.z = values;
  args.n = static_cast<int32_t>(columns);
  args.candidate_end = args.n;
  if (rows.vocab_limit >= 0) {
    args.candidate_end = static_cast<int32_t>(
        std::clamp<int64_t>(rows.vocab_limit - rows.vocab_start - start, 0, columns));
  }
  args.dtype = rows.logits.dtype;
  args.softcap = rows.softcap;
  kernel_table().stats_values(args);
  float factor = 1.0F;
  if (rows.inv_temperature.present()) {
    factor = rows.inv_temperature.as<const float>()[row * rows.inv_temperature.stride[0]];
    factor = factor == 0.0F ? 1.0F : factor;
  }
  const float lse = rows.lse.as<const float>()[row * rows.lse.stride[0]];
  kernel_table().exp_shifted(values, factor, lse, columns);
  round_to(dtype, values, columns);
}

/// Writes values that the dtype of `out` holds.
void store(const float* values, int64_t count, const TensorRef& out, int64_t offset) {
  for (int64_t i = 0; i < count; ++i) {
    if (out.dtype == DType::kF32) {
      out.as<float>()[offset + i] = values[i];
    } else {
      out.as<uint16_t>()[offset + i] =
          out.dtype == DType::kBF16 ? float_to_bf16(values[i]) : float_to_f16(values[i]);
    }
  }
}

/// One block of rows of the result.
class SoftRows final {
 public:
  SoftRows(const SoftEmbeddingParams& params, int64_t first_row, int64_t rows)
      : params_(params),
        first_row_(first_row),
        rows_(rows),
        num_panels_((params.out.size[1] + kLinearPanelColumns - 1) / kLinearPanelColumns),
        probabilities_(thread_floats<ProbabilityTag>(kDepthBlocks * rows * kLinearRowStride)),
        sums_(thread_floats<SumTag>(num_panels_ * rows * kLinearPanelColumns)),
        kernels_(kernel_table()) {
    const int64_t tile = kernels_.linear_tile_rows;
    const int64_t num_tiles = (rows + tile - 1) / tile;
    tile_rows_ = (rows + num_tiles - 1) / num_tiles;
  }

  void run(const ExecContext& context) {
    const int64_t vocab = params_.logits.size[1];
    for (int64_t start = 0; start < vocab; start += kStatsChunkColumns) {
      start_ = start;
      columns_ = std::min(kStatsChunkColumns, vocab - start);
      parallel_ranges(context, rows_, row_grain(columns_), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          fill_probabilities(row);
        }
      });
      parallel_ranges(context, num_panels_, 1, [&](int64_t begin, int64_t end) {
        for (int64_t panel = begin; panel < end; ++panel) {
          add_panel(panel);
        }
      });
    }
    parallel_ranges(context, rows_, row_grain(params_.out.size[1]),
                    [&](int64_t begin, int64_t end) {
                      for (int64_t row = begin; row < end; ++row) {
                        write_row(row);
                      }
                    });
  }

 private:
  [[nodiscard]] float* probabilities_at(int64_t block, int64_t row) const {
    return probabilities_ + (block * rows_ + row) * kLinearRowStride;
  }
  [[nodiscard]] float* sums_at(int64_t panel, int64_t row) const {
    return sums_ + (panel * rows_ + row) * kLinearPanelColumns;
  }

  void fill_probabilities(int64_t row) const {
    float* key = thread_floats<ValueTag>(2 * kStatsChunkColumns);
    float* values = key + kStatsChunkColumns;
    probabilities_of(params_, first_row_ + row, start_, columns_, params_.embedding.dtype, key,
                     values);
    for (int64_t block = 0; block * kLinearDepthBlock < columns_; ++block) {
      const int64_t first = block * kLinearDepthBlock;
      std::copy_n(values + first, std::min<int64_t>(kLinearDepthBlock, columns_ - first),
                  probabilities_at(block, row));
    }
  }

  /// sums += probabilities of the chunk times 32 columns of the table.
  void add_panel(int64_t panel) const {
    float* gathered =
        thread_floats<TablePanelTag>(int64_t{kLinearDepthBlock} * kLinearPanelColumns);
    for (int64_t block = 0; block * kLinearDepthBlock < columns_; ++block) {
      const int64_t first = block * kLinearDepthBlock;
      LinearTileArgs args;
      args.depth = static_cast<int32_t>(std::min<int64_t>(kLinearDepthBlock, columns_ - first));
      gather_panel(panel, start_ + first, args.depth, gathered);
      args.panel = gathered;
      args.out_stride = kLinearPanelColumns;
      args.accumulate = start_ + first > 0;
      for (int64_t row = 0; row < rows_; row += tile_rows_) {
        args.rows = static_cast<int32_t>(std::min(tile_rows_, rows_ - row));
        args.x = probabilities_at(block, row);
        args.out = sums_at(panel, row);
        kernels_.linear_tile(args);
      }
    }
  }

  /// Columns of the panel of table rows [first, first + depth), missing columns 0.
  void gather_panel(int64_t panel, int64_t first, int64_t depth, float* gathered) const {
    const TensorRef& table = params_.embedding;
    const int64_t column = panel * kLinearPanelColumns;
    const int64_t width = std::min(kLinearPanelColumns, table.size[1] - column);
    if (width == kLinearPanelColumns) {
      const char* source = element_at(table, first * table.stride[0] + column);
      kernels_.load(GatherArgs{source, table.dtype, depth * kLinearPanelColumns,
                               kLinearPanelColumns, table.stride[0]},
                    gathered);
      return;
    }
    std::fill_n(gathered, depth * kLinearPanelColumns, 0.0F);
    for (int64_t row = 0; row < depth; ++row) {
      const char* source = element_at(table, (first + row) * table.stride[0] + column);
      kernels_.load(GatherArgs{source, table.dtype, width, width, width},
                    gathered + row * kLinearPanelColumns);
    }
  }

  void write_row(int64_t row) const {
    const int64_t hidden = params_.out.size[1];
    float* out = params_.out.as<float>() + (first_row_ + row) * params_.out.stride[0];
    if (!is_valid(params_, first_row_ + row)) {
      std::fill_n(out, hidden, 0.0F);
      return;
    }
    for (int64_t panel = 0; panel < num_panels_; ++panel) {
      const int64_t column = panel * kLinearPanelColumns;
      const int64_t width = std::min(kLinearPanelColumns, hidden - column);
      const float* sums = sums_at(panel, row);
      for (int64_t i = 0; i < width; ++i) {
        out[column + i] = params_.normalizer * sums[i];
      }
    }
  }

  const SoftEmbeddingParams& params_;
  int64_t first_row_;
  int64_t rows_;
  int64_t num_panels_;
  float* probabilities_;
  float* sums_;
  const KernelTable& kernels_;
  int64_t tile_rows_ = 1;
  int64_t start_ = 0;    // first column of the chunk
  int64_t columns_ = 0;  // columns of the chunk
};

}  // namespace

Status soft_probabilities(const SoftProbabilitiesParams& params, const ExecContext& context) {
  const int64_t vocab = params.logits.size[1];
  parallel_ranges(context, params.out.size[0], row_grain(vocab), [&](int64_t begin, int64_t end) {
    float* key = thread_floats<ValueTag>(2 * kStatsChunkColumns);
    float* values = key + kStatsChunkColumns;
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t start = 0; start < vocab; start += kStatsChunkColumns) {
        const int64_t columns = std::min(kStatsChunkColumns, vocab - start);
        probabilities_of(params, row, start, columns, params.out.dtype, key, values);
        store(values, columns, params.out, row * params.out.stride[0] + start);
      }
    }
  });
  return {};
}

Status soft_embedding(const SoftEmbeddingParams& params, const ExecContext& context) {
  const int64_t rows = params.out.size[0];
  const int64_t num_blocks = (rows + kMaxRowBlock - 1) / kMaxRowBlock;
  const int64_t block_rows = (rows + num_blocks - 1) / num_blocks;
  for (int64_t row = 0; row < rows; row += block_rows) {
    SoftRows(params, row, std::min(block_rows, rows - row)).run(context);
  }
  return {};
}

}  // namespace diffulex::cpu
