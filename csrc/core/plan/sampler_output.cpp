// SPDX-License-Identifier: Apache-2.0
#include "diffulex/core/sampler_output.h"

#include <algorithm>
#include <utility>

#include "diffulex/core/status.h"

namespace diffulex {
namespace {

[[nodiscard]] ArenaField vector_field(const char* name, ArenaDtype dtype, int64_t rows) {
  return ArenaField{name, dtype, 0, rows, 1, false, 0};
}

[[nodiscard]] ArenaField matrix_field(const char* name, ArenaDtype dtype, int64_t rows,
                                      int64_t cols) {
  return ArenaField{name, dtype, 0, rows, cols, true, 0};
}

}  // namespace

std::vector<ArenaField> SamplerOutput::make_fields(const EngineOptions& options) {
  const int64_t blocks = int64_t{options.max_num_reqs} * options.buffer_size;
  const int64_t width = options.block_size;
  const int64_t top_k = options.token_merge_top_k;
  const int64_t seeded = options.has_dual_cache() ? options.max_num_reqs : 0;
  const int64_t merged = top_k > 0 ? blocks : 0;
  const int64_t canvases = options.has_canvas() ? blocks : 0;
  std::vector<ArenaField> fields = {
      matrix_field("write_ids", ArenaDtype::kInt64, blocks, width),
      matrix_field("confidence", ArenaDtype::kFloat32, blocks, width),
      vector_field("masks_left", ArenaDtype::kInt32, blocks),
      vector_field("flags", ArenaDtype::kInt32, blocks),
      vector_field("same_token_ratio", ArenaDtype::kFloat32, blocks),
      vector_field("pending_next_token", ArenaDtype::kInt64, seeded),
      matrix_field("merge_valid", ArenaDtype::kUint8, merged, width),
      ArenaField{"merge_topk_ids", ArenaDtype::kInt64, 0, merged, width * top_k, true, top_k},
      ArenaField{"merge_topk_probs", ArenaDtype::kFloat32, 0, merged, width * top_k, true, top_k},
      matrix_field("merge_residual", ArenaDtype::kFloat32, merged, width),
      matrix_field("canvas_argmax", ArenaDtype::kInt64, canvases, width),
  };
  Arena::layout(fields);
  return fields;
}

size_t SamplerOutput::arena_bytes(const EngineOptions& options) {
  return Arena::arena_bytes(make_fields(options));
}

SamplerOutput::SamplerOutput(const EngineOptions& options)
    : SamplerOutput(options, Arena(make_fields(options))) {}

SamplerOutput::SamplerOutput(const EngineOptions& options, void* memory, size_t bytes)
    : SamplerOutput(options, Arena(make_fields(options), memory, bytes)) {}

SamplerOutput::SamplerOutput(const EngineOptions& options, Arena arena)
    : arena_(std::move(arena)),
      max_blocks_(options.max_num_reqs * options.buffer_size),
      block_size_(options.block_size),
      merge_top_k_(options.token_merge_top_k) {
  clear(max_blocks_);
}

void SamplerOutput::clear(int32_t num_blocks) {
  DIFFULEX_CHECK(num_blocks >= 0 && num_blocks <= max_blocks_,
                 "SamplerOutput::clear: expected a count in [0, ", max_blocks_, "], got ",
                 num_blocks);
  std::fill_n(write_ids().begin(), num_blocks * block_size_, int64_t{-1});
  std::fill_n(confidence().begin(), num_blocks * block_size_, 0.0F);
  std::fill_n(masks_left().begin(), num_blocks, 0);
  std::fill_n(flags().begin(), num_blocks, 0);
  std::fill_n(same_token_ratio().begin(), num_blocks, 1.0F);
  std::fill(pending_next_token().begin(), pending_next_token().end(), int64_t{-1});
  if (merge_top_k_ > 0) {
    const int32_t count = num_blocks * block_size_;
    std::fill_n(merge_valid().begin(), count, uint8_t{0});
    std::fill_n(merge_topk_ids().begin(), count * merge_top_k_, int64_t{-1});
    std::fill_n(merge_topk_probs().begin(), count * merge_top_k_, 0.0F);
    std::fill_n(merge_residual().begin(), count, 0.0F);
  }
  if (!canvas_argmax().empty()) {
    std::fill_n(canvas_argmax().begin(), num_blocks * block_size_, int64_t{-1});
  }
}

}  // namespace diffulex
