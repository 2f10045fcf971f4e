// SPDX-License-Identifier: Apache-2.0

// Routing and expert ops on the device against the CPU kernels, which have their own fp64 tests.
// Sizes and gaps are chosen so that every tile height, the generic kernels and both loads run.

#include "diffulex/ops/moe.h"

#include <algorithm>
#include <random>

#include <gtest/gtest.h>

#include "cuda/op_parity.h"
#include "diffulex/ops/routing.h"
#include "ops/moe_case.h"

namespace diffulex::test {
namespace {

constexpr DType kDTypes[] = {DType::kF32, DType::kF16, DType::kBF16};

TEST(CudaMoeTopkTest, MatchesCpu) {
  DIFFULEX_REQUIRE_DEVICE();
  std::mt19937_64 random(1);
  for (uint64_t seed = 0; seed < num_seeds(200); ++seed) {
    const int64_t size = pick(&random, {1, 2, 5, 32, 64});
    const int64_t groups = pick(&random, {1, 2, 8, 16});
    const int64_t num_experts = size * groups;
    const int64_t rows = uniform(&random, 1, 40);
    MoeTopkParams params;
    params.n_group = static_cast<int32_t>(groups);
    params.topk_group = static_cast<int32_t>(uniform(&random, 0, groups));
    const bool is_grouped = groups > 1 && params.topk_group > 0 && params.topk_group < groups;
    const int64_t available = is_grouped ? params.topk_group * size : num_experts;
    params.top_k = static_cast<int32_t>(uniform(&random, 1, std::min<int64_t>(available, 32)));
    params.scoring = static_cast<RouterScoring>(seed % 2);
    params.group_score = static_cast<GroupScore>(seed / 2 % 2);
    params.renormalize = seed % 3 != 0;
    params.routed_scaling = 2.5F;
    // Distinct, well separated logits: both sides must choose alike.
    TestTensor logits(kDTypes[seed % 3], {rows, num_experts},
                      {rows, num_experts + pick(&random, {0, 1, 8})});
    for (int64_t row = 0; row < rows; ++row) {
      std::vector<int64_t> order(static_cast<size_t>(num_experts));
      for (int64_t i = 0; i < num_experts; ++i) {
        order[static_cast<size_t>(i)] = i;
      }
      std::shuffle(order.begin(), order.end(), random);
      for (int64_t i = 0; i < num_experts; ++i) {
        const double step = num_experts <= 64 ? 1.0 / 16 : 1.0 / 256;
        logits.set({row, i}, static_cast<double>(order[static_cast<size_t>(i)]) * step - 2);
      }
    }
    logits.set({0, 0}, seed % 5 == 0 ? kNaN : 0.0);
    std::vector<uint8_t> valid(static_cast<size_t>(rows));
    for (uint8_t& flag : valid) {
      flag = random() % 4 != 0 ? 1 : 0;
    }
    const auto count = static_cast<size_t>(rows * params.top_k);
    std::vector<float> weights[2] = {std::vector<float>(count, 9), std::vector<float>(count, 9)};
    std::vector<int32_t> ids[2] = {std::vector<int32_t>(count, -9),
                                   std::vector<int32_t>(count, -9)};
    for (const bool on_device : {false, true}) {
      DeviceMirror mirror;
      const auto place = [&](const TensorRef& ref) { return on_device ? mirror.upload(ref) : ref; };
      params.logits = place(logits.ref());
      params.token_valid = seed % 2 == 0 ? place(ref_of(valid)) : TensorRef{};
      params.weights = place(ref_of(weights[on_device], {rows, params.top_k}));
      params.ids = place(ref_of(ids[on_device], {rows, params.top_k}));
      ExecContext context;
      context.device = on_device ? Device::kCuda : Device::kCpu;
      const Status status = moe_topk(params, context);
      ASSERT_TRUE(status.ok()) << status.message();
      if (on_device) {
        mirror.download();
      }
    }
    // Equal 16-bit logits and near-equal group sums may be ordered by rounding: compare weights,
    // and ids where nothing is grouped in fp32.
    if (!is_grouped && seed % 3 == 0) {
      ASSERT_EQ(ids[0], ids[1]) << "seed " << seed;
    }
    for (size_t i = 0; i < count; ++i) {
      ASSERT_EQ(ids[0][i] < 0, ids[1][i] < 0) << "seed " << seed;
      if (!is_grouped) {
        ASSERT_NEAR(weights[0][i], weights[1][i], 2e-5) << "seed " << seed;
      }
    }
  }
}

TEST(CudaRouterGemmTest, MatchesCpu) {
  DIFFULEX_REQUIRE_DEVICE();
  std::mt19937_64 random(2);
  for (uint64_t seed = 0; seed < num_seeds(180); ++seed) {
    const int64_t rows = pick(&random, {1, 3, 4, 5, 33, 70, 300});
    const int64_t depth = pick(&random, {1, 7, 8, 64, 260, 544, 2048});
    const int64_t experts = pick(&random, {1, 5, 16, 17, 128, 257});
    const int64_t gap = pick(&random, {0, 8, 3});
    TestTensor x = random_tensor(&random, kDTypes[seed % 3], {rows, depth}, gap);
    TestTensor w =
        random_tensor(&random, seed % 2 == 0 ? DType::kF32 : DType::kBF16, {experts, depth}, gap);
    TestTensor cpu(DType::kF32, {rows, experts});
    cpu.fill(kNaN);
    TestTensor gpu = cpu;
    RouterGemmParams params;
    params.x = x.ref();
    params.w = w.ref();
    params.logits = cpu.ref();
    ASSERT_TRUE(router_gemm(params, ExecContext()).ok());
    DeviceMirror mirror;
    params.x = mirror.upload(x.ref());
    params.w = mirror.upload(w.ref());
    params.logits = mirror.upload(gpu.ref());
    ExecContext context;
    context.device = Device::kCuda;
    ASSERT_TRUE(router_gemm(params, context).ok());
    mirror.download();
    for (int64_t i = 0; i < cpu.elements(); ++i) {
      ASSERT_NEAR(cpu.get_offset(i), gpu.get_offset(i), 2e-6 * static_cast<double>(depth) + 1e-6);
    }
  }
}

/// Runs a case on the device, in scratch and outputs of rubbish.
void run_on_device(MoeCase& moe, ExecContext* base = nullptr, int64_t shift = 0) {
  DeviceMirror mirror(shift);
  FusedMoeParams params = moe.params();
  params.x = mirror.upload(params.x);
  params.w13 = mirror.upload(params.w13);
  params.w2 = mirror.upload(params.w2);
  params.topk_weights = mirror.upload(params.topk_weights);
  params.topk_ids = mirror.upload(params.topk_ids);
  params.expert_map = mirror.upload(params.expert_map);
  params.addend = mirror.upload(params.addend);
  params.out = mirror.upload(params.out);
  DeviceContext context(fused_moe_workspace_bytes(moe.moe_shape(), Device::kCuda));
  if (base != nullptr) {
    context.get().batch_invariant = base->batch_invariant;
  }
  const Status status = fused_moe(params, context.get());
  ASSERT_TRUE(status.ok()) << status.message();
  mirror.download();
}

void expect_close(const TestTensor& want, const TestTensor& got, double bound) {
  for (int64_t i = 0; i < want.elements(); ++i) {
    const double expected = want.get_offset(i);
    ASSERT_LE(std::abs(got.get_offset(i) - expected), bound * std::max(1.0, std::abs(expected)))
        << "element " << i << " want " << expected << " got " << got.get_offset(i);
  }
}

TEST(CudaFusedMoeTest, MatchesCpu) {
  DIFFULEX_REQUIRE_DEVICE();
  std::mt19937_64 random(3);
  for (uint64_t seed = 0; seed < num_seeds(150); ++seed) {
    MoeCaseShape shape;
    shape.dtype = kDTypes[seed % 3];
    shape.num_tokens = pick(&random, {1, 2, 17, 64, 130, 400});
    shape.num_experts = pick(&random, {1, 3, 8, 60});
    shape.top_k = pick(&random, {1, 2, 8});
    // Whole 16-byte pieces for the tensor cores, others for the generic kernels.
    shape.hidden = pick(&random, {2, 66, 64, 72, 200, 256});
    shape.width = pick(&random, {2, 70, 8, 64, 72, 136});
    shape.has_map = seed % 4 == 1;
    shape.has_addend = seed % 3 == 2;
    shape.act = static_cast<Activation>(seed / 3 % 3);
    shape.weight_on_input = shape.top_k == 1;
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    MoeCase cpu(shape, seed);
    MoeCase gpu(shape, seed);
    ASSERT_TRUE(fused_moe(cpu.params(), ExecContext()).ok());
    ASSERT_NO_FATAL_FAILURE(run_on_device(gpu, nullptr, seed % 7 == 3 ? 1 : 0));
    ASSERT_NO_FATAL_FAILURE(expect_close(cpu.out, gpu.out, moe_bound(shape.dtype)));
  }
}

TEST(CudaFusedMoeTest, OneExpertTakesEverything) {
  DIFFULEX_REQUIRE_DEVICE();
  for (const DType dtype : kDTypes) {
    MoeCaseShape shape;
    shape.dtype = dtype;
    shape.num_tokens = 300;
    shape.num_experts = 16;
    shape.top_k = 1;
    shape.hidden = 128;
    shape.width = 64;
    MoeCase cpu(shape, 4);
    std::fill(cpu.ids.begin(), cpu.ids.end(), 11);
    MoeCase gpu = cpu;
    ASSERT_TRUE(fused_moe(cpu.params(), ExecContext()).ok());
    ASSERT_NO_FATAL_FAILURE(run_on_device(gpu));
    ASSERT_NO_FATAL_FAILURE(expect_close(cpu.out, gpu.out, moe_bound(dtype)));
  }
}

TEST(CudaFusedMoeTest, RepeatedRunsAndTheBatchAreBitEqual) {
  DIFFULEX_REQUIRE_DEVICE();
  ExecContext invariant;
  invariant.batch_invariant = true;
  for (const DType dtype : kDTypes) {
    MoeCaseShape shape;
    shape.dtype = dtype;
    shape.num_tokens = 150;
    shape.num_experts = 5;
    shape.hidden = 192;
    shape.width = 80;
    MoeCase first(shape, 5);
    MoeCase second(shape, 5);
    ASSERT_NO_FATAL_FAILURE(run_on_device(first, &invariant));
    ASSERT_NO_FATAL_FAILURE(run_on_device(second, &invariant));
    ASSERT_EQ(first.out.bytes(), second.out.bytes());
    // The first rows alone.
    MoeCaseShape few = shape;
    few.num_tokens = 3;
    MoeCase alone(few, 5);
    alone.w13 = first.w13;
    alone.w2 = first.w2;
    for (int64_t token = 0; token < 3; ++token) {
      for (int64_t h = 0; h < shape.hidden; ++h) {
        alone.x.set({token, h}, first.x.get({token, h}));
      }
    }
    std::copy_n(first.ids.begin(), alone.ids.size(), alone.ids.begin());
    std::copy_n(first.weights.begin(), alone.weights.size(), alone.weights.begin());
    ASSERT_NO_FATAL_FAILURE(run_on_device(alone, &invariant));
    for (int64_t i = 0; i < alone.out.elements(); ++i) {
      ASSERT_EQ(alone.out.get_offset(i), first.out.get_offset(i));
    }
  }
}

TEST(CudaMoePermuteTest, MatchesCpu) {
  DIFFULEX_REQUIRE_DEVICE();
  std::mt19937_64 random(6);
  for (uint64_t seed = 0; seed < num_seeds(80); ++seed) {
    const auto num_local = static_cast<int32_t>(pick(&random, {1, 7, 64, 256, 700, 4096}));
    const int64_t top_k = pick(&random, {1, 2, 8});
    const int64_t rows = pick(&random, {0, 1, 5, 64, 1000, 5000});
    const auto tile = static_cast<int32_t>(pick(&random, {1, 16, 50, 128}));
    std::vector<int32_t> ids(static_cast<size_t>(rows * top_k));
    for (int32_t& id : ids) {
      id = static_cast<int32_t>(uniform(&random, -1, num_local - 1));
    }
    const auto max_tiles = static_cast<size_t>(moe_max_tiles(rows * top_k, num_local, tile)) + 2;
    std::vector<int32_t> result[2][5];
    for (const bool on_device : {false, true}) {
      auto& own = result[on_device];
      const size_t sizes[5] = {ids.size(), static_cast<size_t>(num_local) + 1, max_tiles, max_tiles,
                               2};
      for (int i = 0; i < 5; ++i) {
        own[i].assign(sizes[i], -77);
      }
      DeviceMirror mirror;
      const auto place = [&](const TensorRef& ref) { return on_device ? mirror.upload(ref) : ref; };
      MoePermuteParams params;
      params.topk_ids = place(ref_of(ids, {rows, top_k}));
      params.sorted_slots = place(ref_of(own[0]));
      params.expert_offsets = place(ref_of(own[1]));
      params.tile_expert = place(ref_of(own[2]));
      params.tile_start = place(ref_of(own[3]));
      params.counters = place(ref_of(own[4]));
      params.num_local_experts = num_local;
      params.tile = tile;
      ExecContext context;
      context.device = on_device ? Device::kCuda : Device::kCpu;
      const Status status = moe_permute(params, context);
      ASSERT_TRUE(status.ok()) << status.message();
      if (on_device) {
        mirror.download();
      }
    }
    for (int i = 0; i < 5; ++i) {
      ASSERT_EQ(result[0][i], result[1][i]) << "seed " << seed << " output " << i;
    }
  }
}

TEST(CudaFusedExpertsPackedTest, MatchesCpu) {
  DIFFULEX_REQUIRE_DEVICE();
  std::mt19937_64 random(7);
  for (uint64_t seed = 0; seed < num_seeds(60); ++seed) {
    MoeCaseShape shape;
    shape.dtype = kDTypes[seed % 3];
    shape.num_experts = pick(&random, {1, 4, 9});
    const bool is_batched = seed % 2 == 1;
    const int64_t rows_per_expert = pick(&random, {1, 5, 70, 650});
    shape.num_tokens = shape.num_experts * rows_per_expert;
    shape.top_k = 1;
    shape.hidden = pick(&random, {66, 64, 200});
    shape.width = pick(&random, {10, 64, 72});
    MoeCase cpu(shape, seed);
    MoeCase gpu(shape, seed);
    std::vector<int32_t> offsets;
    if (!is_batched) {
      offsets.push_back(0);
    }
    for (int64_t expert = 0; expert < shape.num_experts; ++expert) {
      const auto count = static_cast<int32_t>(uniform(&random, 0, rows_per_expert));
      offsets.push_back(is_batched ? count : offsets.back() + count);
    }
    for (const bool on_device : {false, true}) {
      MoeCase& moe = on_device ? gpu : cpu;
      moe.out.fill(7.0);
      DeviceMirror mirror;
      const auto place = [&](const TensorRef& ref) { return on_device ? mirror.upload(ref) : ref; };
      const auto shaped = [&](TensorRef ref) {
        if (is_batched) {
          const bool is_matrix = ref.rank == 2;
          ref.size[2] = is_matrix ? ref.size[1] : 1;
          ref.stride[2] = 1;
          ref.size[1] = rows_per_expert;
          ref.stride[1] = ref.stride[0];
          ref.size[0] = shape.num_experts;
          ref.stride[0] *= rows_per_expert;
          ref.rank = is_matrix ? 3 : 2;
        }
        return place(ref);
      };
      FusedExpertsPackedParams params;
      params.x = shaped(moe.x.ref());
      params.w13 = place(moe.w13.ref());
      params.w2 = place(moe.w2.ref());
      params.expert_offsets = place(ref_of(offsets));
      params.row_weights = seed % 3 == 0 ? TensorRef{} : shaped(ref_of(moe.weights));
      params.out = shaped(moe.out.ref());
      params.rows_per_expert = is_batched ? static_cast<int32_t>(rows_per_expert) : 0;
      DeviceContext device(fused_experts_packed_workspace_bytes(
          shape.num_tokens, static_cast<int32_t>(shape.num_experts), shape.width, shape.dtype,
          Device::kCuda));
      const Status status = fused_experts_packed(params, on_device ? device.get() : ExecContext());
      ASSERT_TRUE(status.ok()) << status.message();
      if (on_device) {
        mirror.download();
      }
    }
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    ASSERT_NO_FATAL_FAILURE(expect_close(cpu.out, gpu.out, moe_bound(shape.dtype)));
  }
}

}  // namespace
}  // namespace diffulex::test
