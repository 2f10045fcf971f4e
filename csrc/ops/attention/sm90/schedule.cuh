// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which unit of work a CTA (or cluster) computes when, from device metadata alone. One warp decides
// and tells the others through shared memory.

#include <cstdint>

#include "ops/attention/args.cuh"
#include "ops/attention/sm90/traits.cuh"
#include "ops/shared/cuda/cluster.cuh"
#include "ops/shared/cuda/mbarrier.cuh"
#include "ops/shared/cuda/pdl.cuh"
#include "ops/shared/cuda/reduce.cuh"
#include "ops/shared/cuda/tile_walk.cuh"

namespace diffulex::cuda::sm90 {

/// Units in the order request, row tile (last, that is heaviest, first), KV head. Empty tiles do
/// not count, so a short request beside a long one costs nothing. The lanes of a warp hold the
/// metadata of 32 requests, read in one go.
class UnitCursor final {
 public:
  __device__ explicit UnitCursor(const AttentionArgs& args) : args_(args) { load(); }

  /// Begins anew with the metadata of now.
  __device__ __forceinline__ void restart() {
    block_ = 0;
    before_ = 0;
    load();
  }

  /// True while the cursor is among the first requests and their metadata is what it was.
  __device__ __forceinline__ bool is_current() const {
    return block_ == 0 && __all_sync(kFullWarp, raw_.equals(read_block()));
  }

  /// Finds unit `index`; indices must not decrease. False past the last unit.
  __device__ __forceinline__ bool locate(int64_t index, AttentionWork& work, RequestView& view) {
    while (index - before_ >= total_) {
      if (block_ + 32 >= args_.num_reqs) {
        return false;
      }
      before_ += total_;
      block_ += 32;
      load();
    }
    const int32_t offset = static_cast<int32_t>(index - before_);
    const int owner = __ffs(__ballot_sync(kFullWarp, last_ > offset)) - 1;
    RawRequest raw;
    raw.start = __shfl_sync(kFullWarp, raw_.start, owner);
    raw.end = __shfl_sync(kFullWarp, raw_.end, owner);
    raw.valid_slice = __shfl_sync(kFullWarp, raw_.valid_slice, owner);
    raw.context_len = __shfl_sync(kFullWarp, raw_.context_len, owner);
    raw.mask_kind = __shfl_sync(kFullWarp, raw_.mask_kind, owner);
    raw.prefix_len = __shfl_sync(kFullWarp, raw_.prefix_len, owner);
    raw.padded_prefix_len = __shfl_sync(kFullWarp, raw_.padded_prefix_len, owner);
    raw.q_start = __shfl_sync(kFullWarp, raw_.q_start, owner);
    view = view_request(args_, raw);
    const int32_t tiles = num_tiles(view.mask.num_valid);
    const int32_t first = __shfl_sync(kFullWarp, last_, owner) - tiles * args_.num_kv_heads;
    const int32_t unit = offset - first;
    const int32_t rest = args_.by_kv_heads.divide(unit);
    work.request = block_ + owner;
    work.kv_head = unit - rest * args_.num_kv_heads;
    work.split = 0;
    work.tile = tiles - 1 - rest;
    return true;
  }

 private:
  /// Row tiles of a request that hold real rows.
  __device__ __forceinline__ int32_t num_tiles(int32_t rows) const {
    return args_.by_tile_tokens.divide(rows + args_.tokens_per_tile - 1);
  }

  /// The metadata of this lane's request of the block.
  __device__ __forceinline__ RawRequest read_block() const {
    const int32_t request = block_ + static_cast<int32_t>(threadIdx.x & 31);
    return request < args_.num_reqs ? read_request(args_, request) : RawRequest();
  }

  /// Each lane takes one request of the block; `last_` is the inclusive prefix sum of units.
  __device__ __forceinline__ void load() {
    const int lane = threadIdx.x & 31;
    raw_ = read_block();
    last_ = num_tiles(live_rows(args_, raw_)) * args_.num_kv_heads;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int32_t other = __shfl_up_sync(kFullWarp, last_, distance);
      last_ += lane >= distance ? other : 0;
    }
    total_ = __shfl_sync(kFullWarp, last_, 31);
  }

  const AttentionArgs& args_;
  int32_t block_ = 0;   // first request of the block
  int64_t before_ = 0;  // units of earlier blocks
  int32_t total_ = 0;   // units of this block
  int32_t last_ = 0;
  RawRequest raw_;
};

/// The units of one CTA: one where keys are split (grid: units by clusters of a unit), otherwise a
/// static stride that turns round after every pass, so that heavy and light units even out.
class UnitList final {
 public:
  __device__ explicit UnitList(const AttentionArgs& args) : args_(args), cursor_(args) {}

  __device__ __forceinline__ bool next(AttentionWork& work, RequestView& view) {
    if (args_.num_splits > 1) {
      const bool is_cluster = args_.cluster_size > 1;
      if (pass_++ > 0 ||
          !cursor_.locate(is_cluster ? ptx::cluster_index() : blockIdx.x, work, view)) {
        return false;
      }
      work.split = static_cast<int32_t>(blockIdx.y) * args_.cluster_size +
                   (is_cluster ? static_cast<int32_t>(ptx::cluster_rank()) : 0);
      return true;
    }
    const int64_t position = (pass_ & 1) != 0 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const int64_t index = pass_ * gridDim.x + position;
    ++pass_;
    return cursor_.locate(index, work, view);
  }

