// SPDX-License-Identifier: Apache-2.0
#pragma once

// Reading the blocks of the acceptance ops, whose parameters name their common tensors alike.

#include <cstdint>
#include <string>

#include "diffulex/core/acceptance.h"
#include "diffulex/core/status.h"
#include "ops/shared/data_checks_cpu.h"
#include "ops/shared/parallel.h"

namespace diffulex::cpu {

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

/// The common tensors of one block, editable from its first position.
template <typename Params>
[[nodiscard]] AcceptBlock block_of(const Params& params, int64_t block) {
  AcceptBlock view;
  view.tokens = row_of<const int64_t>(params.tokens, block);
  view.row_index = row_of<const int32_t>(params.row_index, block);
  view.ids = params.ids.template as<const int64_t>();
  view.ids_stride = params.ids.stride[0];
  view.stats = params.stats.template as<const float>();
  view.stats_stride = params.stats.stride[0];
  view.block_size = static_cast<int32_t>(params.tokens.size[1]);
  view.editable_end = static_cast<int32_t>(valid_end(params, block));
  view.write_ids = row_of<int64_t>(params.write_ids, block);
  view.confidence = row_of<float>(params.confidence, block);
  return view;
}

/// As above, editable from editable_start.
template <typename Params>
[[nodiscard]] AcceptBlock editable_block(const Params& params, int64_t block) {
  AcceptBlock view = block_of(params, block);
  view.editable_start = static_cast<int32_t>(index_at(params.editable_start, block));
  return view;
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

/// valid_len and editable_start.
template <typename Params>
[[nodiscard]] Status check_editable_range(const char* op, const Params& params, int64_t block) {
  const int64_t block_size = params.tokens.size[1];
  DIFFULEX_RETURN_IF_ERROR(
      check_block_value(op, "editable_start", params.editable_start, block, 0, block_size));
  if (!params.valid_len.present()) {
    return {};
  }
  return check_block_value(op, "valid_len", params.valid_len, block, 0, block_size);
}

/// As above, and the rows of all editable positions.
template <typename Params>
[[nodiscard]] Status check_editable_block(const char* op, const Params& params, int64_t block) {
  DIFFULEX_RETURN_IF_ERROR(check_editable_range(op, params, block));
  const int64_t end = valid_end(params, block);
  for (int64_t position = index_at(params.editable_start, block); position < end; ++position) {
    DIFFULEX_RETURN_IF_ERROR(check_block_row(op, params, block, position));
  }
  return {};
}

}  // namespace diffulex::cpu
