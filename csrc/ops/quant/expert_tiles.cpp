// SPDX-License-Identifier: Apache-2.0
#include "ops/quant/expert_tiles.h"

#include "diffulex/ops/quantize.h"
#include "ops/shared/tensor_checks.h"

namespace diffulex {
namespace {

Status check_tiles(const char* op, const char* name, const TensorRef& tiles) {
  const ArgumentCheck check(op, name, tiles);
  DIFFULEX_RETURN_IF_ERROR(check.dense(
      {DType::kU8}, {kAnyExtent, kAnyExtent, kAnyExtent, kNibbleTileLanes, kNibbleLaneBytes}));
  return tiles.size[1] % 16 == 0 && tiles.size[2] % 2 == 0
             ? Status{}
             : check.error(StatusCode::kInvalidArgument,
                           "tiles of multiples of 128 rows and columns", shape_text(tiles));
}

/// Scales [L, groups, N] beside tiles, whose other extents are checked with those of rows.
Status check_scales(const char* op, const char* name, const TensorRef& scale,
                    const TensorRef& tiles) {
  const ArgumentCheck check(op, name, scale);
  DIFFULEX_RETURN_IF_ERROR(check.dtype({DType::kBF16}));
  const int64_t depth = tiles.size[2] * kNibbleTileDepth;
  const int64_t groups = scale.size[1];
  const bool fits =
      scale.rank != 3 || groups * 32 == depth || groups * 64 == depth || groups * 128 == depth;
  return fits ? Status{}
              : check.error(StatusCode::kInvalidArgument,
                            "groups of 32, 64 or 128 columns with tiles", shape_text(scale));
}

TensorRef rows_of(const TensorRef& tiles) {
  TensorRef rows = tiles;
  rows.rank = 3;
  rows.size[1] = tiles.size[1] * kNibbleTileRows;
  rows.size[2] = tiles.size[2] * kNibbleTileDepth / 2;
  rows.stride[1] = rows.size[2];
  rows.stride[2] = 1;
  return rows;
}

}  // namespace

Status check_expert_tiles(const char* op, const FusedMoeParams& params) {
  if (!has_expert_tiles(params)) {
    return {};
  }
  DIFFULEX_RETURN_IF_ERROR(ArgumentCheck(op, "x", params.x).dtype({DType::kBF16}));
  DIFFULEX_RETURN_IF_ERROR(check_tiles(op, "w13", params.w13));
  DIFFULEX_RETURN_IF_ERROR(check_tiles(op, "w2", params.w2));
  DIFFULEX_RETURN_IF_ERROR(check_scales(op, "w13_scale", params.w13_scale, params.w13));
  return check_scales(op, "w2_scale", params.w2_scale, params.w2);
}

FusedMoeParams in_shape_of_rows(const FusedMoeParams& params) {
  FusedMoeParams rows = params;
  if (has_expert_tiles(params)) {
    rows.w13 = rows_of(params.w13);
    rows.w2 = rows_of(params.w2);
  }
  return rows;
}

}  // namespace diffulex
