// SPDX-License-Identifier: Apache-2.0

// The Hopper expert products: sizes that are multiples of 64, against the fp64 definition where it
// is affordable and the CPU kernels elsewhere. On other devices the same cases run on the portable
// kernels.

#include <algorithm>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "cuda/op_parity.h"
#include "diffulex/ops/moe.h"
#include "ops/moe/config.h"
#include "ops/moe_case.h"

namespace diffulex::test {
namespace {

constexpr DType kHalfTypes[] = {DType::kF16, DType::kBF16};

/// A case on the device with its outputs and scratch full of rubbish before every run.
class DeviceCase final {
 public:
  explicit DeviceCase(MoeCase& moe)
      : moe_(moe), context_(fused_moe_workspace_bytes(moe.moe_shape(), Device::kCuda)) {
    params_ = moe.params();
    params_.x = mirror_.upload(params_.x);
    params_.w13 = mirror_.upload(params_.w13);
    params_.w2 = mirror_.upload(params_.w2);
    params_.topk_weights = mirror_.upload(params_.topk_weights);
    params_.topk_ids = mirror_.upload(params_.topk_ids);
    params_.expert_map = mirror_.upload(params_.expert_map);
    params_.addend = mirror_.upload(params_.addend);
    params_.out = mirror_.upload(params_.out);
  }

  [[nodiscard]] ExecContext& context() { return context_.get(); }

  void run() {
    context_.poison();
    moe_.out.fill(kNaN);
    mirror_.refresh();
    enqueue();
    mirror_.download();
  }

  void enqueue() {
    const Status status = fused_moe(params_, context_.get());
    ASSERT_TRUE(status.ok()) << status.message();
  }

  void refresh() { mirror_.refresh(); }
  void download() { mirror_.download(); }

