// SPDX-License-Identifier: Apache-2.0
#pragma once

// The portable product of rows and a weight of 8 bits on the tensor cores of the sm_80 class. e4m3
// codes are widened to float16, which holds them exactly; int8 codes are multiplied as they are.
//
//   CTA    16, 32 or 64 rows of x times 64 rows of W; four warps with 16 rows of W each, or two
//          times four, each four with a half of the rows of x
//   step   128 columns: the codes of one scale, then their product goes to the float32 sums
//   depth  as many steps as three CTAs have room for; two where a multiprocessor has less, the next
//          one on its way, since more CTAs hide each other's latencies. The scales of a step come
//          with its codes: a load of its own would return behind the copies in front of it
//
// With an activation the rows of W of a warp are eight of gate and the eight of up that match.

#include <cstdint>
#include <type_traits>

#include "ops/activation/gate.cuh"
#include "ops/quant/code.cuh"
#include "ops/quant/scaled_tile.h"
#include "ops/shared/cuda/device_facts.h"
#include "ops/shared/cuda/ptx.cuh"
#include "ops/shared/cuda/vec.cuh"

namespace diffulex::cuda {

inline constexpr int kScaledWarps = 4;
inline constexpr int kScaledThreads = 32 * kScaledWarps;
inline constexpr int kScaledWeightRows = 64;
inline constexpr int kScaledStep = 128;  // bytes, and columns
/// Padded so that eight rows lie in different banks.
inline constexpr int kScaledLine = kScaledStep + 16;
inline constexpr int kScaledShallow = 2;  // steps in shared memory

/// Parts of the rows of x of a CTA; each has four warps.
template <int kTiles>
inline constexpr int kScaledParts = kTiles > 1 ? 2 : 1;
template <int kTiles>
inline constexpr int kScaledCtaThreads = kScaledThreads * kScaledParts<kTiles>;

/// Of a stage: lines of x and of W, then a scale of each.
template <int kTiles>
inline constexpr int kScaledRows = 16 * kTiles + kScaledWeightRows;
template <int kTiles>
inline constexpr int kScaledStageBytes = kScaledRows<kTiles> * (kScaledLine + 4);
/// Of a deep ring: three CTAs of a multiprocessor with 228 KiB have one each.
inline constexpr int kScaledDeepCtas = 3;
template <int kTiles>
inline constexpr int kScaledDeep =
    (228 * 1024 / kScaledDeepCtas - kReservedSharedMemory) / kScaledStageBytes<kTiles>;

/// mma.m16n8k32 (PTX 7.0, sm_80) of int8: c += a b, exact.
__device__ __forceinline__ void mma_16832(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                          uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Where a CTA works.
struct ScaledPlace final {
  int32_t expert = 0;
  int32_t first = 0;  // row of x, or position
  int32_t count = 0;  // of rows that exist
};

template <int kRows>
__device__ __forceinline__ ScaledPlace scaled_place(const ScaledArgs& args, int32_t index) {
  const ExpertTiles& experts = args.experts;
  ScaledPlace place;
  if (experts.tile_expert == nullptr) {
    place.first = index * kRows;
    place.count = args.num_rows - place.first;
  } else if (index < experts.counters[0]) {
    place.expert = experts.tile_expert[index];
    place.first = experts.tile_start[index];
    place.count = experts.ends[place.expert] - place.first;
  }
  place.count = place.count < kRows ? place.count : kRows;
  return place;
}

/// The rows of one CTA and where their codes are copied to.
template <int kTiles, bool kIsWide>
class ScaledLoader final {
 public:
  static constexpr int kRows = 16 * kTiles;
  static constexpr int kThreads = kScaledCtaThreads<kTiles>;

  __device__ __forceinline__ ScaledLoader(const ScaledArgs& args, const ScaledPlace& place,
                                          int32_t column)
      : any_(args.weight), depth_(args.depth) {
#pragma unroll
    for (int i = 0; i < kRowChunks; ++i) {
      const int32_t row = (i * kThreads + static_cast<int32_t>(threadIdx.x)) / 8;
      rows_[i] = nullptr;
      if (row < kRows && row < place.count) {
        rows_[i] = args.x + source_row(args, place.first + row) * args.x_stride;
      }
    }
    const uint8_t* weight = args.weight + place.expert * args.experts.weight_stride;
#pragma unroll
    for (int i = 0; i < kWeightChunks; ++i) {
      const int32_t row = (i * kThreads + static_cast<int32_t>(threadIdx.x)) / 8;
      const int32_t source = weight_row(args, column, row);
      weights_[i] = source < 0 ? nullptr : weight + source * args.weight_stride;
    }
    find_scale(args, place, column);
  }

  /// Row of x of a position.
  __device__ __forceinline__ static int64_t source_row(const ScaledArgs& args, int32_t position) {
    const ExpertTiles& experts = args.experts;
    return experts.slots == nullptr ? position : experts.slots[position] / experts.top_k;
  }

  /// Row of W of row `row` of a tile that begins at result `column`; -1 past the end.
  __device__ __forceinline__ static int32_t weight_row(const ScaledArgs& args, int32_t column,
                                                       int32_t row) {
    if (args.act < 0) {
      return column + row < args.width ? column + row : -1;
    }
    const int32_t result = column + row / 16 * 8 + row % 8;
    return result < args.width ? (row % 16 < 8 ? 0 : args.width) + result : -1;
  }

  /// Starts the copy of step `step`.
  __device__ __forceinline__ void load(uint8_t* stage, int32_t step) const {
    const int32_t start = step * kScaledStep;
#pragma unroll
    for (int i = 0; i < kRowChunks; ++i) {
      const int chunk = i * kThreads + static_cast<int>(threadIdx.x);
      if (chunk / 8 < kRows) {
        copy(stage + chunk / 8 * kScaledLine + chunk % 8 * 16, rows_[i], start + chunk % 8 * 16);
      }
    }
    uint8_t* weights = stage + kRows * kScaledLine;
#pragma unroll
    for (int i = 0; i < kWeightChunks; ++i) {
      const int chunk = i * kThreads + static_cast<int>(threadIdx.x);
      copy(weights + chunk / 8 * kScaledLine + chunk % 8 * 16, weights_[i], start + chunk % 8 * 16);
    }
    if (has_scale_) {
      copy_scale(stage + kScaledRows<kTiles> * kScaledLine + threadIdx.x * 4,
                 scale_ + step * scale_stride_);
    }
    ptx::cp_async_commit();
  }

 private:
  /// The scale that this thread copies: of a row of x, or of the block that a row of W lies in.
  /// There are none for rows that do not exist.
  __device__ __forceinline__ void find_scale(const ScaledArgs& args, const ScaledPlace& place,
                                             int32_t column) {
    const auto thread = static_cast<int32_t>(threadIdx.x);
    const int32_t row = thread - kRows;
    has_scale_ = thread < kRows || (row < kScaledWeightRows && args.block_stride != 0);
    scale_ = nullptr;
    if (thread < kRows) {
      scale_stride_ = args.x_scale_stride;
      if (thread < place.count) {
        scale_ = args.x_scale + source_row(args, place.first + thread);
      }
    } else if (has_scale_) {
      scale_stride_ = 1;
      const int32_t source = weight_row(args, column, row);
      const bool is_up = args.act >= 0 && row % 16 >= 8;
      if (source >= 0) {
        const int32_t block =
            is_up ? (source - args.width) / kQuantBlock + args.up_blocks : source / kQuantBlock;
        scale_ = args.weight_scale + place.expert * args.experts.scale_stride +
                 block * args.block_stride;
      }
    }
  }

  __device__ __forceinline__ void copy_scale(uint8_t* target, const float* source) const {
    if constexpr (kIsWide) {
      const bool is_inside = scale_ != nullptr;
      const void* read = is_inside ? static_cast<const void*>(source) : any_;
      ptx::cp_async4(ptx::smem_address(target), read, is_inside);
    } else {
      *reinterpret_cast<float*>(target) = scale_ != nullptr ? *source : 0.0F;
    }
  }

  static_assert(kScaledRows<kTiles> <= kThreads, "a thread copies one scale of a step");
  static constexpr int kRowChunks = (kRows * 8 + kThreads - 1) / kThreads;
  static constexpr int kWeightChunks = kScaledWeightRows * 8 / kThreads;

  /// 16 codes of a row, 0 past its end and of none.
  __device__ __forceinline__ void copy(uint8_t* target, const uint8_t* row, int32_t column) const {
    if constexpr (kIsWide) {
      const bool is_inside = row != nullptr && column < depth_;
      ptx::cp_async16(ptx::smem_address(target), is_inside ? row + column : any_, is_inside);
    } else {
#pragma unroll 1
      for (int i = 0; i < 16; ++i) {
        target[i] = row != nullptr && column + i < depth_ ? row[column + i] : uint8_t{0};
      }
    }
  }

  const uint8_t* rows_[kRowChunks];
  const uint8_t* weights_[kWeightChunks];
  const uint8_t* any_;  // a valid address
  const float* scale_;
  int64_t scale_stride_ = 0;  // between steps
  bool has_scale_;
  int32_t depth_;
};

/// Where a lane reads the matrices of eight rows and 16 columns that make the operands of 32
/// columns: of x the rows above and below, then those of the next 16 columns; of W both columns of
/// its first eight rows, then of the others. Which lane has which column is free, as x and W agree.
struct ScaledLane final {
  uint32_t rows;
  uint32_t weights;

  __device__ __forceinline__ ScaledLane(uint32_t first_row, uint32_t first_weight) {
    const uint32_t matrix = threadIdx.x % 32 / 8;
    const uint32_t row = threadIdx.x % 8;
    rows = first_row + (matrix % 2 * 8 + row) * kScaledLine + matrix / 2 * 16;
    weights = first_weight + (matrix / 2 * 8 + row) * kScaledLine + matrix % 2 * 16;
  }
};

/// Sixteen of the 32 columns.
__device__ __forceinline__ void multiply_half(float (&c)[2][4], const uint32_t (&a)[4],
                                              const uint32_t (&b)[4], int half) {
  const uint32_t above = a[2 * half];
  const uint32_t below = a[2 * half + 1];
  const uint32_t left[4] = {e4m3_pair(above & 0xFFFFU), e4m3_pair(below & 0xFFFFU),
                            e4m3_pair(above >> 16), e4m3_pair(below >> 16)};
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    const uint32_t word = b[2 * side + half];
    ptx::mma_16816<__half>(c[side], left, e4m3_pair(word & 0xFFFFU), e4m3_pair(word >> 16));
  }
}

/// The products of 32 columns: c[gate or up, or left or right].
__device__ __forceinline__ void multiply_columns(float (&c)[2][4], const uint32_t (&a)[4],
                                                 const uint32_t (&b)[4]) {
  multiply_half(c, a, b, 0);
  multiply_half(c, a, b, 1);
}
__device__ __forceinline__ void multiply_columns(int32_t (&c)[2][4], const uint32_t (&a)[4],
                                                 const uint32_t (&b)[4]) {
  mma_16832(c[0], a, b[0], b[1]);
  mma_16832(c[1], a, b[2], b[3]);
}

/// The products of the codes of one step, of each tile of x of a warp.
template <typename Sum, int kTiles>
__device__ __forceinline__ void multiply_step(const ScaledLane& lane, Sum (&c)[kTiles][2][4]) {
#pragma unroll
  for (int start = 0; start < kScaledStep; start += 32) {
    uint32_t b[4];
    ptx::ldmatrix_x4(b, lane.weights + start);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      uint32_t a[4];
      ptx::ldmatrix_x4(a, lane.rows + tile * 16 * kScaledLine + start);
      multiply_columns(c[tile], a, b);
    }
  }
}

