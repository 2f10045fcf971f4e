// SPDX-License-Identifier: Apache-2.0
#pragma once

// Scores, mask, softmax and value products of one consumer warpgroup over the key tiles of a unit.

#include <cstdint>

#include "ops/attention/online_softmax.cuh"
#include "ops/attention/sm90/schedule.cuh"
#include "ops/attention/sm90/traits.cuh"
#include "ops/shared/cuda/mbarrier.cuh"
#include "ops/shared/cuda/ptx.cuh"
#include "ops/shared/cuda/turns.cuh"
#include "ops/shared/cuda/vec.cuh"
#include "ops/shared/cuda/wgmma.cuh"

namespace diffulex::cuda::sm90 {

/// Registers of a warpgroup: 64 rows, one unit.
template <typename Traits>
struct Accumulators final {
  float values[Traits::kValueDims / 8][4];
  OnlineSoftmax softmax;
};

template <typename T>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}

/// The columns of a thread in a score tile: pairs at 8 * group + 2 * (lane % 4). Bit j of a mask is
/// the j-th of them.
template <int kGroups>
struct ColumnMask final {
  static_assert(kGroups <= 16, "one word per row");

  /// Columns with an offset in [begin, end) of the tile.
  __device__ static __forceinline__ uint32_t range(int32_t begin, int32_t end) {
    return below(end) & ~below(begin);
  }

  /// Keeps the scores of row half `half` whose bits are set, the others become -inf.
  __device__ static __forceinline__ void apply(uint32_t bits, int half,
                                               float (&scores)[kGroups][4]) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        if ((bits & (1U << (2 * group + column))) == 0) {
          scores[group][2 * half + column] = -INFINITY;
        }
      }
    }
  }

 private:
  __device__ static __forceinline__ uint32_t below(int32_t offset) {
    const int32_t rest = max_i32(offset - (static_cast<int32_t>(threadIdx.x) & 3) * 2, 0);
    const int32_t count = rest / 8 * 2 + min_i32(rest % 8, 2);
    return count >= 32 ? ~0U : (1U << count) - 1U;
  }
};

/// One multiplies while the other exponentiates.
template <typename Traits>
using Turns = ptx::Turns<Traits::kRowGroups == 2>;

/// One consumer warpgroup.
template <typename Traits>
class Consumer final {
 public:
  using T = typename Traits::Element;
  static constexpr int kTileKeys = Traits::kTileKeys;
  static constexpr int kScoreGroups = kTileKeys / 8;
  static constexpr int kKeySteps = kTileKeys / 16;

  __device__ Consumer(const AttentionArgs& args, uint8_t* smem, const Barriers<Traits>& barriers,
                      int group)
      : args_(args), smem_(smem), barriers_(barriers), group_(group) {
    const uint32_t base = ptx::smem_address(smem);
    const int row_group = group % Traits::kRowGroups;
    const int part = group / Traits::kRowGroups;
    queries_ = ptx::swizzle128_descriptor(base + row_group * 64 * 128, 16, 1024);
    keys_ = ptx::swizzle128_descriptor(base + Traits::kKeyOffset, 16, 1024);
    values_ = ptx::swizzle128_descriptor(
        base + Traits::kValueOffset + part * (Traits::kValueDims / 64) * Traits::kKeyChunkBytes,
        Traits::kKeyChunkBytes, 1024);
    Turns<Traits>::open(group);
  }

