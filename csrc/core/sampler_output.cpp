// SPDX-License-Identifier: Apache-2.0
#include "diffulex/core/sampler_output.h"

#include <algorithm>
#include <utility>

#include "diffulex/core/status.h"

namespace diffulex {
namespace {

[[nodiscard]] constexpr size_t index_of(OutputArray array) noexcept {
  return static_cast<size_t>(array);
}

}  // namespace

std::vector<ArenaField> SamplerOutput::make_fields(const EngineOptions& options) {
  const int64_t blocks = int64_t{options.max_num_reqs} * options.buffer_size;
  const int64_t width = options.block_size;
  std::vector<ArenaField> fields = {
      ArenaField{"write_ids", ArenaDtype::kInt64, 0, blocks, width, true},
      ArenaField{"confidence", ArenaDtype::kFloat32, 0, blocks, width, true},
      ArenaField{"masks_left", ArenaDtype::kInt32, 0, blocks, 1, false},
      ArenaField{"flags", ArenaDtype::kInt32, 0, blocks, 1, false},
      ArenaField{"same_token_ratio", ArenaDtype::kFloat32, 0, blocks, 1, false},
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
      block_size_(options.block_size) {
  clear(max_blocks_);
}

Span<int64_t> SamplerOutput::write_ids() noexcept {
  return Span<int64_t>(arena_.array<int64_t>(index_of(OutputArray::kWriteIds)),
                       static_cast<size_t>(max_blocks_ * block_size_));
}

Span<const int64_t> SamplerOutput::write_ids() const noexcept {
  return Span<const int64_t>(arena_.array<int64_t>(index_of(OutputArray::kWriteIds)),
                             static_cast<size_t>(max_blocks_ * block_size_));
}

Span<float> SamplerOutput::confidence() noexcept {
  return Span<float>(arena_.array<float>(index_of(OutputArray::kConfidence)),
                     static_cast<size_t>(max_blocks_ * block_size_));
}

Span<const float> SamplerOutput::confidence() const noexcept {
  return Span<const float>(arena_.array<float>(index_of(OutputArray::kConfidence)),
                           static_cast<size_t>(max_blocks_ * block_size_));
}

Span<int32_t> SamplerOutput::masks_left() noexcept {
  return Span<int32_t>(arena_.array<int32_t>(index_of(OutputArray::kMasksLeft)),
                       static_cast<size_t>(max_blocks_));
}

Span<const int32_t> SamplerOutput::masks_left() const noexcept {
  return Span<const int32_t>(arena_.array<int32_t>(index_of(OutputArray::kMasksLeft)),
                             static_cast<size_t>(max_blocks_));
}

Span<int32_t> SamplerOutput::flags() noexcept {
  return Span<int32_t>(arena_.array<int32_t>(index_of(OutputArray::kFlags)),
                       static_cast<size_t>(max_blocks_));
}

Span<const int32_t> SamplerOutput::flags() const noexcept {
  return Span<const int32_t>(arena_.array<int32_t>(index_of(OutputArray::kFlags)),
                             static_cast<size_t>(max_blocks_));
}

Span<float> SamplerOutput::same_token_ratio() noexcept {
  return Span<float>(arena_.array<float>(index_of(OutputArray::kSameTokenRatio)),
                     static_cast<size_t>(max_blocks_));
}

Span<const float> SamplerOutput::same_token_ratio() const noexcept {
  return Span<const float>(arena_.array<float>(index_of(OutputArray::kSameTokenRatio)),
                           static_cast<size_t>(max_blocks_));
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
}

}  // namespace diffulex
