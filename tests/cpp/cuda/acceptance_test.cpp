// SPDX-License-Identifier: Apache-2.0

// The rewriting acceptance ops, the entropy bound and the filtered draws on the device: every
// output equal to the CPU kernels'.

#include <random>

#include <gtest/gtest.h>

#include "cuda/op_parity.h"
#include "diffulex/ops/accept.h"
#include "ops/acceptance_case.h"
#include "ops/filter_case.h"

namespace diffulex::test {
namespace {

AcceptanceCase* configure(AcceptanceCase* block, uint64_t seed) {
  block->with_lists = seed % 2 == 0;
  block->merge_k = seed % 5 == 0 ? 0 : (block->with_lists ? 2 : 1);
  block->fast_path = seed % 3 == 0;
  block->entropy_bound = static_cast<float>(seed % 7);
  block->stability = static_cast<int32_t>(seed % 3);
  block->kappa = .25F * static_cast<float>(seed % 5);
  block->allocate();
  return block;
}

void expect_equal(const AcceptanceCase& want, const AcceptanceCase& got, uint64_t seed) {
  ASSERT_EQ(got.write_ids, want.write_ids) << "seed " << seed;
  ASSERT_EQ(got.argmax, want.argmax) << "seed " << seed;
  ASSERT_EQ(got.confidence, want.confidence) << "seed " << seed;
  ASSERT_EQ(got.left, want.left) << "seed " << seed;
  ASSERT_EQ(got.flags, want.flags) << "seed " << seed;
  ASSERT_EQ(got.ratio, want.ratio) << "seed " << seed;
  ASSERT_EQ(got.merge_valid, want.merge_valid) << "seed " << seed;
  ASSERT_EQ(got.merge_ids, want.merge_ids) << "seed " << seed;
  ASSERT_EQ(got.merge_probs, want.merge_probs) << "seed " << seed;
  ASSERT_EQ(got.residual, want.residual) << "seed " << seed;
}

/// Runs `op` on the host and on the device over the same random blocks.
template <typename Op>
void compare(uint64_t seed, const Op& op) {
  std::mt19937_64 random(seed);
  const int64_t size = pick(&random, {1, 4, 8, 32, 33, 256, 1024});
  const int64_t blocks = uniform(&random, 1, 6);
  std::mt19937_64 copy = random;
  AcceptanceCase host(&random, blocks, size);
  AcceptanceCase device(&copy, blocks, size);
  configure(&host, seed);
  configure(&device, seed);
  Status status = op(&host, kOnHost, ExecContext{});
  ASSERT_TRUE(status.ok()) << status.message();
  DeviceMirror mirror;
  DeviceContext context(0);
  status =
      op(&device, [&](const TensorRef& tensor) { return mirror.upload(tensor); }, context.get());
  ASSERT_TRUE(status.ok()) << status.message();
  mirror.download();
  expect_equal(host, device, seed);
}

TEST(CudaAcceptEditTest, MatchesCpu) {
  DIFFULEX_REQUIRE_DEVICE();
  for (uint64_t seed = 0; seed < num_seeds(300); ++seed) {
    compare(seed, [](AcceptanceCase* block, const auto& place, const ExecContext& context) {
      return accept_edit(block->edit(place), context);
    });
    ASSERT_FALSE(HasFatalFailure());
  }
}

TEST(CudaAcceptDmaxTest, MatchesCpu) {
  DIFFULEX_REQUIRE_DEVICE();
  for (uint64_t seed = 0; seed < num_seeds(300); ++seed) {
    compare(seed, [](AcceptanceCase* block, const auto& place, const ExecContext& context) {
      return accept_dmax(block->dmax(place), context);
    });
    ASSERT_FALSE(HasFatalFailure());
  }
}

TEST(CudaAcceptGemmaTest, MatchesCpu) {
  DIFFULEX_REQUIRE_DEVICE();
  for (uint64_t seed = 0; seed < num_seeds(300); ++seed) {
    compare(seed, [](AcceptanceCase* block, const auto& place, const ExecContext& context) {
      return accept_gemma(block->gemma(place), context);
    });
    ASSERT_FALSE(HasFatalFailure());
  }
}

TEST(CudaEntropyBoundMaskTest, MatchesCpu) {
  DIFFULEX_REQUIRE_DEVICE();
  for (uint64_t seed = 0; seed < num_seeds(100); ++seed) {
    std::mt19937_64 random(seed);
    std::vector<int32_t> segments = {0};
    for (int64_t i = uniform(&random, 1, 6); i > 0; --i) {
      segments.push_back(segments.back() +
                         static_cast<int32_t>(pick(&random, {0, 1, 31, 32, 33, 256, 1000, 1024})));
    }
    const int64_t rows = segments.back() + 3;
    std::vector<float> entropy;
    for (int64_t row = 0; row < rows; ++row) {
      entropy.push_back(static_cast<float>(uniform(&random, 0, 200)) / 64.0F);
    }
    std::vector<uint8_t> want(static_cast<size_t>(rows), 9);
    std::vector<uint8_t> got = want;
    EntropyBoundMaskParams params;
    params.bound = static_cast<float>(seed % 9) - 1.0F;
    params.entropy = ref_of(entropy);
    params.segments = ref_of(segments);
    params.mask = ref_of(want);
    ASSERT_TRUE(entropy_bound_mask(params, ExecContext{}).ok());
    DeviceMirror mirror;
    params.entropy = mirror.upload(ref_of(entropy));
    params.segments = mirror.upload(ref_of(segments));
    params.mask = mirror.upload(ref_of(got));
    DeviceContext context(0);
    const Status status = entropy_bound_mask(params, context.get());
    ASSERT_TRUE(status.ok()) << status.message();
    mirror.download();
    ASSERT_EQ(got, want) << "seed " << seed;
  }
}

TEST(CudaSampleFilteredTest, MatchesCpu) {
  DIFFULEX_REQUIRE_DEVICE();
  for (uint64_t seed = 0; seed < num_seeds(300); ++seed) {
    std::mt19937_64 random(seed);
    FilterCase host = random_filter_case(&random, 5);
    FilterCase device = host;
    Status status =
        sample_filtered(host.params([](const TensorRef& tensor) { return tensor; }), ExecContext{});
    ASSERT_TRUE(status.ok()) << status.message();
    // Rows that do not start at a multiple of 16 bytes take the element-wise path.
    DeviceMirror mirror(static_cast<int64_t>(seed % 2));
    DeviceContext context(0);
    const SampleFilteredParams params =
        device.params([&](const TensorRef& tensor) { return mirror.upload(tensor); });
    status = sample_filtered(params, context.get());
    ASSERT_TRUE(status.ok()) << status.message();
    mirror.download();
    ASSERT_EQ(device.ids, host.ids) << "seed " << seed;
    for (size_t i = 0; i < host.stats.size(); ++i) {
      ASSERT_NEAR(device.stats[i], host.stats[i], 2e-5 + 1e-4 * std::abs(host.stats[i]))
          << "seed " << seed << " element " << i;
    }
  }
}

}  // namespace
}  // namespace diffulex::test
