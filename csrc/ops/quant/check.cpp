// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "ops/checks.h"
#include "ops/quant/code_rows.h"
#include "ops/shared/tensor_checks.h"

namespace diffulex {
namespace {

int64_t ceil_div(int64_t value, int64_t divisor) {
  return (value + divisor - 1) / divisor;
}

/// Scales of rows: [groups, at least num_rows].
Status check_row_scales(const char* op, const char* name, const TensorRef& scale, int64_t groups,
                        int64_t num_rows) {
  const ArgumentCheck check(op, name, scale);
  DIFFULEX_RETURN_IF_ERROR(check.matches({DType::kF32}, {groups, kAnyExtent}));
  if (scale.size[1] < num_rows) {
    return check.error(StatusCode::kInvalidArgument,
                       "at least " + std::to_string(num_rows) + " columns", shape_text(scale));
  }
  return {};
}

/// The result [T, N] of a product and its optional bias.
Status check_result(const char* op, const TensorRef& x, const TensorRef& bias, const TensorRef& out,
                    int64_t columns) {
  const ArgumentCheck out_check(op, "out", out);
  DIFFULEX_RETURN_IF_ERROR(
      out_check.matches({DType::kF32, DType::kF16, DType::kBF16}, {x.size[0], columns}));
  if (x.size[0] > 0 && out.data == x.data) {
    return out_check.error(StatusCode::kInvalidArgument, "memory of its own", "the memory of x");
  }
  if (bias.present()) {
    DIFFULEX_RETURN_IF_ERROR(ArgumentCheck(op, "bias", bias).dense({DType::kF32}, {columns}));
  }
  return {};
}

Status check_depth(const char* op, const TensorRef& x) {
  if (x.size[1] < 1) {
    return ArgumentCheck(op, "x", x)
        .error(StatusCode::kInvalidArgument, "a last dimension >= 1", shape_text(x));
  }
  return {};
}

/// A weight [columns, bytes] in panels.
Status check_panels(const ArgumentCheck& weight, int64_t columns, int64_t bytes, int64_t step) {
  return weight.dense({DType::kU8}, {ceil_div(columns, kQuantPanelColumns), ceil_div(bytes, step),
                                     kQuantPanelColumns, step});
}

/// Scales of nibbles [groups, columns], and their zero points.
Status check_nibble_scales(const char* op, const TensorRef& weight, const TensorRef& scales,
                           const TensorRef& zeros, int64_t groups, int64_t columns) {
  DIFFULEX_RETURN_IF_ERROR(
      ArgumentCheck(op, "scales", scales).matches({DType::kBF16, DType::kF32}, {groups, columns}));
  const ArgumentCheck check(op, "zeros", zeros);
  const bool is_tiled = is_nibble_tiles(weight);
  if (is_tiled && zeros.present() != (scales.dtype == DType::kF32)) {
    return check.error(StatusCode::kInvalidArgument,
                       "zero points of tiles beside scales of float32 and only there",
                       zeros.present() ? "a tensor" : "none");
  }
  return zeros.present() ? check.matches({is_tiled ? DType::kBF16 : DType::kU8}, {groups, columns})
                         : Status{};
}

/// A weight [columns, depth] of 4 bits in tiles.
Status check_tiles(const char* op, const TensorRef& tiles, int64_t columns, int64_t depth,
                   int32_t group) {
  const ArgumentCheck weight(op, "weight", tiles);
  if (columns % 16 != 0 || depth % 128 != 0) {
    return weight.error(StatusCode::kInvalidArgument,
                        "tiles of a multiple of 16 rows and 128 columns",
                        std::to_string(columns) + " x " + std::to_string(depth));
  }
  if (group != 32 && group != 64 && group != 128) {
    return scalar_error(op, "group", "32, 64 or 128 with tiles", group);
  }
  return weight.dense({DType::kU8}, {columns / kNibbleTileRows, depth / kNibbleTileDepth,
                                     kNibbleTileLanes, kNibbleLaneBytes});
}

Status check_group(const char* op, int32_t group, int64_t depth) {
  if (group < 1 || depth % group != 0) {
    return scalar_error(op, "group", ("a divisor of " + std::to_string(depth)).c_str(), group);
  }
  return {};
}

}  // namespace

Status check_code_rows(const char* op, const char* rows_name, const TensorRef& rows,
                       const TensorRef& codes, const TensorRef& scale, const char* scale_name) {
  if (!codes.present() && !scale.present()) {
    return {};
  }
  if (rows.rank != 2) {
    return ArgumentCheck(op, rows_name, rows)
        .error(StatusCode::kInvalidArgument, "2 dimensions with codes", shape_text(rows));
  }
  const int64_t num_rows = rows.size[0];
  const int64_t depth = rows.size[1];
  DIFFULEX_RETURN_IF_ERROR(
      ArgumentCheck(op, "codes", codes).matches({DType::kF8E4M3, DType::kI8}, {num_rows, depth}));
  const bool is_whole = scale.rank == 2 && scale.size[0] == 1;
  return check_row_scales(op, scale_name, scale, is_whole ? 1 : ceil_div(depth, kQuantGroup),
                          num_rows);
}

Status check_quantize_rows(const QuantizeRowsParams& params) {
  constexpr const char* kOp = "quantize_rows";
  DIFFULEX_RETURN_IF_ERROR(
      ArgumentCheck(kOp, "x", params.x)
          .matches({DType::kF32, DType::kF16, DType::kBF16}, {kAnyExtent, kAnyExtent}));
  DIFFULEX_RETURN_IF_ERROR(check_depth(kOp, params.x));
  if (params.group < 1) {
    return scalar_error(kOp, "group", "a value >= 1", params.group);
  }
  DIFFULEX_RETURN_IF_ERROR(
      ArgumentCheck(kOp, "out", params.out)
          .matches({DType::kF8E4M3, DType::kI8}, {params.x.size[0], params.x.size[1]}));
  return check_row_scales(kOp, "scale", params.scale, ceil_div(params.x.size[1], params.group),
                          params.x.size[0]);
}

Status check_quantize_weight(const QuantizeWeightParams& params) {
  constexpr const char* kOp = "quantize_weight";
  DIFFULEX_RETURN_IF_ERROR(
      ArgumentCheck(kOp, "w", params.w)
          .matches({DType::kF32, DType::kF16, DType::kBF16}, {kAnyExtent, kAnyExtent}));
  const int64_t rows = params.w.size[0];
  const int64_t depth = params.w.size[1];
  if (depth < 1) {
    return ArgumentCheck(kOp, "w", params.w)
        .error(StatusCode::kInvalidArgument, "a last dimension >= 1", shape_text(params.w));
  }
  const ArgumentCheck out_check(kOp, "out", params.out);
  const ArgumentCheck scale_check(kOp, "scale", params.scale);
  switch (params.scheme) {
    case WeightScheme::kFp8:
      DIFFULEX_RETURN_IF_ERROR(out_check.matches({DType::kF8E4M3}, {rows, depth}));
      return scale_check.matches({DType::kF32}, {rows});
    case WeightScheme::kFp8Block:
      DIFFULEX_RETURN_IF_ERROR(out_check.matches({DType::kF8E4M3}, {rows, depth}));
      return scale_check.matches({DType::kF32},
                                 {ceil_div(rows, kQuantBlock), ceil_div(depth, kQuantBlock)});
    case WeightScheme::kInt8:
      DIFFULEX_RETURN_IF_ERROR(out_check.matches({DType::kI8}, {rows, depth}));
      return scale_check.matches({DType::kF32}, {rows});
    case WeightScheme::kInt4: {
      const auto group = params.group == 0 ? static_cast<int32_t>(depth) : params.group;
      DIFFULEX_RETURN_IF_ERROR(check_group(kOp, group, depth));
      DIFFULEX_RETURN_IF_ERROR(out_check.matches({DType::kU8}, {rows, ceil_div(depth, 2)}));
      return scale_check.matches({DType::kBF16}, {depth / group, rows});
    }
  }
  return scalar_error(kOp, "scheme", "0 (fp8), 1 (fp8_block), 2 (int8) or 3 (int4)",
                      static_cast<int32_t>(params.scheme));
}

Status check_linear_scaled(const LinearScaledParams& params) {
  constexpr const char* kOp = "linear_scaled";
  DIFFULEX_RETURN_IF_ERROR(ArgumentCheck(kOp, "x", params.x)
                               .matches({DType::kF8E4M3, DType::kI8}, {kAnyExtent, kAnyExtent}));
  DIFFULEX_RETURN_IF_ERROR(check_depth(kOp, params.x));
  const int64_t depth = params.x.size[1];
  const int64_t num_blocks = ceil_div(depth, kQuantGroup);
  DIFFULEX_RETURN_IF_ERROR(
      check_row_scales(kOp, "x_scale", params.x_scale, num_blocks, params.x.size[0]));
  const ArgumentCheck weight_check(kOp, "weight", params.weight);
  const int64_t gated = params.act.has_value() ? 2 : 1;
  int64_t columns = params.out.rank == 2 ? gated * params.out.size[1] : 0;
  if (params.weight.rank == 4) {
    const int64_t step = params.x.dtype == DType::kI8 ? kInt8PanelDepth : 1;
    DIFFULEX_RETURN_IF_ERROR(check_panels(weight_check, columns, depth, step));
  } else {
    DIFFULEX_RETURN_IF_ERROR(weight_check.matches({params.x.dtype}, {kAnyExtent, depth}));
    columns = params.weight.size[0];
  }
  const ArgumentCheck scale_check(kOp, "weight_scale", params.weight_scale);
  if (params.x.dtype == DType::kF8E4M3 && params.weight_scale.rank == 2) {
    DIFFULEX_RETURN_IF_ERROR(
        scale_check.matches({DType::kF32}, {ceil_div(columns, kQuantBlock), num_blocks}));
  } else {
    DIFFULEX_RETURN_IF_ERROR(scale_check.dense({DType::kF32}, {columns}));
  }
  if (!params.act.has_value()) {
    return check_result(kOp, params.x, params.bias, params.out, columns);
  }
  DIFFULEX_RETURN_IF_ERROR(check_act(kOp, *params.act));
  if (columns % 2 != 0) {
    return weight_check.error(StatusCode::kInvalidArgument, "rows of gate and as many of up",
                              shape_text(params.weight));
  }
  if (params.weight_scale.rank == 2 && columns % (2 * kQuantBlock) != 0) {
    return weight_check.error(StatusCode::kInvalidArgument,
                              "rows of gate and of up in whole blocks of 128",
                              shape_text(params.weight));
  }
  DIFFULEX_RETURN_IF_ERROR(
      ArgumentCheck(kOp, "bias", params.bias).absent("a gated product has no bias"));
  return check_result(kOp, params.x, params.bias, params.out, columns / 2);
}

Status check_linear_w4a16(const LinearW4a16Params& params) {
  constexpr const char* kOp = "linear_w4a16";
  DIFFULEX_RETURN_IF_ERROR(
      ArgumentCheck(kOp, "x", params.x)
          .matches({DType::kF32, DType::kF16, DType::kBF16}, {kAnyExtent, kAnyExtent}));
  DIFFULEX_RETURN_IF_ERROR(check_depth(kOp, params.x));
  const int64_t depth = params.x.size[1];
  DIFFULEX_RETURN_IF_ERROR(check_group(kOp, params.group, depth));
  const ArgumentCheck weight_check(kOp, "weight", params.weight);
  const int64_t gated = params.act.has_value() ? 2 : 1;
  int64_t columns = params.out.rank == 2 ? gated * params.out.size[1] : 0;
  if (is_nibble_tiles(params.weight)) {
    DIFFULEX_RETURN_IF_ERROR(check_tiles(kOp, params.weight, columns, depth, params.group));
    DIFFULEX_RETURN_IF_ERROR(
        ArgumentCheck(kOp, "x", params.x).matches({DType::kBF16}, {kAnyExtent, depth}));
    DIFFULEX_RETURN_IF_ERROR(
        ArgumentCheck(kOp, "out", params.out).matches({DType::kBF16}, {kAnyExtent, kAnyExtent}));
  } else if (params.weight.rank == 4) {
    DIFFULEX_RETURN_IF_ERROR(check_panels(weight_check, columns, ceil_div(depth, 2), 1));
  } else {
    DIFFULEX_RETURN_IF_ERROR(weight_check.matches({DType::kU8}, {kAnyExtent, ceil_div(depth, 2)}));
    columns = params.weight.size[0];
  }
  DIFFULEX_RETURN_IF_ERROR(check_nibble_scales(kOp, params.weight, params.scales, params.zeros,
                                               depth / params.group, columns));
  if (!params.act.has_value()) {
    return check_result(kOp, params.x, params.bias, params.out, columns);
  }
  DIFFULEX_RETURN_IF_ERROR(check_act(kOp, *params.act));
  if (columns % 2 != 0) {
    return weight_check.error(StatusCode::kInvalidArgument, "rows of gate and as many of up",
                              shape_text(params.weight));
  }
  DIFFULEX_RETURN_IF_ERROR(
      ArgumentCheck(kOp, "bias", params.bias).absent("a gated product has no bias"));
  return check_result(kOp, params.x, params.bias, params.out, columns / 2);
}

Status check_dequantize_nibbles(const DequantizeNibblesParams& params) {
  constexpr const char* kOp = "dequantize_nibbles";
  DIFFULEX_RETURN_IF_ERROR(
      ArgumentCheck(kOp, "out", params.out).matches({DType::kBF16}, {kAnyExtent, kAnyExtent}));
  const int64_t columns = params.out.size[0];
  const int64_t depth = params.out.size[1];
  DIFFULEX_RETURN_IF_ERROR(check_group(kOp, params.group, depth));
  DIFFULEX_RETURN_IF_ERROR(is_nibble_tiles(params.weight)
                               ? check_tiles(kOp, params.weight, columns, depth, params.group)
                               : ArgumentCheck(kOp, "weight", params.weight)
                                     .matches({DType::kU8}, {columns, ceil_div(depth, 2)}));
  return check_nibble_scales(kOp, params.weight, params.scales, params.zeros, depth / params.group,
                             columns);
}

}  // namespace diffulex