  /// Computes the unnormalised rows of a unit.
  __device__ __forceinline__ void run(const TileSetup& setup, const UnitReader<Traits>& unit,
                                      Accumulators<Traits>& result) {
    result.softmax = OnlineSoftmax();
    result.softmax.factor = args_.softcap > 0.0F ? kLog2E : args_.scale * kLog2E;
#pragma unroll
    for (int group = 0; group < Traits::kValueDims / 8; ++group) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        result.values[group][i] = 0.0F;
      }
    }
    const int32_t count = setup.walk.num_tiles;
    if (count == 0) {
      return;
    }
    full_in_flight_ = setup.full_in_flight;
    full_cached_ = setup.full_cached;
    ptx::mbarrier_wait(barriers_.query_full(), query_phase_);
    query_phase_ ^= 1;
    int32_t index = 0;
    if constexpr (kMaxShortTiles<kTileKeys> > 0) {
      if (setup.extent<kTileKeys>(0) == kShortTileKeys) {
        do {
          run_short(setup, unit, index, result);
          ++index;
        } while (kMaxShortTiles<kTileKeys> > 1 && index == 1 && index < count &&
                 setup.extent<kTileKeys>(index) == kShortTileKeys);
      }
    }
    if (index < count) {
      run_tiles(setup, unit, index, result);
    } else {
      release(barriers_.query_empty());
    }
    result.softmax.finish();
  }

 private:
  /// A short tile: nothing overlaps, but few keys are multiplied.
  __device__ __forceinline__ void run_short(const TileSetup& setup, const UnitReader<Traits>& unit,
                                            int32_t index, Accumulators<Traits>& result) {
    float scores[kShortTileKeys / 8][4];
    uint32_t probabilities[kShortTileKeys / 16][4];
    float rescale[2];
    ptx::mbarrier_wait(barriers_.key_full(key_.stage), key_.phase);
    issue_scores(scores);
    const uint32_t unmapped = read_unmapped();
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(scores);
    finish_scores(setup, unit, index, unmapped, scores, result.softmax, rescale);
    pack(scores, probabilities);
    if (index > 0) {
      scale_values(rescale, result.values);
    }
    wait_values(setup, index);
    issue_values(probabilities, result.values);
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(result.values);
    release(barriers_.value_empty(value_.stage));
    value_.advance();
  }

  /// Whole tiles from `first` on; the products of one tile run under the softmax of the next.
  __device__ __forceinline__ void run_tiles(const TileSetup& setup, const UnitReader<Traits>& unit,
                                            int32_t first, Accumulators<Traits>& result) {
    const int32_t count = setup.walk.num_tiles;
    float scores[kScoreGroups][4];
    uint32_t probabilities[kKeySteps][4];
    float rescale[2];
    ptx::mbarrier_wait(barriers_.key_full(key_.stage), key_.phase);
    issue_scores(scores);
    const uint32_t unmapped = read_unmapped();
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(scores);
    finish_scores(setup, unit, first, unmapped, scores, result.softmax, rescale);
    pack(scores, probabilities);
    scale_values(rescale, result.values);
    if (first + 1 < count) {
      ptx::mbarrier_wait(barriers_.key_full(key_.stage), key_.phase);
    }
#pragma unroll 1
    for (int32_t index = first + 1; index < count; ++index) {
      wait_values(setup, index - 1);
      Turns<Traits>::wait(group_);
      issue_scores(scores);
      issue_values(probabilities, result.values);
      Turns<Traits>::pass(group_);
      const uint32_t hidden = read_unmapped();
      ptx::wgmma_wait<1>();
      ptx::wgmma_hold(scores);
      finish_scores(setup, unit, index, hidden, scores, result.softmax, rescale);
      ptx::wgmma_hold(scores);
      // Waiting for the next keys here, not at the top, ends the basic block: otherwise the
      // compiler moves the exponentials after the wait for the value products, which they should
      // cover.
      if (index + 1 < count) {
        ptx::mbarrier_wait(barriers_.key_full(key_.stage), key_.phase);
      }
      ptx::wgmma_wait<0>();
      ptx::wgmma_hold(result.values);
      release(barriers_.value_empty(value_.stage));
      value_.advance();
      pack(scores, probabilities);
      scale_values(rescale, result.values);
    }
    release(barriers_.query_empty());
    wait_values(setup, count - 1);
    issue_values(probabilities, result.values);
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(result.values);
    release(barriers_.value_empty(value_.stage));
    value_.advance();
  }

  __device__ static __forceinline__ void scale_values(const float (&rescale)[2],
                                                      float (&values)[Traits::kValueDims / 8][4]) {
    if (__all_sync(kFullWarp, rescale[0] == 1.0F && rescale[1] == 1.0F)) {
      return;
    }
#pragma unroll
    for (int group = 0; group < Traits::kValueDims / 8; ++group) {
      values[group][0] *= rescale[0];
      values[group][1] *= rescale[0];
      values[group][2] *= rescale[1];
      values[group][3] *= rescale[1];
    }
  }

  __device__ __forceinline__ bool is_full(int32_t index) const {
    return contains(full_in_flight_, index) || contains(full_cached_, index);
  }

  __device__ __forceinline__ void release(uint32_t barrier) {
    if ((threadIdx.x & 31) == 0) {
      ptx::mbarrier_arrive(barrier);
    }
  }

  /// Scores of the first 8 * kGroups keys of the current key stage.
  template <int kGroups>
  __device__ __forceinline__ void issue_scores(float (&scores)[kGroups][4]) {
    const uint64_t keys = keys_ + ((key_.stage * Traits::kKeyBytes) >> 4);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Traits::kHeadDim / 16; ++step) {
      const int chunk = step / 4;
      const int inner = step % 4 * 32;
      ptx::wgmma_ss<T>(scores, queries_ + ((chunk * Traits::kQueryChunkBytes + inner) >> 4),
                       keys + ((chunk * Traits::kKeyChunkBytes + inner) >> 4), step != 0);
    }
    ptx::wgmma_commit();
  }

  template <int kSteps>
  __device__ __forceinline__ void issue_values(const uint32_t (&probabilities)[kSteps][4],
                                               float (&values)[Traits::kValueDims / 8][4]) {
    const uint64_t rows = values_ + ((value_.stage * Traits::kKeyBytes) >> 4);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int slice = 0; slice < Traits::kValueSlices; ++slice) {
        constexpr int kGroups = Traits::kValueDims / 8 / Traits::kValueSlices;
        auto& part = reinterpret_cast<float (&)[kGroups][4]>(values[slice * kGroups]);
        const int offset = step * 16 * 128 + slice * (kGroups / 8) * Traits::kKeyChunkBytes;
        ptx::wgmma_rs<T, 1>(part, probabilities[step], rows + (offset >> 4), true);
      }
    }
    ptx::wgmma_commit();
  }

  /// Waits until the value rows of tile `index` may be read.
  __device__ __forceinline__ void wait_values(const TileSetup& setup, int32_t index) {
    ptx::mbarrier_wait(barriers_.value_full(value_.stage), value_.phase);
    if (__builtin_expect(!is_full(index) && setup.has_invisible<kTileKeys>(index), 0)) {
      ptx::mbarrier_wait(barriers_.value_clean(value_.stage), (clean_phases_ >> value_.stage) & 1);
      clean_phases_ ^= 1U << value_.stage;
    }
  }

  /// The unmapped-page bits of the current key stage. One lane reads them, the one that releases
  /// the stage, and while the scores are being multiplied.
  __device__ __forceinline__ uint32_t read_unmapped() const {
    uint32_t bits = 0;
    if ((threadIdx.x & 31) == 0) {
      bits = *reinterpret_cast<const volatile uint32_t*>(
          smem_ + Barriers<Traits>::unmapped_offset(key_.stage));
    }
    return __shfl_sync(kFullWarp, bits, 0);
  }

  /// Releases the key stage, then caps, masks and exponentiates the scores of tile `index`.
  template <int kGroups>
  __device__ __forceinline__ void finish_scores(const TileSetup& setup,
                                                const UnitReader<Traits>& unit, int32_t index,
                                                uint32_t unmapped, float (&scores)[kGroups][4],
                                                OnlineSoftmax& softmax, float (&rescale)[2]) {
    release(barriers_.key_empty(key_.stage));
    key_.advance();
    if (__builtin_expect(args_.softcap > 0.0F, 0)) {
      const float inverse_cap = args_.scale / args_.softcap;
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          scores[group][i] = soft_capped(scores[group][i], inverse_cap, args_.softcap);
        }
      }
    }
    if (__builtin_expect(!is_full(index) || unmapped != 0, 0)) {
      mask(setup, unit, index, unmapped, scores);
    }
    softmax.template update<true>(scores, rescale);
  }

  /// Hides the keys a row may not see: outside its interval or the piece, in the hole, or on an
  /// unmapped page (bit i of `unmapped`: the i-th page of the tile).
  template <int kGroups>
  __device__ __forceinline__ void mask(const TileSetup& setup, const UnitReader<Traits>& unit,
                                       int32_t index, uint32_t unmapped,
                                       float (&scores)[kGroups][4]) {
    using Mask = ColumnMask<kGroups>;
    const int32_t base = setup.walk.template base<kTileKeys>(index);
    const KeyRange bounds = setup.walk.template bounds<kTileKeys>(index);
    const KeyRange& hole = setup.view.mask.hole;
    uint32_t shown = Mask::range(bounds.begin - base, bounds.end - base);
    if (hole.begin < hole.end) {
      shown &= ~Mask::range(hole.begin - base, hole.end - base);
    }
#pragma unroll 1
    for (; unmapped != 0; unmapped &= unmapped - 1) {
      const int32_t first = (__ffs(static_cast<int>(unmapped)) - 1) << args_.page_shift;
      shown &= ~Mask::range(first, first + args_.k_cache.page_size);
    }
    const int row =
        group_ % Traits::kRowGroups * 64 + (threadIdx.x >> 5) % 4 * 16 + (threadIdx.x & 31) / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t token = args_.by_group.divide(row + half * 8);
      const KeyRange range = token < setup.num_tokens ? unit.row(token) : KeyRange{0, 0};
      Mask::apply(shown & Mask::range(range.begin - base, range.end - base), half, scores);
    }
  }

  template <int kSteps>
  __device__ static __forceinline__ void pack(const float (&scores)[2 * kSteps][4],
                                              uint32_t (&probabilities)[kSteps][4]) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int group = 2 * step + i / 2;
        const int first = i % 2 * 2;
        probabilities[step][i] = pack_pair<T>(scores[group][first], scores[group][first + 1]);
      }
    }
  }

  const AttentionArgs& args_;
  uint8_t* smem_;
  const Barriers<Traits>& barriers_;
  const int group_;
  uint64_t queries_;
  uint64_t keys_;
  uint64_t values_;
  Ring<Traits::kStages> key_;
  Ring<Traits::kStages> value_;
  uint32_t query_phase_ = 0;
  uint32_t clean_phases_ = 0;
  KeyRange full_in_flight_;  // of the unit, kept in registers
  KeyRange full_cached_;
};

}  // namespace diffulex::cuda::sm90