  /// True when the first unit is still what next() said.
  __device__ __forceinline__ bool is_current() const { return cursor_.is_current(); }

  /// Begins anew with the metadata of now.
  __device__ __forceinline__ void restart() {
    pass_ = 0;
    cursor_.restart();
  }

 private:
  const AttentionArgs& args_;
  UnitCursor cursor_;
  int64_t pass_ = 0;
};

/// Keys of a short tile, and the most short tiles that a walk begins with.
inline constexpr int32_t kShortTileKeys = 32;
template <int kTileKeys>
inline constexpr int32_t kMaxShortTiles = min_i32(kTileKeys / (2 * kShortTileKeys), 2);

/// A row tile and the keys it walks.
struct TileSetup final {
  RequestView view;
  AttentionWork work;
  int32_t first_row;    // token index inside the request
  int32_t first_token;  // packed row of it
  int32_t num_tokens;
  KeyRange first;  // interval of the first row
  KeyRange last;   // and of the last
  TileWalk walk;
  KeyRange full_in_flight;  // indices of tiles all of whose keys all rows see (page ids aside)
  KeyRange full_cached;

  /// The unit `work` of request `view`, of which `request` is a copy; false for splits and tiles
  /// that hold nothing. Called by a warp, which also writes the intervals of the tokens to `rows`.
  template <int kTileKeys>
  __device__ __forceinline__ bool make(const AttentionArgs& args, const RequestView& request,
                                       KeyRange* rows) {
    first_row = work.tile * args.tokens_per_tile;
    first_token = request.first_token + first_row;
    num_tokens = min_i32(args.tokens_per_tile, request.mask.num_valid - first_row);
    if (work.split >= request.splits || num_tokens <= 0) {
      return false;
    }
    KeyRange mine;
#pragma unroll 1
    for (int32_t token = threadIdx.x & 31; token < num_tokens; token += 32) {
      mine = row_interval(request.mask, first_row + token);
      rows[token] = mine;
    }
    __syncwarp();
    first = rows[0];
    last = rows[num_tokens - 1];
    __syncwarp();  // the next unit may write `rows` again
    walk = TileWalk::make<kTileKeys>(
        split_key_range(tile_key_range(first, last), request.mask.context_len, request.splits,
                        work.split, kTileKeys),
        request.mask.context_len);
    find_full<kTileKeys>(request.mask.hole);
    return true;
  }

  /// Hands what make() found to another setup of the unit.
  __device__ __forceinline__ void copy_plan(TileSetup& other) const {
    other.first_row = first_row;
    other.first_token = first_token;
    other.num_tokens = num_tokens;
    other.first = first;
    other.last = last;
    other.walk = walk;
    other.full_in_flight = full_in_flight;
    other.full_cached = full_cached;
  }

  __device__ __forceinline__ bool is_full(int32_t index) const {
    return contains(full_in_flight, index) || contains(full_cached, index);
  }

  /// Key rows of tile `index` that are multiplied: a walk may begin with short tiles, typically the
  /// block in flight and the end of what is cached.
  template <int kTileKeys>
  __device__ __forceinline__ int32_t extent(int32_t index) const {
    const auto is_short = [this](int32_t tile) {
      return walk.template bounds<kTileKeys>(tile).end - walk.template base<kTileKeys>(tile) <=
             kShortTileKeys;
    };
    const bool is_leading =
        index == 0 || (kMaxShortTiles<kTileKeys> > 1 && index == 1 && is_short(0));
    return is_leading && is_short(index) ? min_i32(kShortTileKeys, kTileKeys) : kTileKeys;
  }

  /// Keys of tile `index` that some row may see, hole included.
  template <int kTileKeys>
  __device__ __forceinline__ KeyRange seen(int32_t index) const {
    const KeyRange bounds = walk.template bounds<kTileKeys>(index);
    return KeyRange{max_i32(bounds.begin, first.begin), min_i32(bounds.end, last.end)};
  }

  /// True when a row of tile `index` that was copied, or not even written, must not be read.
  template <int kTileKeys>
  __device__ __forceinline__ bool has_invisible(int32_t index) const {
    if (is_full(index)) {
      return false;
    }
    const KeyRange range = seen<kTileKeys>(index);
    const KeyRange& hole = view.mask.hole;
    const bool meets_hole = !walk.is_in_flight(index) && hole.begin < hole.end &&
                            range.begin < hole.end && hole.begin < range.end;
    return meets_hole || range.end - range.begin != extent<kTileKeys>(index);
  }

