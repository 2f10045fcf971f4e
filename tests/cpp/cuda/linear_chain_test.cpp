// SPDX-License-Identifier: Apache-2.0

// linear_few_rows behind launches that write its rows: weights come early, rows in time.

#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "cuda/op_parity.h"
#include "diffulex/ops/linear.h"
#include "diffulex/ops/norm.h"
#include "ops/shared/cuda/hopper.h"

namespace diffulex::test {
namespace {

ExecContext device_context() {
  ExecContext context;
  context.device = Device::kCuda;
  context.weights_settled = true;  // or launches would not overlap
  return context;
}

/// x [M, H] <- norm(x W1^T) W2^T, over and over. Ring sizes differ: W1 is [N, H], W2 [H, N].
struct Chain final {
  Chain(std::mt19937_64* random, int64_t num_rows, int64_t hidden, int64_t inner)
      : x(random_tensor(random, DType::kBF16, {num_rows, hidden})),
        wide(random_tensor(random, DType::kBF16, {num_rows, inner})),
        first(random_tensor(random, DType::kBF16, {inner, hidden})),
        second(random_tensor(random, DType::kBF16, {hidden, inner})) {}

  /// The rows after `times` rounds; `is_settled` waits for the device after every launch.
  std::vector<uint8_t> run(int times, bool is_settled) {
    TestTensor result = x;
    DeviceMirror mirror;
    LinearFewRowsParams up;
    up.x = mirror.upload(result.ref());
    up.weight = mirror.upload(first.ref());
    up.out = mirror.upload(wide.ref());
    RmsNormParams norm;
    norm.x = up.out;
    norm.out = up.out;
    LinearFewRowsParams down;
    down.x = up.out;
    down.weight = mirror.upload(second.ref());
    down.out = up.x;
    RmsNormParams last;
    last.x = up.x;
    last.out = up.x;
    const auto check = [&](const Status& status) {
      EXPECT_TRUE(status.ok()) << status.message();
      if (is_settled) {
        DeviceMirror::check(cudaDeviceSynchronize());
      }
    };
    for (int time = 0; time < times; ++time) {
      check(linear_few_rows(up, device_context()));
      check(rms_norm(norm, device_context()));
      check(linear_few_rows(down, device_context()));
      check(rms_norm(last, device_context()));
    }
    mirror.download();
    return result.bytes();
  }

  TestTensor x;
  TestTensor wide;
  TestTensor first;
  TestTensor second;
};

TEST(CudaLinearChainTest, LaunchesThatOverlapGiveTheBitsOfLaunchesThatDoNot) {
  DIFFULEX_REQUIRE_DEVICE();
  if (!cuda::is_hopper_device(0)) {
    GTEST_SKIP() << "linear_few_rows needs compute capability 9.0";
  }
  std::mt19937_64 random(7);
  const int64_t shapes[][3] = {{32, 2048, 6144}, {5, 1024, 192}, {64, 512, 4096}, {16, 4096, 64}};
  for (const auto& shape : shapes) {
    Chain chain(&random, shape[0], shape[1], shape[2]);
    const std::vector<uint8_t> want = chain.run(24, true);
    for (int i = 0; i < 3; ++i) {
      ASSERT_EQ(chain.run(24, false), want) << shape[0] << " rows, " << shape[1];
    }
  }
}

}  // namespace
}  // namespace diffulex::test
