// SPDX-License-Identifier: Apache-2.0
#include "ops/attention/args.cuh"
#include "ops/attention/sm90/maps.h"
#include "ops/shared/cuda/tensor_map.h"

namespace diffulex::cuda::sm90 {
namespace {

constexpr const char* kWhere = "diffulex::block_attention";
constexpr int32_t kChunkDims = 64;

TensorMapShape query_shape(const AttentionArgs& args) {
  TensorMapShape shape;
  shape.rank = 4;
  shape.data = args.q;
  const int64_t sizes[] = {args.head_dim, args.group, args.num_tokens, args.num_kv_heads};
  const int64_t strides[] = {1, args.q_stride[1], args.q_stride[0], args.q_stride[1] * args.group};
  const int32_t boxes[] = {kChunkDims, args.group, args.tokens_per_tile, 1};
  for (int dim = 0; dim < shape.rank; ++dim) {
    shape.size[dim] = sizes[dim];
    shape.stride[dim] = strides[dim];
    shape.box[dim] = boxes[dim];
  }
  return shape;
}

TensorMapShape in_flight_shape(const AttentionArgs& args, const void* data,
                               const int64_t (&row_stride)[3], int32_t rows) {
  TensorMapShape shape;
  shape.rank = 3;
  shape.data = data;
  const int64_t sizes[] = {args.head_dim, args.num_kv_heads, args.num_tokens};
  const int64_t strides[] = {1, row_stride[1], row_stride[0]};
  const int32_t boxes[] = {kChunkDims, 1, rows};
  for (int dim = 0; dim < shape.rank; ++dim) {
    shape.size[dim] = sizes[dim];
    shape.stride[dim] = strides[dim];
    shape.box[dim] = boxes[dim];
  }
  return shape;
}

TensorMapShape cache_shape(const AttentionArgs& args, const CacheView& cache, const CacheBox& box) {
  TensorMapShape shape;
  shape.rank = 4;
  // An empty cache: one page of any memory, which no coordinate reaches (missing_page()).
  const bool is_empty = cache.num_pages == 0;
  shape.data = is_empty ? args.k : cache.data;
  const int64_t ratio = 2 / dtype_bytes(box.dtype);  // cached elements in the room of one of K
  const int64_t sizes[] = {args.head_dim, args.num_kv_heads, is_empty ? 1 : cache.page_size,
                           is_empty ? 1 : cache.num_pages};
  const int64_t strides[] = {1, is_empty ? args.k_stride[1] * ratio : cache.head_stride,
                             is_empty ? args.k_stride[0] * ratio : cache.token_stride,
                             is_empty ? args.k_stride[0] * ratio : cache.page_stride};
  const int32_t boxes[] = {box.dims, 1, min_i32(cache.page_size, box.keys), 1};
  for (int dim = 0; dim < shape.rank; ++dim) {
    shape.size[dim] = sizes[dim];
    shape.stride[dim] = strides[dim];
    shape.box[dim] = boxes[dim];
  }
  return shape;
}

}  // namespace

Status make_attention_maps(const AttentionArgs& args, DType dtype, int tile_keys,
                           const CacheBox& cache_box, AttentionMaps* maps) {
  DIFFULEX_RETURN_IF_ERROR(encode_tensor_map(kWhere, query_shape(args), dtype, &maps->q));
  const struct {
    CUtensorMap* map;
    const void* data;
    const int64_t (&stride)[3];
    int32_t rows;
  } in_flight[] = {{&maps->k, args.k, args.k_stride, kInFlightBox},
                   {&maps->v, args.v, args.v_stride, kInFlightBox},
                   {&maps->k_tile, args.k, args.k_stride, tile_keys},
                   {&maps->v_tile, args.v, args.v_stride, tile_keys}};
  for (const auto& entry : in_flight) {
    DIFFULEX_RETURN_IF_ERROR(encode_tensor_map(
        kWhere, in_flight_shape(args, entry.data, entry.stride, entry.rows), dtype, entry.map));
  }
  DIFFULEX_RETURN_IF_ERROR(encode_tensor_map(kWhere, cache_shape(args, args.k_cache, cache_box),
                                             cache_box.dtype, &maps->k_cache));
  return encode_tensor_map(kWhere, cache_shape(args, args.v_cache, cache_box), cache_box.dtype,
                           &maps->v_cache);
}

}  // namespace diffulex::cuda::sm90