 private:
  MoeCase& moe_;
  DeviceMirror mirror_;
  DeviceContext context_;
  FusedMoeParams params_;
};

void expect_near(const std::vector<double>& want, const TestTensor& got, double bound) {
  for (int64_t i = 0; i < got.elements(); ++i) {
    const double expected = want[static_cast<size_t>(i)];
    ASSERT_LE(std::abs(got.get_offset(i) - expected), bound * std::max(1.0, std::abs(expected)))
        << "element " << i << " want " << expected << " got " << got.get_offset(i);
  }
}

MoeCaseShape hopper_shape(DType dtype, int64_t num_tokens) {
  MoeCaseShape shape;
  shape.dtype = dtype;
  shape.num_tokens = num_tokens;
  shape.num_experts = 6;
  shape.top_k = 2;
  shape.hidden = 192;
  shape.width = 128;
  return shape;
}

TEST(MoeHopperTest, EveryTokenCountEqualsTheDefinition) {
  DIFFULEX_REQUIRE_DEVICE();
  for (const DType dtype : kHalfTypes) {
    for (int64_t num_tokens = 1; num_tokens <= 17; ++num_tokens) {
      SCOPED_TRACE(testing::Message() << "tokens " << num_tokens);
      MoeCaseShape shape = hopper_shape(dtype, num_tokens);
      shape.has_map = num_tokens % 2 == 0;
      shape.has_addend = num_tokens % 3 == 0;
      shape.act = static_cast<Activation>(num_tokens % 3);
      shape.top_k = num_tokens % 4 == 1 ? 1 : 2;
      shape.weight_on_input = shape.top_k == 1;
      MoeCase moe(shape, static_cast<uint64_t>(num_tokens));
      DeviceCase device(moe);
      ASSERT_NO_FATAL_FAILURE(device.run());
      ASSERT_NO_FATAL_FAILURE(expect_near(moe.expected(), moe.out, moe_bound(dtype)));
    }
  }
}

TEST(MoeHopperTest, EveryTileHeightMatchesCpu) {
  DIFFULEX_REQUIRE_DEVICE();
  std::mt19937_64 random(1);
  for (const DType dtype : kHalfTypes) {
    // Numbers that choose tiles of 16, 32, 64, 96, 128, 160 and those of two CTAs, one or more of
    // these for an expert, and counts across their edges.
    for (const int64_t num_tokens : {8, 24, 64, 100, 130, 257, 330, 450, 700, 2048}) {
      for (const bool has_map : {false, true}) {
        SCOPED_TRACE(testing::Message() << "tokens " << num_tokens << " map " << has_map);
        MoeCaseShape shape = hopper_shape(dtype, num_tokens);
        shape.hidden = pick(&random, {64, 192, 256});
        shape.width = pick(&random, {64, 128, 192});
        shape.has_map = has_map;
        shape.has_addend = !has_map;
        MoeCase cpu(shape, 7);
        MoeCase gpu(shape, 7);
        ASSERT_TRUE(fused_moe(cpu.params(), ExecContext()).ok());
        DeviceCase device(gpu);
        ASSERT_NO_FATAL_FAILURE(device.run());
        for (int64_t i = 0; i < cpu.out.elements(); ++i) {
          const double expected = cpu.out.get_offset(i);
          ASSERT_LE(std::abs(gpu.out.get_offset(i) - expected),
                    moe_bound(dtype) * std::max(1.0, std::abs(expected)))
              << "element " << i;
        }
      }
    }
  }
}

TEST(MoeHopperTest, ManyExpertsMatchCpu) {
  DIFFULEX_REQUIRE_DEVICE();
  // More experts than threads, than a product sorts itself, and more slots than it sorts.
  struct Size {
    int64_t num_experts;
    int64_t num_tokens;
    int64_t top_k;
  };
  for (const Size& size :
       {Size{400, 100, 8}, Size{512, 128, 8}, Size{600, 30, 4}, Size{64, 129, 8}, Size{1, 40, 1}}) {
    for (const bool has_map : {false, true}) {
      SCOPED_TRACE(testing::Message() << "experts " << size.num_experts << " map " << has_map);
      MoeCaseShape shape = hopper_shape(DType::kBF16, size.num_tokens);
      shape.num_experts = size.num_experts;
      shape.top_k = size.top_k;
      shape.hidden = 64;
      shape.width = 64;
      shape.has_map = has_map;
      MoeCase cpu(shape, 21);
      MoeCase gpu(shape, 21);
      ASSERT_TRUE(fused_moe(cpu.params(), ExecContext()).ok());
      DeviceCase device(gpu);
      ASSERT_NO_FATAL_FAILURE(device.run());
      for (int64_t i = 0; i < cpu.out.elements(); ++i) {
        const double expected = cpu.out.get_offset(i);
        ASSERT_LE(std::abs(gpu.out.get_offset(i) - expected),
                  moe_bound(shape.dtype) * std::max(1.0, std::abs(expected)))
            << "element " << i;
      }
    }
  }
}

TEST(MoeHopperTest, OneExpertOrNoneTakesEverything) {
  DIFFULEX_REQUIRE_DEVICE();
  for (const int32_t expert : {3, -1, 99}) {
    for (const int64_t num_tokens : {5, 300, 600}) {
      MoeCaseShape shape = hopper_shape(DType::kBF16, num_tokens);
      shape.top_k = 1;
      shape.has_addend = true;
      MoeCase gpu(shape, 4);
      std::fill(gpu.ids.begin(), gpu.ids.end(), expert);
      MoeCase cpu = gpu;
      // An id outside the model counts as none on the device.
      std::fill(cpu.ids.begin(), cpu.ids.end(), expert == 99 ? -1 : expert);
      ASSERT_TRUE(fused_moe(cpu.params(), ExecContext()).ok());
      DeviceCase device(gpu);
      ASSERT_NO_FATAL_FAILURE(device.run());
      for (int64_t i = 0; i < cpu.out.elements(); ++i) {
        ASSERT_NEAR(gpu.out.get_offset(i), cpu.out.get_offset(i),
                    moe_bound(DType::kBF16) * std::max(1.0, std::abs(cpu.out.get_offset(i))));
      }
    }
  }
}

/// Many tokens on one expert, and on experts as popular as words, with all experts here or half.
TEST(MoeHopperTest, UnevenRoutingMatchesCpu) {
  DIFFULEX_REQUIRE_DEVICE();
  constexpr int64_t kTokens = 8192;
  constexpr int64_t kExperts = 32;
  for (const bool is_zipf : {false, true}) {
    for (const bool has_map : {false, true}) {
      SCOPED_TRACE(testing::Message() << "zipf " << is_zipf << " map " << has_map);
      MoeCaseShape shape = hopper_shape(DType::kBF16, kTokens);
      shape.num_experts = kExperts;
      shape.hidden = 128;
      shape.width = 64;
      shape.has_map = has_map;
      MoeCase gpu(shape, 17);
      const int64_t global = has_map ? 2 * kExperts : kExperts;
      const int64_t local = expected_local_slots(2 * kTokens, global, kExperts);
      ASSERT_EQ(choose_moe_wgmma_tile(local, kTokens, kExperts, false), kMoePairTile);
      std::mt19937_64 random(5);
      std::vector<double> popularity;
      for (int64_t expert = 0; expert < global; ++expert) {
        popularity.push_back(1.0 / static_cast<double>(expert + 1));
      }
      std::discrete_distribution<int32_t> zipf(popularity.begin(), popularity.end());
      for (size_t slot = 0; slot < gpu.ids.size(); slot += 2) {
        gpu.ids[slot] = is_zipf ? zipf(random) : 3;  // 3 is here, with a map too
        gpu.ids[slot + 1] = -1;
        const int32_t second = is_zipf ? zipf(random) : -1;
        if (second != gpu.ids[slot]) {
          gpu.ids[slot + 1] = second;
        }
      }
      MoeCase cpu = gpu;
      ASSERT_TRUE(fused_moe(cpu.params(), ExecContext()).ok());
      DeviceCase device(gpu);
      ASSERT_NO_FATAL_FAILURE(device.run());
      for (int64_t i = 0; i < cpu.out.elements(); ++i) {
        const double expected = cpu.out.get_offset(i);
        ASSERT_LE(std::abs(gpu.out.get_offset(i) - expected),
                  moe_bound(shape.dtype) * std::max(1.0, std::abs(expected)))
            << "element " << i;
      }
    }
  }
}

TEST(MoeHopperTest, RowsNobodyReadsMayHoldAnything) {
  DIFFULEX_REQUIRE_DEVICE();
  MoeCaseShape shape = hopper_shape(DType::kBF16, 40);
  MoeCase clean(shape, 9);
  // Tokens without experts, and an expert without tokens.
  for (size_t slot = 0; slot < clean.ids.size(); ++slot) {
    const bool is_unused = slot / 2 % 5 == 0;
    clean.ids[slot] = is_unused ? -1 : (clean.ids[slot] == 2 ? 1 : clean.ids[slot]);
  }
  MoeCase poisoned = clean;
  for (int64_t token = 0; token < shape.num_tokens; token += 5) {
    for (int64_t h = 0; h < shape.hidden; ++h) {
      poisoned.x.set({token, h}, kNaN);
    }
  }
  for (int64_t row = 0; row < 2 * shape.width; ++row) {
    for (int64_t h = 0; h < shape.hidden; ++h) {
      poisoned.w13.set({2, row, h}, kNaN);
    }
  }
  DeviceCase first(clean);
  ASSERT_NO_FATAL_FAILURE(first.run());
  DeviceCase second(poisoned);
  ASSERT_NO_FATAL_FAILURE(second.run());
  EXPECT_EQ(clean.out.bytes(), poisoned.out.bytes());
}

TEST(MoeHopperTest, RunsAreBitEqual) {
  DIFFULEX_REQUIRE_DEVICE();
  for (const int64_t num_tokens : {7, 90, 600}) {
    MoeCase moe(hopper_shape(DType::kBF16, num_tokens), 11);
    DeviceCase device(moe);
    ASSERT_NO_FATAL_FAILURE(device.run());
    const auto first = moe.out.bytes();
    for (int run = 1; run < 20; ++run) {
      ASSERT_NO_FATAL_FAILURE(device.run());
      ASSERT_EQ(first, moe.out.bytes()) << "run " << run;
    }
  }
}

TEST(MoeHopperTest, InvariantResultsDoNotDependOnTheBatch) {
  DIFFULEX_REQUIRE_DEVICE();
  MoeCase all(hopper_shape(DType::kBF16, 500), 13);
  DeviceCase whole(all);
  whole.context().batch_invariant = true;
  ASSERT_NO_FATAL_FAILURE(whole.run());
  for (const int64_t few : {1, 20, 200}) {
    MoeCase part(hopper_shape(DType::kBF16, few), 13);
    part.w13 = all.w13;
    part.w2 = all.w2;
    for (int64_t token = 0; token < few; ++token) {
      for (int64_t h = 0; h < 192; ++h) {
        part.x.set({token, h}, all.x.get({token, h}));
      }
    }
    std::copy_n(all.ids.begin(), part.ids.size(), part.ids.begin());
    std::copy_n(all.weights.begin(), part.weights.size(), part.weights.begin());
    DeviceCase alone(part);
    alone.context().batch_invariant = true;
    ASSERT_NO_FATAL_FAILURE(alone.run());
    for (int64_t i = 0; i < part.out.elements(); ++i) {
      ASSERT_EQ(part.out.get_offset(i), all.out.get_offset(i)) << "element " << i;
    }
  }
}

TEST(MoeHopperTest, AReplayedGraphSeesChangedRouting) {
  DIFFULEX_REQUIRE_DEVICE();
  MoeCase moe(hopper_shape(DType::kBF16, 48), 17);
  DeviceCase device(moe);
  cudaStream_t stream = nullptr;
  DIFFULEX_ASSERT_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  ASSERT_NO_FATAL_FAILURE(device.run());  // loads the kernels
  device.context().stream = stream;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  DIFFULEX_ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  device.enqueue();
  device.enqueue();  // the second call follows the first without a gap
  DIFFULEX_ASSERT_CUDA(cudaStreamEndCapture(stream, &graph));
  DIFFULEX_ASSERT_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  std::mt19937_64 random(18);
  for (int round = 0; round < 4; ++round) {
    for (size_t slot = 0; slot < moe.ids.size(); ++slot) {
      // Fewer live slots every round.
      const bool is_live = static_cast<int>(slot % 4) >= round;
      moe.ids[slot] = is_live ? static_cast<int32_t>(uniform(&random, 0, 5)) : -1;
    }
    moe.out.fill(kNaN);
    device.refresh();
    DIFFULEX_ASSERT_CUDA(cudaGraphLaunch(exec, stream));
    DIFFULEX_ASSERT_CUDA(cudaStreamSynchronize(stream));
    device.download();
    const auto replayed = moe.out.bytes();
    device.context().stream = nullptr;
    ASSERT_NO_FATAL_FAILURE(device.run());
    device.context().stream = stream;
    ASSERT_EQ(replayed, moe.out.bytes()) << "round " << round;
    ASSERT_NO_FATAL_FAILURE(expect_near(moe.expected(), moe.out, moe_bound(DType::kBF16)));
  }
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

}  // namespace
}  // namespace diffulex::test
