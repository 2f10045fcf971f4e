// SPDX-License-Identifier: Apache-2.0
#include "diffulex/ops/moe.h"

#include <algorithm>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "diffulex/core/thread_pool.h"
#include "ops/moe/config.h"
#include "ops/moe_case.h"

namespace diffulex::test {
namespace {

using testing::HasSubstr;

constexpr DType kDTypes[] = {DType::kF32, DType::kF16, DType::kBF16};

void expect_values(const TestTensor& out, const std::vector<double>& expected, double bound) {
  for (int64_t i = 0; i < out.elements(); ++i) {
    const double want = expected[static_cast<size_t>(i)];
    ASSERT_LE(std::abs(out.get_offset(i) - want), bound * std::max(1.0, std::abs(want)))
        << "element " << i << " want " << want;
  }
}

TEST(FusedMoe, MatchesTheDefinition) {
  std::mt19937_64 random(1);
  for (uint64_t seed = 0; seed < 90; ++seed) {
    MoeCaseShape shape;
    shape.dtype = kDTypes[seed % 3];
    shape.num_tokens = pick(&random, {1, 2, 5, 17, 64, 65, 130});
    shape.num_experts = pick(&random, {1, 3, 8, 40});
    shape.top_k = pick(&random, {1, 2, 3, 8});
    shape.hidden = pick(&random, {2, 6, 32, 66, 72, 130});
    shape.width = pick(&random, {2, 10, 16, 64, 70});
    shape.has_map = seed % 4 == 1;
    shape.has_addend = seed % 3 == 2;
    shape.act = static_cast<Activation>(seed / 3 % 3);
    shape.weight_on_input = shape.top_k == 1;
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    MoeCase moe(shape, seed);
    const Status status = fused_moe(moe.params(), ExecContext{});
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_NO_FATAL_FAILURE(expect_values(moe.out, moe.expected(), moe_bound(shape.dtype)));
  }
}

TEST(FusedMoe, DoesNotDependOnThreads) {
  ThreadPool pool(2);
  ExecContext threaded;
  threaded.parallel_for = ThreadPool::parallel_for;
  threaded.parallel_pool = &pool;
  MoeCaseShape shape;
  shape.num_tokens = 150;
  shape.hidden = 130;
  shape.width = 96;
  MoeCase serial(shape, 5);
  MoeCase parallel(shape, 5);
  ASSERT_TRUE(fused_moe(serial.params(), ExecContext{}).ok());
  ASSERT_TRUE(fused_moe(parallel.params(), threaded).ok());
  ASSERT_EQ(serial.out.bytes(), parallel.out.bytes());
}

TEST(FusedMoe, ReadsOnlyWhatIsRouted) {
  MoeCaseShape shape;
  shape.num_tokens = 20;
  MoeCase clean(shape, 6);
  MoeCase dirty(shape, 6);
  for (MoeCase* moe : {&clean, &dirty}) {
    std::replace(moe->ids.begin(), moe->ids.end(), 3, -1);
    moe->ids[8] = moe->ids[9] = -4;
  }
  for (int64_t h = 0; h < shape.hidden; ++h) {
    dirty.x.set({4, h}, kNaN);
    for (int64_t i = 0; i < shape.width; ++i) {
      dirty.w13.set({3, i, h}, kNaN);
      dirty.w2.set({3, h, i}, kInf);
    }
  }
  for (size_t slot = 0; slot < dirty.ids.size(); ++slot) {
    dirty.weights[slot] = dirty.ids[slot] < 0 ? std::nanf("") : dirty.weights[slot];
  }
  ASSERT_TRUE(fused_moe(clean.params(), ExecContext{}).ok());
  ASSERT_TRUE(fused_moe(dirty.params(), ExecContext{}).ok());
  ASSERT_EQ(clean.out.bytes(), dirty.out.bytes());
  for (int64_t h = 0; h < shape.hidden; ++h) {
    ASSERT_EQ(clean.out.get({4, h}), 0.0);
  }
}

TEST(FusedMoe, NamesTheWrongId) {
  MoeCase moe(MoeCaseShape{}, 7);
  moe.ids[3] = 4;
  Status status = fused_moe(moe.params(), ExecContext{});
  EXPECT_EQ(status.code(), StatusCode::kOutOfRange);
  EXPECT_THAT(status.message(), HasSubstr("topk_ids[3]: expected an expert below 4, got 4"));
  FusedMoeParams params = moe.params();
  params.w2_scale = ref_of(moe.weights);
  status = fused_moe(params, ExecContext{});
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_THAT(status.message(), HasSubstr("w2_scale: expected none"));
}

/// sorted_slots, offsets and tiles of one call, poisoned before.
struct Permutation {
  Permutation(std::vector<int32_t> topk_ids, int64_t top_k, int32_t num_local, int32_t tile,
              std::vector<int32_t> expert_map = {})
      : ids(std::move(topk_ids)), map(std::move(expert_map)) {
    const auto num_slots = static_cast<int64_t>(ids.size());
    sorted.assign(ids.size(), -77);
    offsets.assign(static_cast<size_t>(num_local) + 1, -77);
    tile_expert.assign(static_cast<size_t>(moe_max_tiles(num_slots, num_local, tile)), -77);
    tile_start = tile_expert;
    counters = {-77, -77};
    MoePermuteParams params;
    params.topk_ids = ref_of(ids, {num_slots / top_k, top_k});
    if (!map.empty()) {
      params.expert_map = ref_of(map);
    }
    params.sorted_slots = ref_of(sorted);
    params.expert_offsets = ref_of(offsets);
    params.tile_expert = ref_of(tile_expert);
    params.tile_start = ref_of(tile_start);
    params.counters = ref_of(counters);
    params.num_local_experts = num_local;
    params.tile = tile;
    status = moe_permute(params, ExecContext{});
  }