 private:
  /// Index ranges of full tiles; below a hole none counts, which costs time only.
  template <int kTileKeys>
  __device__ __forceinline__ void find_full(const KeyRange& hole) {
    const int32_t low = max_i32(walk.piece.begin, last.begin);
    const int32_t high = min_i32(walk.piece.end, first.end);
    const int32_t base = max_i32(walk.piece.begin, walk.context_len);
    full_in_flight.begin = low > base ? ceil_div_i32(low - base, kTileKeys) : 0;
    full_in_flight.end = high > base ? (high - base) / kTileKeys : 0;
    const int32_t cached_low = hole.begin < hole.end ? max_i32(low, hole.end) : low;
    const int32_t top = walk.num_in_flight + walk.last_cached;  // the index of tile 0
    full_cached.begin = top + 1 - min_i32(high, walk.context_len) / kTileKeys;
    full_cached.end = top + 1 - ceil_div_i32(cached_low, kTileKeys);
    full_cached.begin = max_i32(full_cached.begin, walk.num_in_flight);
  }
};

/// What the scheduler tells the other warps, in shared memory. The intervals of the tokens follow.
struct UnitRecord final {
  TileSetup setup;
  int32_t is_unit;    // 0 ends the list
  int32_t is_live;    // 0 for a split that holds nothing
  int32_t is_shared;  // the cluster has splits of the unit, and the unit more than one
};

/// A warp's place in the sequence of units.
template <typename Traits>
class UnitReader final {
 public:
  static_assert(sizeof(UnitRecord) <= 256, "the record must fit");

  __device__ UnitReader(uint8_t* smem, const Barriers<Traits>& barriers)
      : smem_(smem), barriers_(barriers) {}

  /// Waits for the next unit; null after the last.
  __device__ __forceinline__ const UnitRecord* next() {
    ptx::mbarrier_wait(barriers_.unit_full(ring_.stage), ring_.phase);
    const UnitRecord* record = slot();
    return record->is_unit != 0 ? record : nullptr;
  }
  /// Interval of token `token` of the unit.
  __device__ __forceinline__ KeyRange row(int32_t token) const {
    return reinterpret_cast<const KeyRange*>(smem_ + Traits::kUnitOffset +
                                             ring_.stage * Traits::kUnitBytes + 256)[token];
  }
  /// This lane is done with the unit.
  __device__ __forceinline__ void release() {
    ptx::mbarrier_arrive(barriers_.unit_empty(ring_.stage));  // every lane has read
    ring_.advance();
  }

 private:
  __device__ __forceinline__ const UnitRecord* slot() const {
    return reinterpret_cast<const UnitRecord*>(smem_ + Traits::kUnitOffset +
                                               ring_.stage * Traits::kUnitBytes);
  }

  uint8_t* smem_;
  const Barriers<Traits>& barriers_;
  Ring<2> ring_;
};

/// Then lets the next kernel start: it waits for this one before it touches what this one writes.
__device__ __forceinline__ void wait_for_kernels_ahead() {
  pdl_wait();
  pdl_launch_dependents();
}

/// The scheduler warp: publishes the units of this CTA one ahead of the others. The first is worked
/// out while the kernels ahead may still run, from metadata that they rarely write, and published
/// after they have ended if the metadata is still the same.
template <typename Traits>
__device__ __forceinline__ void schedule_units(const AttentionArgs& args, uint8_t* smem,
                                               const Barriers<Traits>& barriers) {
  const int lane = threadIdx.x & 31;
  bool has_waited = false;
  UnitList units(args);
  Ring<2> ring;
  bool is_unit = true;
  while (is_unit) {
    TileSetup setup;
    is_unit = units.next(setup.work, setup.view);
    ptx::mbarrier_wait(barriers.unit_empty(ring.stage), ring.phase ^ 1);
    uint8_t* slot = smem + Traits::kUnitOffset + ring.stage * Traits::kUnitBytes;
    UnitRecord* record = reinterpret_cast<UnitRecord*>(slot);
    // Written in two parts, and whether or not it is published: registers are few. With a converter
    // they do not hold the request either.
    __syncwarp();  // all lanes have read what a unit that was not published left here
    if (lane == 0) {
      record->setup.view = setup.view;
      record->setup.work = setup.work;
    }
    __syncwarp();
    const RequestView& request = Traits::kIsCoded ? record->setup.view : setup.view;
    const bool is_live = is_unit && setup.make<Traits::kTileKeys>(
                                        args, request, reinterpret_cast<KeyRange*>(slot + 256));
    if (lane == 0) {
      setup.copy_plan(record->setup);
      record->is_unit = is_unit ? 1 : 0;
      record->is_live = is_live ? 1 : 0;
      const int32_t first_split = static_cast<int32_t>(blockIdx.y) * args.cluster_size;
      record->is_shared = is_unit && request.splits > 1 && first_split < request.splits ? 1 : 0;
    }
    if (!has_waited) {
      has_waited = true;
      wait_for_kernels_ahead();
      if (!units.is_current()) {
        units.restart();
        is_unit = true;
        continue;
      }
    }
    if (is_unit && !is_live && args.num_splits == 1) {
      continue;
    }
    ptx::mbarrier_arrive(barriers.unit_full(ring.stage));  // every lane has written
    ring.advance();
  }
}

}  // namespace diffulex::cuda::sm90
