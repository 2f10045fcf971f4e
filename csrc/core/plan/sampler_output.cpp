// SPDX-License-Identifier: Apache-2.0
#include "diffulex/core/sampler_output.h"

#include <algorithm>
#include <utility>

#include "diffulex/core/status.h"

namespace diffulex {
namespace {

[[nodiscard]] std::vector<ArenaField> fields_of(const EngineOptions& options) {
  return OutputArrays::fields(PlanLayout::of(options));
}

}  // namespace

size_t SamplerOutput::arena_bytes(const EngineOptions& options) {
  return Arena::arena_bytes(fields_of(options));
}

SamplerOutput::SamplerOutput(const EngineOptions& options)
    : SamplerOutput(PlanLayout::of(options), Arena(fields_of(options))) {}

SamplerOutput::SamplerOutput(const EngineOptions& options, void* memory, size_t bytes)
    : SamplerOutput(PlanLayout::of(options), Arena(fields_of(options), memory, bytes)) {}

SamplerOutput::SamplerOutput(const PlanLayout& layout, Arena arena)
    : arena_(std::move(arena)),
      arrays_(OutputArrays::at(arena_.data(), arena_.fields())),
      blocks_(layout.max_num_blocks()),
      reqs_(layout.max_num_reqs),
      block_size_(layout.block_size),
      merge_top_k_(layout.merge_top_k) {
  clear(blocks_);
}

void SamplerOutput::clear(int32_t num_blocks) {
  DIFFULEX_CHECK(num_blocks >= 0 && num_blocks <= blocks_,
                 "SamplerOutput::clear: expected a count in [0, ", blocks_, "], got ", num_blocks);
  const int32_t blocks = num_blocks;
  const int32_t reqs = reqs_;
#define DIFFULEX_ARRAY(name, type, extent, width, use, cleared) \
  std::fill_n(arrays_.name, capacity(arrays_.name, extent, width()), type{cleared});
#include "diffulex/core/output_arrays.def"
}

}  // namespace diffulex
