// SPDX-License-Identifier: Apache-2.0
#include "ops/moe/config.h"

#include <algorithm>

#include "diffulex/ops/quantize.h"

namespace diffulex {
namespace {

constexpr size_t kAlignment = 256;
constexpr int64_t kVectorElements = 8;
/// Elements of a 128-byte line, the depth of a stage of the Hopper kernels.
constexpr int64_t kLineElements = 64;

/// Appends arrays, each at an aligned offset.
class ScratchLayout final {
 public:
  size_t add(int64_t count, int64_t element_bytes) {
    const size_t offset = total_;
    const auto bytes = static_cast<size_t>(count * element_bytes);
    total_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return offset;
  }
  [[nodiscard]] size_t total() const { return total_; }

 private:
  size_t total_ = 0;
};

void add_tiles(ScratchLayout& layout, MoeScratch& scratch, int64_t num_rows,
               int32_t num_local_experts, Device device) {
  const int32_t tile = device == Device::kCpu ? kMoeCpuTile : kMoeMmaMinTile;
  const int64_t max_tiles = moe_max_tiles(num_rows, num_local_experts, tile);
  scratch.tile_expert = layout.add(max_tiles, sizeof(int32_t));
  scratch.tile_start = layout.add(max_tiles, sizeof(int32_t));
  scratch.counters = layout.add(2, sizeof(int32_t));
}

/// The CPU keeps the (rounded) activated rows as float32, which the second product reads.
int64_t activated_bytes(DType dtype, Device device) {
  return device == Device::kCpu ? dtype_bytes(DType::kF32) : dtype_bytes(dtype);
}

}  // namespace

MoePath choose_moe_path(const MoePathQuery& query) {
  const bool is_half = query.dtype == DType::kBF16 || query.dtype == DType::kF16;
  const bool is_whole =
      query.hidden_size % kVectorElements == 0 && query.intermediate_size % kVectorElements == 0;
  if (!is_half || !is_whole || !query.is_aligned) {
    return MoePath::kGeneric;
  }
  const bool has_whole_lines =
      query.hidden_size % kLineElements == 0 && query.intermediate_size % kLineElements == 0;
  return query.has_wgmma && has_whole_lines ? MoePath::kWgmma : MoePath::kMma;
}

int32_t choose_moe_tile(int64_t num_rows, int32_t num_local_experts, bool is_batch_invariant) {
  if (is_batch_invariant) {
    return kMoeInvariantTile;
  }
  int32_t tile = kMoeMmaMinTile;
  while (tile < kMoeMmaMaxTile && int64_t{tile} * num_local_experts < 2 * num_rows) {
    tile *= 2;
  }
  return tile;
}

int32_t choose_moe_wgmma_tile(int64_t num_rows, int64_t max_expert_rows, int32_t num_local_experts,
                              bool is_batch_invariant) {
  if (is_batch_invariant) {
    return kMoeInvariantTile;
  }
  if (max_expert_rows <= 32) {
    return max_expert_rows <= 16 ? 16 : 32;
  }
  // Routing is uneven: room for more than twice the mean while that costs no bandwidth.
  const int64_t mean = num_rows / num_local_experts;
  if (mean <= 40) {
    return mean <= 24 ? 64 : 96;
  }
  return mean <= 88 ? 128 : (mean <= 132 ? 160 : kMoePairTile);
}

bool is_streamed_once(int32_t tile, int64_t num_rows, int64_t max_expert_rows,
                      int32_t num_local_experts) {
  return max_expert_rows <= tile || 10 * num_rows <= int64_t{9} * tile * num_local_experts;
}

int64_t expected_local_slots(int64_t num_slots, int64_t num_experts, int32_t num_local_experts) {
  if (num_experts <= num_local_experts) {
    return num_slots;
  }
  return (num_slots * num_local_experts + num_experts - 1) / num_experts;
}

int64_t moe_max_tiles(int64_t num_slots, int32_t num_local_experts, int32_t tile) {
  if (num_slots <= 0 || num_local_experts <= 0 || tile <= 0) {
    return 0;
  }
  return (num_slots + tile - 1) / tile + std::min<int64_t>(num_local_experts, num_slots);
}

MoeScratch fused_moe_scratch(const MoeShape& shape, Device device) {
  MoeScratch scratch;
  ScratchLayout layout;
  const int64_t num_slots = shape.num_tokens * shape.top_k;
  scratch.sorted_slots = layout.add(num_slots, sizeof(int32_t));
  scratch.expert_offsets = layout.add(int64_t{shape.num_local_experts} + 1, sizeof(int32_t));
  add_tiles(layout, scratch, num_slots, shape.num_local_experts, device);
  const DType activated = shape.is_scaled ? DType::kF32 : shape.dtype;
  scratch.activated =
      layout.add(num_slots * shape.intermediate_size, activated_bytes(activated, device));
  scratch.slot_out = layout.add(num_slots * shape.hidden_size, dtype_bytes(shape.dtype));
  if (shape.is_scaled) {
    const auto scales = [](int64_t depth, int64_t rows) {
      return (depth + kQuantGroup - 1) / kQuantGroup * ((rows + 3) / 4 * 4);
    };
    scratch.x_codes = layout.add(shape.num_tokens * shape.hidden_size, 1);
    scratch.x_scale = layout.add(scales(shape.hidden_size, shape.num_tokens), sizeof(float));
    scratch.inner_codes = layout.add(num_slots * shape.intermediate_size, 1);
    scratch.inner_scale = layout.add(scales(shape.intermediate_size, num_slots), sizeof(float));
  }
  scratch.total = layout.total();
  return scratch;
}

MoeScratch packed_scratch(const PackedShape& shape, Device device) {
  MoeScratch scratch;
  ScratchLayout layout;
  add_tiles(layout, scratch, shape.num_rows, shape.num_local_experts, device);
  scratch.activated =
      layout.add(shape.num_rows * shape.intermediate_size, activated_bytes(shape.dtype, device));
  scratch.total = layout.total();
  return scratch;
}

size_t fused_moe_workspace_bytes(const MoeShape& shape, Device device) {
  const bool is_empty = shape.num_tokens <= 0 || shape.top_k <= 0;
  // The CPU kernels keep their own scratch, which grows and stays.
  return is_empty || device == Device::kCpu ? 0 : fused_moe_scratch(shape, device).total;
}

size_t fused_experts_packed_workspace_bytes(int64_t num_rows, int32_t num_local_experts,
                                            int64_t intermediate_size, DType dtype, Device device) {
  return num_rows <= 0 || device == Device::kCpu
             ? 0
             : packed_scratch({num_rows, num_local_experts, intermediate_size, dtype}, device)
                   .total;
}

}  // namespace diffulex
