// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the int8 tiles of every instruction set take. Only plain data crosses this border.

#include <cstdint>

namespace diffulex::cpu {

/// Columns of a panel, and depth of one step through it.
inline constexpr int32_t kInt8PanelWidth = 32;
inline constexpr int32_t kInt8Step = 4;
/// Elements between rows of x: what a block has at most. A constant, so that a row of the tile
/// takes no register for its address.
inline constexpr int32_t kInt8RowStride = 128;

/// One block of the depth: out (+)= x_scale * (x panel), for all columns of the panel.
struct Int8TileArgs {
  const void* x = nullptr;              // [rows, 128] int8 or int16, as `x_bytes` says
  const int32_t* row_starts = nullptr;  // [rows] -128 times the sum of x
  const float* x_scale = nullptr;       // [rows]
  const uint8_t* panel = nullptr;       // [steps, 32, 4] w + 128
  // [32] of the last block, with `bias`: result = out * scale + bias
  const float* column_scale = nullptr;
  const float* bias = nullptr;  // [32]
  float* out = nullptr;         // [rows, 32]
  float* result = nullptr;      // [rows, 32], `result_stride` apart; may be `out`
  int64_t result_stride = 0;
  int32_t rows = 0;         // 1 to tile_rows
  int32_t steps = 0;        // up to 32
  bool accumulate = false;  // start from `out` instead of 0
};

/// The int8 tile of one instruction set.
struct Int8Kernels {
  const char* name;
  void (*tile)(const Int8TileArgs& args);
  int32_t tile_rows;
  int32_t x_bytes;  // of an element of the copy of x
};

/// The best one that this machine can run; chosen once, thread-safe.
[[nodiscard]] const Int8Kernels& int8_kernels();
/// Those that this machine can run, best last; `index` below the returned count.
[[nodiscard]] int32_t num_int8_kernels();
[[nodiscard]] const Int8Kernels& int8_kernels_at(int32_t index);

/// The variants; only those compiled for this architecture are defined.
[[nodiscard]] const Int8Kernels& int8_kernels_base();
[[nodiscard]] const Int8Kernels& int8_kernels_dot();
[[nodiscard]] const Int8Kernels& int8_kernels_v3();
[[nodiscard]] const Int8Kernels& int8_kernels_v3n();
[[nodiscard]] const Int8Kernels& int8_kernels_v4();
[[nodiscard]] const Int8Kernels& int8_kernels_v4n();

}  // namespace diffulex::cpu
