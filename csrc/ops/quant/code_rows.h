// SPDX-License-Identifier: Apache-2.0
#pragma once

// Rows that an op writes as codes beside their values: what `quantize_rows` makes of the result.

#include "diffulex/core/status.h"
#include "diffulex/ops/quantize.h"

namespace diffulex {

/// Checks the codes [T, K] of `rows` [T, K], by name `rows_name`, and the scales beside them, by
/// name `scale_name`, of groups of 128 or of a row each; nothing where both are absent.
[[nodiscard]] Status check_code_rows(const char* op, const char* rows_name, const TensorRef& rows,
                                     const TensorRef& codes, const TensorRef& scale,
                                     const char* scale_name = "scale");

/// The call of `quantize_rows` that makes checked codes of `rows`.
[[nodiscard]] inline QuantizeRowsParams code_rows_of(const TensorRef& rows, const TensorRef& codes,
                                                     const TensorRef& scale) {
  const int64_t group = scale.size[0] == 1 ? rows.last() : kQuantGroup;
  return {rows, codes, scale, static_cast<int32_t>(group)};
}

}  // namespace diffulex