  std::vector<int32_t> ids;
  std::vector<int32_t> map;
  std::vector<int32_t> sorted;
  std::vector<int32_t> offsets;
  std::vector<int32_t> tile_expert;
  std::vector<int32_t> tile_start;
  std::vector<int32_t> counters;
  Status status;
};

TEST(MoePermute, GroupsInSlotOrder) {
  const Permutation result({2, 0, -1, 2, 2, 0}, 2, 3, 2);
  ASSERT_TRUE(result.status.ok()) << result.status.message();
  EXPECT_EQ(result.sorted, (std::vector<int32_t>{1, 5, 0, 3, 4, -1}));
  EXPECT_EQ(result.offsets, (std::vector<int32_t>{0, 2, 2, 5}));
  EXPECT_EQ(result.counters, (std::vector<int32_t>{3, 5}));
  EXPECT_EQ(result.tile_expert, (std::vector<int32_t>{0, 2, 2, -1, -1, -1}));
  EXPECT_EQ(result.tile_start, (std::vector<int32_t>{0, 2, 4, -1, -1, -1}));
}

TEST(MoePermute, FollowsTheMap) {
  const Permutation result({0, 1, 2, 3}, 1, 2, 16, {1, -1, 1, 0});
  ASSERT_TRUE(result.status.ok()) << result.status.message();
  EXPECT_EQ(result.sorted, (std::vector<int32_t>{3, 0, 2, -1}));
  EXPECT_EQ(result.offsets, (std::vector<int32_t>{0, 1, 3}));
  const Permutation wrong({0}, 1, 2, 16, {2});
  EXPECT_THAT(wrong.status.message(), HasSubstr("expert_map[0]: expected a local expert below 2"));
}

TEST(MoePermute, WithoutSlotsTheOffsetsAreWritten) {
  const Permutation result({}, 1, 3, 16);
  ASSERT_TRUE(result.status.ok()) << result.status.message();
  EXPECT_EQ(result.offsets, (std::vector<int32_t>{0, 0, 0, 0}));
  EXPECT_EQ(result.counters, (std::vector<int32_t>{0, 0}));
}

TEST(MoePermute, EverySlotOnceInRandomCases) {
  std::mt19937_64 random(3);
  for (int trial = 0; trial < 200; ++trial) {
    const auto num_local = static_cast<int32_t>(uniform(&random, 1, 20));
    const auto tile = static_cast<int32_t>(uniform(&random, 1, 9));
    const int64_t top_k = uniform(&random, 1, 4);
    std::vector<int32_t> ids(static_cast<size_t>(top_k * uniform(&random, 0, 30)));
    for (int32_t& id : ids) {
      id = static_cast<int32_t>(uniform(&random, -1, num_local - 1));
    }
    const Permutation result(ids, top_k, num_local, tile);
    ASSERT_TRUE(result.status.ok());
    int32_t position = 0;
    int32_t num_tiles = 0;
    for (int32_t expert = 0; expert < num_local; ++expert) {
      ASSERT_EQ(result.offsets[static_cast<size_t>(expert)], position);
      int32_t in_tile = 0;
      for (size_t slot = 0; slot < ids.size(); ++slot) {
        if (ids[slot] != expert) {
          continue;
        }
        ASSERT_EQ(result.sorted[static_cast<size_t>(position)], static_cast<int32_t>(slot));
        if (in_tile % tile == 0) {
          ASSERT_EQ(result.tile_expert[static_cast<size_t>(num_tiles)], expert);
          ASSERT_EQ(result.tile_start[static_cast<size_t>(num_tiles)], position);
          ++num_tiles;
        }
        ++in_tile;
        ++position;
      }
    }
    ASSERT_EQ(result.counters, (std::vector<int32_t>{num_tiles, position}));
  }
}

TEST(FusedExpertsPacked, IsFusedMoeOfGroupedRows) {
  MoeCaseShape shape;
  shape.num_tokens = 70;
  shape.top_k = 1;
  MoeCase moe(shape, 9);
  // Rows 0..1 go to expert 0, none to 1, 2..67 to 2, 68 to 3, and 69 to nobody.
  std::vector<int32_t> offsets = {0, 2, 2, 68, 69};
  for (int32_t row = 0; row < 70; ++row) {
    moe.ids[static_cast<size_t>(row)] = row < 2 ? 0 : (row < 68 ? 2 : (row < 69 ? 3 : -1));
  }
  TestTensor packed_out = moe.out;
  FusedExpertsPackedParams params;
  params.x = moe.x.ref();
  params.w13 = moe.w13.ref();
  params.w2 = moe.w2.ref();
  params.expert_offsets = ref_of(offsets);
  params.row_weights = ref_of(moe.weights);
  params.out = packed_out.ref();
  const Status status = fused_experts_packed(params, ExecContext{});
  ASSERT_TRUE(status.ok()) << status.message();
  ASSERT_NO_FATAL_FAILURE(expect_values(packed_out, moe.expected(), moe_bound(shape.dtype)));
  for (int64_t h = 0; h < shape.hidden; ++h) {
    ASSERT_EQ(packed_out.get({69, h}), 0.0);
  }
}

TEST(MoeCombine, AddsInAscendingOrderAndRoundsOnce) {
  // 1 + 2^-9 + 2^-9 in bfloat16: every single addition would round back to 1.
  TestTensor slots(DType::kBF16, {3, 1});
  slots.set({0, 0}, 1.0);
  slots.set({1, 0}, 1.0 / 512);
  slots.set({2, 0}, 1.0 / 512);
  TestTensor addend(DType::kF32, {1, 1});
  addend.set({0, 0}, 1.0 / 256);
  TestTensor out(DType::kBF16, {1, 1});
  std::vector<float> weights = {1.0F, 1.0F, 1.0F};
  std::vector<int32_t> ids = {0, 1, 2};
  MoeCombineParams params;
  params.slot_out = slots.ref();
  params.topk_weights = ref_of(weights, {1, 3});
  params.topk_ids = ref_of(ids, {1, 3});
  params.addend = addend.ref();
  params.out = out.ref();
  ASSERT_TRUE(moe_combine(params, ExecContext{}).ok());
  EXPECT_EQ(out.get({0, 0}), 1.0 + 1.0 / 128);
}

TEST(FusedMoe, TilesWantTheWorkspaceOfTheirRows) {
  TestTensor x(DType::kBF16, {32, 256});
  TestTensor w13(DType::kU8, {3, 512 / 8, 256 / 64, 32, 8});
  TestTensor w2(DType::kU8, {3, 256 / 8, 256 / 64, 32, 8});
  TestTensor w13_scale(DType::kBF16, {3, 2, 512});
  TestTensor w2_scale(DType::kBF16, {3, 2, 256});
  TestTensor weights(DType::kF32, {32, 2});
  TestTensor ids(DType::kI32, {32, 2});
  TestTensor out = x;
  FusedMoeParams params;
  params.x = x.ref();
  params.w13 = w13.ref();
  params.w2 = w2.ref();
  params.w13_scale = w13_scale.ref();
  params.w2_scale = w2_scale.ref();
  params.topk_weights = weights.ref();
  params.topk_ids = ids.ref();
  params.out = out.ref();
  ExecContext context;
  context.device = Device::kCuda;
  const size_t needed =
      fused_moe_workspace_bytes({32, 2, 3, 256, 256, DType::kBF16}, Device::kCuda);
  std::vector<uint8_t> workspace(256);
  context.workspace = workspace.data();
  context.workspace_bytes = needed - 1;
  EXPECT_THAT(fused_moe(params, context).message(),
              HasSubstr("workspace: expected at least " + std::to_string(needed)));
}

TEST(MoeConfig, Tiles) {
  EXPECT_EQ(moe_max_tiles(0, 8, 16), 0);
  EXPECT_EQ(moe_max_tiles(3, 8, 16), 1 + 3);
  EXPECT_EQ(moe_max_tiles(100, 8, 16), 7 + 8);
  EXPECT_EQ(choose_moe_tile(256, 256, false), 16);
  EXPECT_EQ(choose_moe_tile(8 * 64, 64, false), 16);
  EXPECT_EQ(choose_moe_tile(9 * 64, 64, false), 32);
  EXPECT_EQ(choose_moe_tile(1 << 20, 64, false), 128);
  EXPECT_EQ(choose_moe_wgmma_tile(16 * 8, 16, 256, false), 16);
  EXPECT_EQ(choose_moe_wgmma_tile(17 * 8, 17, 256, false), 32);
  EXPECT_EQ(choose_moe_wgmma_tile(33 * 8, 33, 256, false), 64);
  EXPECT_EQ(choose_moe_wgmma_tile(24 * 64, 192, 64, false), 64);
  EXPECT_EQ(choose_moe_wgmma_tile(25 * 64, 200, 64, false), 96);
  EXPECT_EQ(choose_moe_wgmma_tile(40 * 64, 320, 64, false), 96);
  EXPECT_EQ(choose_moe_wgmma_tile(41 * 64, 328, 64, false), 128);
  EXPECT_EQ(choose_moe_wgmma_tile(89 * 64, 712, 64, false), 160);
  EXPECT_EQ(choose_moe_wgmma_tile(133 * 64, 1064, 64, false), kMoePairTile);
  EXPECT_EQ(choose_moe_wgmma_tile(8, 1, 64, true), 64);
  // One eighth of the experts gets one eighth of the slots, and the tile of all of them.
  EXPECT_EQ(expected_local_slots(8192, 256, 256), 8192);
  EXPECT_EQ(expected_local_slots(8192, 256, 32), 1024);
  EXPECT_EQ(expected_local_slots(1, 256, 32), 1);
  EXPECT_EQ(choose_moe_wgmma_tile(expected_local_slots(8192, 256, 32), 1024, 32, false),
            choose_moe_wgmma_tile(8192, 1024, 256, false));
  EXPECT_EQ(choose_moe_tile(expected_local_slots(1 << 14, 512, 64), 64, false),
            choose_moe_tile(1 << 14, 512, false));
  for (const int64_t rows : {1, 100, 100000}) {
    EXPECT_EQ(choose_moe_tile(rows, 64, true), 64);
  }
}

TEST(MoeConfig, Paths) {
  EXPECT_EQ(choose_moe_path({DType::kBF16, 64, 24, true}), MoePath::kMma);
  EXPECT_EQ(choose_moe_path({DType::kF16, 64, 24, true}), MoePath::kMma);
  EXPECT_EQ(choose_moe_path({DType::kF32, 64, 24, true}), MoePath::kGeneric);
  EXPECT_EQ(choose_moe_path({DType::kBF16, 64, 24, false}), MoePath::kGeneric);
  EXPECT_EQ(choose_moe_path({DType::kBF16, 66, 24, true}), MoePath::kGeneric);
  EXPECT_EQ(choose_moe_path({DType::kBF16, 64, 128, true, true}), MoePath::kWgmma);
  EXPECT_EQ(choose_moe_path({DType::kF16, 192, 64, true, true}), MoePath::kWgmma);
  EXPECT_EQ(choose_moe_path({DType::kBF16, 64, 128, false, true}), MoePath::kGeneric);
  EXPECT_EQ(choose_moe_path({DType::kBF16, 64, 96, true, true}), MoePath::kMma);
  EXPECT_EQ(choose_moe_path({DType::kBF16, 96, 64, true, true}), MoePath::kMma);
  EXPECT_EQ(choose_moe_path({DType::kF32, 64, 128, true, true}), MoePath::kGeneric);
  EXPECT_EQ(choose_moe_path({DType::kBF16, 64, 10, true}), MoePath::kGeneric);
}

TEST(MoeConfig, ScratchIsAlignedAndGrowsWithTheCall) {
  const MoeShape shape{100, 8, 64, 2048, 512, DType::kBF16};
  const MoeScratch scratch = fused_moe_scratch(shape, Device::kCuda);
  for (const size_t offset :
       {scratch.sorted_slots, scratch.expert_offsets, scratch.tile_expert, scratch.tile_start,
        scratch.counters, scratch.activated, scratch.slot_out, scratch.total}) {
    EXPECT_EQ(offset % 256, 0U);
  }
  EXPECT_GE(scratch.total, size_t{800} * (2048 + 512) * 2);
  EXPECT_EQ(fused_moe_workspace_bytes(shape, Device::kCuda), scratch.total);
  EXPECT_EQ(fused_moe_workspace_bytes(shape, Device::kCpu), 0U);
  MoeShape more = shape;
  more.num_tokens = 101;
  EXPECT_GT(fused_moe_workspace_bytes(more, Device::kCuda), scratch.total);
  MoeShape none = shape;
  none.num_tokens = 0;
  EXPECT_EQ(fused_moe_workspace_bytes(none, Device::kCuda), 0U);
}

}  // namespace
}  // namespace diffulex::test