/// The float32 sums of a thread: rows lane / 4 and 8 below of each tile of its warp, two
/// neighbouring rows of W in each of the two sides.
template <int kTiles>
class ScaledSums final {
 public:
  __device__ __forceinline__ ScaledSums(const ScaledArgs& args, const ScaledPlace& place,
                                        int32_t column)
      : args_(args),
        place_(place),
        row_(static_cast<int32_t>(threadIdx.x) / kScaledThreads * 16 * kTiles +
             static_cast<int32_t>(threadIdx.x) % 32 / 4),
        scale_(args.weight_scale + place.expert * args.experts.scale_stride) {
    const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32 % kScaledWarps;
    const int32_t pair = static_cast<int32_t>(threadIdx.x) % 4 * 2;
    column_ = column + (args.act < 0 ? warp * 16 : warp * 8) + pair;
    tile_row_ = warp * 16 + pair;
  }

  template <typename Sum>
  __device__ __forceinline__ void add(const Sum (&products)[kTiles][2][4], const float* row_scales,
                                      const float* weight_scales) {
    float rows[2 * kTiles];
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      rows[i] = row_scales[row_ + 8 * i];
    }
#pragma unroll
    for (int side = 0; side < 2; ++side) {
#pragma unroll
      for (int next = 0; next < 2; ++next) {
        const bool has_blocks = args_.block_stride != 0;
        const float weight = has_blocks ? weight_scales[tile_row_ + 8 * side + next] : 1.0F;
#pragma unroll
        for (int i = 0; i < 2 * kTiles; ++i) {
          const float factor = __fmul_rn(rows[i], weight);
          float& sum = sums_[i / 2][side][i % 2 * 2 + next];
          sum = fmaf(factor, static_cast<float>(products[i / 2][side][i % 2 * 2 + next]), sum);
        }
      }
    }
  }

  template <typename T>
  __device__ __forceinline__ void store() {
    finish();
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      const int32_t row = row_ + 8 * i;
      if (row >= place_.count) {
        continue;
      }
      const ExpertTiles& experts = args_.experts;
      const int32_t position = place_.first + row;
      const int64_t target = experts.slots == nullptr ? position : experts.slots[position];
      T* out = static_cast<T*>(args_.out) + target * args_.out_stride;
#pragma unroll
      for (int next = 0; next < 2; ++next) {
        const float left = sums_[i / 2][0][i % 2 * 2 + next];
        const float right = sums_[i / 2][1][i % 2 * 2 + next];
        if (args_.act >= 0) {
          put(out, 0, next, activate(static_cast<Activation>(args_.act), left) * right);
        } else {
          put(out, 0, next, left);
          put(out, 8, next, right);
        }
      }
    }
  }

 private:
  /// Row of W of one of the two neighbours of a side; it may not exist.
  __device__ __forceinline__ int32_t weight_row(int side, int next) const {
    return column_ + next + (args_.act < 0 ? side * 8 : side * args_.width);
  }
  __device__ __forceinline__ bool exists(int side, int next) const {
    return column_ + next + (args_.act < 0 ? side * 8 : 0) < args_.width;
  }

  /// Scales of rows of W, and the bias.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
