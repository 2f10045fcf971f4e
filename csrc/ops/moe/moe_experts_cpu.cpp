// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "ops/moe/config.h"
#include "ops/moe/experts_cpu.h"
#include "ops/shared/cpu_isa/kernel_table.h"
#include "ops/shared/parallel.h"

namespace diffulex::cpu {
namespace {

/// Weight rows of one piece of work.
constexpr int64_t kPanel = 64;
/// Multiply-adds a thread should get at least.
constexpr int64_t kParallelMacs = 1 << 18;

struct WideRows;
struct GateSums;
struct UpSums;
struct DownSums;
struct ActivatedRow;

/// One tile and the rows of x it reads.
class TileRows final {
 public:
  TileRows(const MoeExperts& experts, int64_t tile)
      : experts_(experts),
        expert_(experts.tiles.expert[tile]),
        start_(experts.tiles.start[tile]),
        count_(std::min<int64_t>(kMoeCpuTile, experts.tiles.ends[expert_] - start_)) {}

  [[nodiscard]] int64_t expert() const { return expert_; }
  [[nodiscard]] int64_t start() const { return start_; }
  [[nodiscard]] int64_t count() const { return count_; }
  /// Slot, or row when nothing is sorted, of row `i` of the tile.
  [[nodiscard]] int64_t target(int64_t i) const {
    return experts_.sorted_slots == nullptr ? start_ + i : experts_.sorted_slots[start_ + i];
  }

  /// float32 rows of x; widened ones live until the thread asks again.
  void gather(const float** rows) const {
    const TensorRef& x = experts_.x;
    const RowPlaces places = RowPlaces::of(x);
    const int64_t hidden = x.last();
    float* wide = x.dtype == DType::kF32 ? nullptr : thread_floats<WideRows>(count_ * hidden);
    for (int64_t i = 0; i < count_; ++i) {
      const void* source = element_at(x, places.offset(target(i) / experts_.top_k));
      rows[i] = static_cast<const float*>(source);
      if (wide != nullptr) {
        kernel_table().load(GatherArgs{source, x.dtype, hidden, hidden, hidden}, wide + i * hidden);
        rows[i] = wide + i * hidden;
      }
    }
  }

 private:
  const MoeExperts& experts_;
  int64_t expert_;
  int64_t start_;
  int64_t count_;
};

/// Rows [first, first + columns) of a weight of one expert times the rows of the tile.
void multiply(const TensorRef& weight, int64_t expert, int64_t first, int64_t columns,
              const float* const* rows, int64_t count, float* out) {
  DotRowsArgs args;
  args.x = rows;
  args.weight = element_at(weight, expert * weight.stride[0] + first * weight.stride[1]);
  args.weight_dtype = weight.dtype;
  args.weight_stride = weight.stride[1];
  args.out = out;
  args.out_stride = kPanel;
  args.rows = count;
  args.columns = columns;
  args.depth = weight.size[2];
  kernel_table().dot_rows(args);
}

/// Rounds floats to the dtype of x and back.
void round_to(DType dtype, float* values, int64_t n) {
  if (dtype == DType::kF32) {
    return;
  }
  float* halves = thread_floats<ActivatedRow>(n);
  kernel_table().store(values, dtype, halves, n);
  kernel_table().load(GatherArgs{halves, dtype, n, n, n}, values);
}

void gate_up_panel(const MoeExperts& experts, const TileRows& tile, int64_t first) {
  const int64_t width = experts.w2.size[2];
  const int64_t columns = std::min(kPanel, width - first);
  const KernelTable& kernels = kernel_table();
  const float* rows[kMoeCpuTile];
  tile.gather(rows);
  float* gate = thread_floats<GateSums>(kMoeCpuTile * kPanel);
  float* up = thread_floats<UpSums>(kMoeCpuTile * kPanel);
  multiply(experts.w13, tile.expert(), first, columns, rows, tile.count(), gate);
  multiply(experts.w13, tile.expert(), width + first, columns, rows, tile.count(), up);
  for (int64_t i = 0; i < tile.count(); ++i) {
    float* gate_row = gate + i * kPanel;
    float* up_row = up + i * kPanel;
    if (experts.input_weights != nullptr) {
      const float weight = experts.input_weights[tile.target(i) * experts.input_weight_stride];
      kernels.scale(gate_row, weight, columns);
      kernels.scale(up_row, weight, columns);
    }
    float* out = experts.activated + (tile.start() + i) * width + first;
    kernels.act_row(ActRowArgs{gate_row, up_row, out, columns, DType::kF32, experts.act});
    round_to(experts.x.dtype, out, columns);
  }
}

void down_panel(const MoeExperts& experts, const TileRows& tile, int64_t first) {
  const int64_t width = experts.w2.size[2];
  const int64_t columns = std::min(kPanel, experts.w2.size[1] - first);
  const KernelTable& kernels = kernel_table();
  const float* rows[kMoeCpuTile];
  for (int64_t i = 0; i < tile.count(); ++i) {
    rows[i] = experts.activated + (tile.start() + i) * width;
  }
  float* sums = thread_floats<DownSums>(kMoeCpuTile * kPanel);
  multiply(experts.w2, tile.expert(), first, columns, rows, tile.count(), sums);
  const int64_t element = dtype_bytes(experts.x.dtype);
  for (int64_t i = 0; i < tile.count(); ++i) {
    const int64_t row = tile.target(i);
    if (experts.output_weights != nullptr) {
      kernels.scale(sums + i * kPanel, experts.output_weights[row], columns);
    }
    char* out = static_cast<char*>(experts.out) + (experts.out_rows.offset(row) + first) * element;
    kernels.store(sums + i * kPanel, experts.x.dtype, out, columns);
  }
}

/// Runs `body(tile, first)` for every tile and panel of `extent` weight rows. Panels of one tile
/// are neighbours, so that a thread reads the rows of x again from its caches.
template <typename Body>
void for_each_panel(const MoeExperts& experts, const ExecContext& context, int64_t extent,
                    int64_t macs_per_row, const Body& body) {
  const int64_t panels = (extent + kPanel - 1) / kPanel;
  const int64_t grain = std::max<int64_t>(1, kParallelMacs / (macs_per_row * kPanel));
  parallel_ranges(context, experts.tiles.num_tiles * panels, grain,
                  [&](int64_t begin, int64_t end) {
                    for (int64_t piece = begin; piece < end; ++piece) {
                      body(TileRows(experts, piece / panels), piece % panels * kPanel);
                    }
                  });
}

}  // namespace

void run_experts(const MoeExperts& experts, const ExecContext& context) {
  const int64_t hidden = experts.w2.size[1];
  const int64_t width = experts.w2.size[2];
  for_each_panel(experts, context, width, 2 * hidden,
                 [&](const TileRows& tile, int64_t first) { gate_up_panel(experts, tile, first); });
  for_each_panel(experts, context, hidden, width,
                 [&](const TileRows& tile, int64_t first) { down_panel(experts, tile, first); });
}

}  // namespace diffulex::cpu
