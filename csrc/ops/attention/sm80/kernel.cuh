// SPDX-License-Identifier: Apache-2.0
#pragma once

// Block-diffusion paged attention on mma.sync: one CTA per (request, KV head, row tile, split),
// rows packed as token * G + g, K and V gathered by cp.async, online softmax in registers.

#include <cstdint>

#include "ops/attention/args.cuh"
#include "ops/attention/online_softmax.cuh"
#include "ops/attention/sm80/epilogue.cuh"
#include "ops/attention/sm80/loader.cuh"
#include "ops/attention/sm80/mainloop.cuh"
#include "ops/attention/sm80/traits.cuh"
#include "ops/shared/cuda/ptx.cuh"

namespace diffulex::cuda::sm80 {

/// Everything a CTA knows about its tile before the first key.
template <typename Traits>
struct TileSetup final {
  TileRows rows;
  TileWalk walk;
  KeyRange first_row;  // interval of the first row of the tile
  KeyRange last_row;   // and of the last
  KeyRange thread_rows[2];
};

template <typename Traits>
__device__ __forceinline__ TileSetup<Traits> make_setup(const AttentionArgs& args,
                                                        const RequestView& view,
                                                        const AttentionWork& work) {
  TileSetup<Traits> setup;
  const int32_t first = work.tile * args.tokens_per_tile;
  const int32_t count = min_i32(args.tokens_per_tile, view.mask.num_valid - first);
  setup.rows =
      TileRows{work.request, first, view.first_token + first, count * args.group, work.kv_head};
  setup.first_row = row_interval(view.mask, first);
  setup.last_row = row_interval(view.mask, first + count - 1);
  const KeyRange range = tile_key_range(setup.first_row, setup.last_row);
  setup.walk = TileWalk::make<Traits::kTileKeys>(
      split_key_range(range, view.mask.context_len, view.splits, work.split, Traits::kTileKeys),
      view.mask.context_len);
  const int warp_row = (threadIdx.x >> 5) % Traits::kRowWarps * 16 + (threadIdx.x & 31) / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t token = (warp_row + half * 8) / args.group;
    setup.thread_rows[half] =
        token < count ? row_interval(view.mask, first + token) : KeyRange{0, 0};
  }
  return setup;
}

template <typename Traits>
__device__ __forceinline__ void process_tile(const typename Traits::Args& args,
                                             const RequestView& view, const AttentionWork& work,
                                             uint8_t* smem) {
  constexpr int kStages = Traits::kStages;
  constexpr int kTileKeys = Traits::kTileKeys;
  const TileSetup<Traits> setup = make_setup<Traits>(args, view, work);
  const TileWalk& walk = setup.walk;
  const uint32_t base = ptx::smem_address(smem);
  uint8_t* flags = smem + Traits::kFlagOffset;

  OnlineSoftmax softmax;
  softmax.factor = args.softcap > 0.0F ? kLog2E : args.scale * kLog2E;
  float acc[Traits::kValueDims / 8][4] = {};
  KeyLoader<Traits> loader(args, view, work.request, work.kv_head, walk);
  // Bit s: every page this thread copied into stage s is mapped.
  uint32_t mapped = 0;
  const auto issue = [&](int32_t index) {
    if (index < walk.num_tiles) {
      const int stage = index % kStages;
      const bool is_mapped = loader.issue(
          index, base + Traits::kKeyOffset + stage * Traits::kKeyBytes,
          base + Traits::kValueOffset + stage * Traits::kKeyBytes, flags + stage * kTileKeys);
      mapped = (mapped & ~(1U << stage)) | (static_cast<uint32_t>(is_mapped) << stage);
      loader.fetch_pages(index + 1);
    }
    ptx::cp_async_commit();
  };

  load_queries<Traits>(args, base, setup.rows.first_token, setup.rows.num_rows, work.kv_head);
  loader.fetch_pages(0);
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    issue(stage);
  }
  QueryFragments<Traits> queries;
  for (int32_t index = 0; index < walk.num_tiles; ++index) {
    const int stage = index % kStages;
    ptx::cp_async_wait<kStages - 2>();
    // Also the point after which the stage of the previous tile may be overwritten.
    const bool all_mapped = __syncthreads_and((mapped >> stage) & 1) != 0;
    if (index == 0) {
      queries.init(base);
    }
    issue(index + kStages - 1);
    float scores[kTileKeys / 8][4];
    multiply_keys<Traits>(queries, base + Traits::kKeyOffset + stage * Traits::kKeyBytes, scores);
    if (args.softcap > 0.0F) {
      const float inverse_cap = args.scale / args.softcap;
#pragma unroll
      for (int group = 0; group < kTileKeys / 8; ++group) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          scores[group][i] = soft_capped(scores[group][i], inverse_cap, args.softcap);
        }
      }
    }
    const KeyRange bounds = walk.template bounds<kTileKeys>(index);
    const TileClass tile_class = classify_tile(setup.first_row, setup.last_row, view.mask.hole,
                                               view.mask.context_len, bounds);
    if (tile_class != TileClass::kFull || bounds.end - bounds.begin != kTileKeys || !all_mapped) {
      const KeyRange rows[2] = {{max_i32(setup.thread_rows[0].begin, bounds.begin),
                                 min_i32(setup.thread_rows[0].end, bounds.end)},
                                {max_i32(setup.thread_rows[1].begin, bounds.begin),
                                 min_i32(setup.thread_rows[1].end, bounds.end)}};
      mask_scores(scores, rows, view.mask.hole, walk.template base<kTileKeys>(index),
                  all_mapped ? nullptr : flags + stage * kTileKeys);
    }
    float rescale[2];
    softmax.update(scores, rescale);
#pragma unroll
    for (int group = 0; group < Traits::kValueDims / 8; ++group) {
      acc[group][0] *= rescale[0];
      acc[group][1] *= rescale[0];
      acc[group][2] *= rescale[1];
      acc[group][3] *= rescale[1];
    }
    multiply_values<Traits>(scores, base + Traits::kValueOffset + stage * Traits::kKeyBytes, acc);
  }
  ptx::cp_async_wait<0>();
  __syncthreads();
  softmax.finish();
  if (view.splits > 1) {
    store_partial<Traits>(args, setup.rows, work.split, softmax, acc);
  } else {
    store_final<Traits>(args, setup.rows, softmax, acc, smem);
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    attention_kernel(const __grid_constant__ typename Traits::Args args) {
  extern __shared__ __align__(128) uint8_t smem[];
  const int64_t count = num_work(args);
  const int64_t total = count + num_zero_work(args);
  for (int64_t index = blockIdx.x; index < total; index += gridDim.x) {
    if (index >= count) {
      zero_rows<typename Traits::Element>(args, index - count);
      continue;
    }
    const AttentionWork work = work_at(args, index);
    const RequestView view = load_request(args, work.request);
    if (work.split >= view.splits || work.tile * args.tokens_per_tile >= view.mask.num_valid) {
      continue;
    }
    process_tile<Traits>(args, view, work, smem);
    __syncthreads();  // shared memory is reused by the next unit
  }
}

}  // namespace diffulex::cuda::sm80