#pragma unroll
      for (int next = 0; next < 2; ++next) {
        const bool is_read = exists(side, next);
        const int32_t row = weight_row(side, next);
        const float scale = is_read && args_.block_stride == 0 ? scale_[row] : 1.0F;
        const float bias = is_read && args_.bias != nullptr ? args_.bias[row] : 0.0F;
#pragma unroll
        for (int i = 0; i < 2 * kTiles; ++i) {
          float& sum = sums_[i / 2][side][i % 2 * 2 + next];
          sum = fmaf(sum, scale, bias);
        }
      }
    }
  }

  template <typename T>
  __device__ __forceinline__ void put(T* out, int offset, int next, float value) const {
    if (column_ + offset + next < args_.width) {
      out[column_ + offset + next] = from_float<T>(value);
    }
  }

  const ScaledArgs& args_;
  const ScaledPlace place_;
  const int32_t row_;
  const float* scale_;
  int32_t column_;
  int32_t tile_row_;  // of W, of the first side
  float sums_[kTiles][2][4] = {};
};

/// Stages in turn, each with a group of copies, also past the last step.
template <typename Loader, uint32_t kStageBytes, int kStages>
class ScaledRing final {
 public:
  __device__ __forceinline__ ScaledRing(const Loader& loader, uint8_t* stages, int32_t depth)
      : num_steps((depth + kScaledStep - 1) / kScaledStep), loader_(loader), stages_(stages) {}

