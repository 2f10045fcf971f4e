// SPDX-License-Identifier: Apache-2.0
#pragma once

// Reading the blocks of the acceptance ops, whose parameters name their common tensors alike.

#include <cstdint>
#include <string>

#include "diffulex/core/status.h"
#include "diffulex/ops/sampling.h"
#include "ops/shared/data_checks_cpu.h"
#include "ops/shared/parallel.h"

namespace diffulex::cpu {

/// Blocks a thread should take at least; a block is a few hundred nanoseconds.
inline constexpr int64_t kAcceptBlockGrain = 64;

template <typename T>
[[nodiscard]] T* row_of(const TensorRef& tensor, int64_t row) {
  return tensor.as<T>() + row * tensor.stride[0];
}

template <typename T>
[[nodiscard]] T value_at(const TensorRef& tensor, int64_t index) {
  return tensor.as<const T>()[index * tensor.stride[0]];
}

template <typename Params>
[[nodiscard]] int64_t valid_end(const Params& params, int64_t block) {
  return params.valid_len.present() ? index_at(params.valid_len, block) : params.tokens.size[1];
}

/// Ranking confidence of a proposal whose probability is `p`.
[[nodiscard]] inline float ranking_confidence(ConfidenceKind kind, const float* stats, float p) {
  switch (kind) {
    case ConfidenceKind::kMargin:
      return stats[kStatsMaxProb] - stats[kStatsSecondProb];
    case ConfidenceKind::kNegEntropy:
      return -stats[kStatsEntropy];
    case ConfidenceKind::kMaxProb:
      break;
  }
  return p;
}

/// `tensor[block]` lies in [low, high].
[[nodiscard]] inline Status check_block_value(const char* op, const char* name,
                                              const TensorRef& tensor, int64_t block, int64_t low,
                                              int64_t high) {
  const int64_t value = index_at(tensor, block);
  if (value >= low && value <= high) {
    return {};
  }
  const std::string expected = high == INT32_MAX
                                   ? "a value >= " + std::to_string(low)
                                   : std::to_string(low) + " to " + std::to_string(high);
  return data_error(op, name, block, expected, value);
}

/// The row of one position is -1 or exists.
template <typename Params>
[[nodiscard]] Status check_block_row(const char* op, const Params& params, int64_t block,
                                     int64_t position) {
  const int32_t row = row_of<const int32_t>(params.row_index, block)[position];
  if (row >= -1 && row < params.ids.size[0]) {
    return {};
  }
  return make_error(StatusCode::kOutOfRange, "diffulex::", op, ": row_index[", block, "][",
                    position, "]: expected -1 or a row below ", params.ids.size[0], ", got ", row);
}

/// valid_len, editable_start and the rows of all editable positions.
template <typename Params>
[[nodiscard]] Status check_editable_block(const char* op, const Params& params, int64_t block) {
  const int64_t block_size = params.tokens.size[1];
  DIFFULEX_RETURN_IF_ERROR(
      check_block_value(op, "editable_start", params.editable_start, block, 0, block_size));
  if (params.valid_len.present()) {
    DIFFULEX_RETURN_IF_ERROR(
        check_block_value(op, "valid_len", params.valid_len, block, 0, block_size));
  }
  const int64_t end = valid_end(params, block);
  for (int64_t position = index_at(params.editable_start, block); position < end; ++position) {
    DIFFULEX_RETURN_IF_ERROR(check_block_row(op, params, block, position));
  }
  return {};
}

}  // namespace diffulex::cpu