  /// Starts the copies of the next step.
  __device__ __forceinline__ void load() {
    if (loaded_ < num_steps) {
      loader_.load(stages_ + stage_, loaded_);
    } else {
      ptx::cp_async_commit();
    }
    ++loaded_;
    stage_ = next(stage_);
  }

  /// The stage after `stage`, in bytes from the first.
  [[nodiscard]] __device__ __forceinline__ static uint32_t next(uint32_t stage) {
    return stage == (kStages - 1) * kStageBytes ? 0 : stage + kStageBytes;
  }

  const int32_t num_steps;

 private:
  const Loader loader_;
  uint8_t* const stages_;
  int32_t loaded_ = 0;  // steps
  uint32_t stage_ = 0;
};

/// CTAs that a multiprocessor has registers for; codes read one by one need more of them.
template <typename Sum, int kTiles, bool kIsWide>
inline constexpr int kScaledCtas =
    !kIsWide ? 1 : (kTiles > 2 && std::is_same_v<Sum, float> ? 2 : kScaledDeepCtas);

/// Sum is float for e4m3 and int32_t for int8. CTAs of neighbouring rows of x follow each other.
template <typename T, typename Sum, int kTiles, bool kIsWide, int kStages>
__global__ void __launch_bounds__(kScaledCtaThreads<kTiles>, kScaledCtas<Sum, kTiles, kIsWide>)
    scaled_kernel(const __grid_constant__ ScaledArgs args, int32_t row_tiles) {
  using Loader = ScaledLoader<kTiles, kIsWide>;
  constexpr int kOwn = kTiles / kScaledParts<kTiles>;  // tiles of x of a warp
  // Steps between two barriers: a deep ring has room for a second, whose products do not wait.
  constexpr int kTogether = kStages > 4 ? 2 : 1;
  using Sums = ScaledSums<kOwn>;
  extern __shared__ __align__(16) uint8_t stages[];
  const auto index = static_cast<int32_t>(blockIdx.x) % row_tiles;
  const int32_t column = static_cast<int32_t>(blockIdx.x) / row_tiles *
                         (args.act < 0 ? kScaledWeightRows : kScaledWeightRows / 2);
  const ScaledPlace place = scaled_place<Loader::kRows>(args, index);
  if (place.count <= 0) {
    return;
  }
  Sums sums(args, place, column);
  const uint32_t warp = threadIdx.x / 32;
  const uint32_t first = ptx::smem_address(stages);
  const ScaledLane lane(first + warp / kScaledWarps * kOwn * 16 * kScaledLine,
                        first + (Loader::kRows + warp % kScaledWarps * 16) * kScaledLine);
  ScaledRing<Loader, kScaledStageBytes<kTiles>, kStages> ring(Loader(args, place, column), stages,
                                                              args.depth);
#pragma unroll
  for (int step = 0; step < kStages - kTogether; ++step) {
    ring.load();
  }
  uint32_t stage = 0;
  for (int32_t step = 0; step < ring.num_steps; step += kTogether) {
    ptx::cp_async_wait<kStages - 2 * kTogether>();
    __syncthreads();
    Sum products[kTogether][kOwn][2][4] = {};
    const float* scales[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      ring.load();
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      scales[i] =
          reinterpret_cast<const float*>(stages + stage + kScaledRows<kTiles> * kScaledLine);
      if (i == 0 || step + i < ring.num_steps) {
        ScaledLane mine = lane;
        mine.rows += stage;
        mine.weights += stage;
        multiply_step(mine, products[i]);
      }
      stage = ring.next(stage);
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (i == 0 || step + i < ring.num_steps) {
        sums.add(products[i], scales[i], scales[i] + Loader::kRows);
      }
    }
  }
  sums.template store<T>();
}

}  // namespace diffulex::cuda
