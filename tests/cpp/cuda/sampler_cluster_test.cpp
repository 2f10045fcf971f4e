// SPDX-License-Identifier: Apache-2.0

// token_stats and sample_filtered at vocabulary sizes where several CTAs share a row: the result of
// a row depends neither on the rows beside it nor on the run, and equals the CPU kernel's.

#include <cstring>
#include <random>

#include <gtest/gtest.h>

#include "cuda/op_parity.h"
#include "diffulex/ops/sampling.h"
#include "ops/filter_case.h"

namespace diffulex::test {
namespace {

/// Greedy, drawn and top-k rows of one logits matrix.
struct Rows {
  Rows(uint64_t seed, DType logits_dtype, int64_t vocab_size, int64_t count, int32_t columns)
      : dtype(logits_dtype), vocab(vocab_size), rows(count), kt(columns) {
    std::mt19937_64 random(seed);
    logits = TestTensor(dtype, {rows, vocab}, {rows, vocab});
    logits.fill_normal(&random, 4.0);
    for (int64_t row = 0; row < rows; ++row) {
      temperature.push_back(row % 2 == 0 ? 0.0F : 0.8F);
      uniforms.push_back((static_cast<double>(random() >> 12) + 0.5) / 4503599627370496.0);
    }
    forbidden = {vocab - 7, vocab / 3};
    clear();
  }

  void clear() {
    ids.assign(static_cast<size_t>(rows), -55);
    stats.assign(static_cast<size_t>(rows * kTokenStatsColumns), std::nanf(""));
    topk_ids.assign(static_cast<size_t>(rows * kt), -55);
    topk_probs.assign(static_cast<size_t>(rows * kt), std::nanf(""));
  }

  template <typename Place>
  TokenStatsParams params(const Place& place) {
    TokenStatsParams result;
    result.logits = place(logits.ref());
    result.inv_temperature = place(ref_of(temperature));
    result.uniforms = place(ref_of(uniforms));
    result.forbidden_ids = place(ref_of(forbidden));
    result.vocab_limit = vocab - 3;
    result.ids = place(ref_of(ids));
    result.stats = place(ref_of(stats, {rows, kTokenStatsColumns}));
    if (kt > 0) {
      result.topk_ids = place(ref_of(topk_ids, {rows, kt}));
      result.topk_probs = place(ref_of(topk_probs, {rows, kt}));
    }
    return result;
  }

  /// One call on the device with a poisoned work space.
  void run() {
    clear();
    DeviceMirror mirror;
    const TokenStatsParams device =
        params([&](const TensorRef& tensor) { return mirror.upload(tensor); });
    DeviceContext context(token_stats_workspace_bytes(rows, vocab, kt, Device::kCuda));
    const Status status = token_stats(device, context.get());
    ASSERT_TRUE(status.ok()) << status.message();
    mirror.download();
  }

  DType dtype;
  int64_t vocab, rows;
  int32_t kt;
  TestTensor logits;
  std::vector<float> temperature, stats, topk_probs;
  std::vector<double> uniforms;
  std::vector<int64_t> forbidden, ids, topk_ids;
};

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

/// The first `count` rows of `whole`.
Rows first_rows(const Rows& whole, int64_t count) {
  Rows part(0, whole.dtype, whole.vocab, count, whole.kt);
  for (int64_t row = 0; row < count; ++row) {
    for (int64_t id = 0; id < whole.vocab; ++id) {
      part.logits.set({row, id}, whole.logits.get({row, id}));
    }
    part.uniforms[static_cast<size_t>(row)] = whole.uniforms[static_cast<size_t>(row)];
  }
  return part;
}

/// Runs `device` there and a copy of it on the CPU, and compares.
void expect_stats_parity(Rows device, const char* what) {
  Rows host = device;
  device.run();
  const Status status =
      token_stats(host.params([](const TensorRef& tensor) { return tensor; }), ExecContext{});
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(device.ids, host.ids) << what;
  EXPECT_EQ(device.topk_ids, host.topk_ids) << what;
  for (size_t i = 0; i < host.stats.size(); ++i) {
    ASSERT_NEAR(device.stats[i], host.stats[i], 2e-5 * (1.0 + std::abs(host.stats[i])))
        << what << " column " << i % kTokenStatsColumns << " of " << i / kTokenStatsColumns;
  }
}

TEST(CudaTokenStatsClusterTest, RowsDoNotDependOnTheirNumber) {
  DIFFULEX_REQUIRE_DEVICE();
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    Rows whole(3, dtype, 20011, 300, 5);
    whole.run();
    ASSERT_FALSE(HasFatalFailure());
    for (const int64_t count : {1, 33, 65, 140}) {
      Rows part = first_rows(whole, count);
      part.run();
      ASSERT_FALSE(HasFatalFailure());
      const auto values = static_cast<size_t>(count * kTokenStatsColumns);
      EXPECT_EQ(part.ids, std::vector<int64_t>(whole.ids.begin(), whole.ids.begin() + count));
      EXPECT_TRUE(same_bits(part.stats, {whole.stats.begin(), whole.stats.begin() + values}))
          << count << " rows";
      const auto top = static_cast<size_t>(count * 5);
      EXPECT_TRUE(
          same_bits(part.topk_probs, {whole.topk_probs.begin(), whole.topk_probs.begin() + top}));
    }
  }
}

TEST(CudaTokenStatsClusterTest, RepeatedRunsGiveTheSameBits) {
  DIFFULEX_REQUIRE_DEVICE();
  Rows rows(5, DType::kBF16, 151936, 6, 64);
  rows.run();
  ASSERT_FALSE(HasFatalFailure());
  const Rows first = rows;
  for (int run = 0; run < 5; ++run) {
    rows.run();
    EXPECT_EQ(rows.ids, first.ids);
    EXPECT_EQ(rows.topk_ids, first.topk_ids);
    EXPECT_TRUE(same_bits(rows.stats, first.stats));
    EXPECT_TRUE(same_bits(rows.topk_probs, first.topk_probs));
  }
}

TEST(CudaTokenStatsClusterTest, LargeVocabularyMatchesCpu) {
  DIFFULEX_REQUIRE_DEVICE();
  for (const int64_t vocab : {126464, 151936, 157185, 262144}) {
    expect_stats_parity(Rows(static_cast<uint64_t>(vocab), DType::kBF16, vocab, 3, 64), "bf16");
    ASSERT_FALSE(HasFatalFailure()) << vocab;
  }
}

/// Best and second column in one lane, one chunk, two chunks, or equal in value.
TEST(CudaTokenStatsClusterTest, TheTwoBestAreFoundWhereverTheyStand) {
  DIFFULEX_REQUIRE_DEVICE();
  struct Pair {
    int64_t best, second;
    double gap;
  };
  constexpr int64_t kVocab = 20011;
  const Pair pairs[] = {{8, 9, 1.0},     {264, 8, 0.5},        {16, 8, 0.5}, {2047, 2048, 0.5},
                        {9000, 3, 2.0},  {kVocab - 4, 0, 1.0}, {8, 9, 0.0},  {8, 264, 0.0},
                        {40, 4136, 0.0}, {4100, 18000, 0.0}};
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (const int64_t count : {10, 40, 100}) {
      for (const int32_t kt : {0, 2}) {
        Rows rows(11, dtype, kVocab, count, kt);
        for (int64_t row = 0; row < count; ++row) {
          const Pair& pair = pairs[row % 10];
          rows.temperature[static_cast<size_t>(row)] = 0.0F;
          rows.logits.set({row, pair.best}, 30.0);
          rows.logits.set({row, pair.second}, 30.0 - pair.gap);
        }
        expect_stats_parity(rows, to_string(dtype));
        ASSERT_FALSE(HasFatalFailure()) << count << " rows, top-" << kt;
      }
    }
  }
}

/// More chunks than the warps of a cluster hold: those with entries are copied again.
TEST(CudaTokenStatsClusterTest, ChunksAreCopiedAgainForTheTopK) {
  DIFFULEX_REQUIRE_DEVICE();
  expect_stats_parity(Rows(17, DType::kF32, 43 * 2048 + 5, 50, 3), "50 rows");
}

/// Rows too long for a cluster take the kernels of any device.
TEST(CudaTokenStatsClusterTest, VeryLongRowsMatchCpu) {
  DIFFULEX_REQUIRE_DEVICE();
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    expect_stats_parity(Rows(19, dtype, 256 * 2048 + 5, 2, 3), to_string(dtype));
  }
}

/// Columns that only fill up a chunk have no weight, however flat the temperature makes the row.
TEST(CudaTokenStatsClusterTest, VeryHighTemperaturesMatchCpu) {
  DIFFULEX_REQUIRE_DEVICE();
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (const float inverse : {1.0e-4F, 1.0e-6F}) {
      Rows rows(23, dtype, 2048 + 50, 4, 0);
      rows.temperature.assign(4, inverse);
      expect_stats_parity(rows, to_string(dtype));
    }
  }
}

/// A chunk with one candidate has no second one; its columns that only fill it up are none.
TEST(CudaTokenStatsClusterTest, AChunkMayHaveOneCandidate) {
  DIFFULEX_REQUIRE_DEVICE();
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    Rows rows(13, dtype, 2 * 2048 + 4, 8, 0);  // the last three columns are past the limit
    for (int64_t row = 0; row < rows.rows; ++row) {
      rows.temperature[static_cast<size_t>(row)] = 0.0F;
      if (row % 4 != 0) {
        rows.logits.set({row, 4096}, 40.0);
      }
      for (int64_t id = 0; row % 4 == 3 && id < rows.vocab; ++id) {
        rows.logits.set({row, id}, id == 4096 ? 40.0 : -60001.0 - static_cast<double>(id % 2));
      }
    }
    expect_stats_parity(rows, to_string(dtype));
  }
}

TEST(CudaTokenStatsClusterTest, ReplayedGraphReadsNewLogits) {
  DIFFULEX_REQUIRE_DEVICE();
  Rows rows(7, DType::kBF16, 30000, 4, 3);
  rows.clear();
  DeviceMirror mirror;
  const TokenStatsParams device =
      rows.params([&](const TensorRef& tensor) { return mirror.upload(tensor); });
  DeviceContext context(token_stats_workspace_bytes(4, 30000, 3, Device::kCuda));
  ASSERT_TRUE(token_stats(device, context.get()).ok());
  cudaStream_t stream = nullptr;
  DIFFULEX_ASSERT_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  context.get().stream = stream;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  DIFFULEX_ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  ASSERT_TRUE(token_stats(device, context.get()).ok());
  ASSERT_TRUE(token_stats(device, context.get()).ok());  // a programmatic edge between the two
  DIFFULEX_ASSERT_CUDA(cudaStreamEndCapture(stream, &graph));
  DIFFULEX_ASSERT_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  std::mt19937_64 random(8);
  rows.logits.fill_normal(&random, 3.0);
  rows.clear();
  mirror.refresh();
  DIFFULEX_ASSERT_CUDA(cudaGraphLaunch(exec, stream));
  DIFFULEX_ASSERT_CUDA(cudaStreamSynchronize(stream));
  mirror.download();
  Rows eager = rows;
  eager.run();
  ASSERT_FALSE(HasFatalFailure());
  EXPECT_EQ(rows.ids, eager.ids);
  EXPECT_TRUE(same_bits(rows.stats, eager.stats));
  EXPECT_TRUE(same_bits(rows.topk_probs, eager.topk_probs));
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

/// Runs the case on both sides and compares; `same_runs` more runs must give the same bits.
void expect_filtered_parity(FilterCase host, int same_runs, const char* what) {
  FilterCase device = host;
  Status status =
      sample_filtered(host.params([](const TensorRef& tensor) { return tensor; }), ExecContext{});
  ASSERT_TRUE(status.ok()) << status.message();
  std::vector<float> first;
  for (int run = 0; run <= same_runs; ++run) {
    device.clear();
    DeviceMirror mirror;
    DeviceContext context(0);
    status = sample_filtered(
        device.params([&](const TensorRef& tensor) { return mirror.upload(tensor); }),
        context.get());
    ASSERT_TRUE(status.ok()) << status.message();
    mirror.download();
    first = run == 0 ? device.stats : first;
    EXPECT_TRUE(same_bits(first, device.stats)) << what;
  }
  EXPECT_EQ(device.ids, host.ids) << what;
  for (size_t i = 0; i < host.stats.size(); ++i) {
    EXPECT_NEAR(device.stats[i], host.stats[i], 2e-5 + 1e-4 * std::abs(host.stats[i]))
        << what << " element " << i;
  }
}

/// Four rows: top-k, top-p, all filters, and one without any.
FilterCase four_rows(uint64_t seed, int64_t vocab, double step, double shift) {
  FilterCase rows(DType::kBF16, 4, vocab);
  std::mt19937_64 random(seed);
  rows.logits.fill_normal(&random, 3.0);
  for (int64_t i = 0; i < rows.logits.elements(); ++i) {
    const double value = rows.logits.get_offset(i) + shift;
    rows.logits.set_offset(i, step > 0.0 ? std::round(value / step) * step : value);
  }
  rows.top_k = {40, 0, 700, 0};
  rows.top_p = {1.0F, 0.9F, 0.7F, 1.0F};
  rows.min_p = {0.0F, 0.0F, 0.001F, 0.0F};
  rows.inv_temperature = {1.0F, 0.7F, 1.4F, 1.0F};
  rows.uniforms = {0.123, 0.9871, 0.5004, 0.5};
  rows.forbidden = {vocab - 2, -1, 17};
  return rows;
}

TEST(CudaSampleFilteredClusterTest, LargeVocabularyMatchesCpu) {
  DIFFULEX_REQUIRE_DEVICE();
  for (const FilterOrder order : {FilterOrder::kTopPFirst, FilterOrder::kTopKFirst}) {
    for (const int64_t vocab : {4099, 60000}) {
      FilterCase rows = four_rows(static_cast<uint64_t>(vocab), vocab, 0.0, 0.0);
      rows.order = order;
      rows.exclusion = vocab == 4099 ? ExclusionMode::kRenormalize : ExclusionMode::kExclude;
      expect_filtered_parity(rows, 3, "random");
      ASSERT_FALSE(HasFatalFailure());
    }
  }
}

TEST(CudaSampleFilteredClusterTest, UnfilteredSpaceMatchesCpu) {
  DIFFULEX_REQUIRE_DEVICE();
  FilterCase rows = four_rows(6, 30011, 0.0, 0.0);
  rows.space = ConfidenceSpace::kTempered;
  rows.vocab_limit = 30000;
  expect_filtered_parity(rows, 1, "tempered");
}

TEST(CudaSampleFilteredClusterTest, SmallValuesHaveWeight) {
  DIFFULEX_REQUIRE_DEVICE();
  for (const FilterOrder order : {FilterOrder::kTopPFirst, FilterOrder::kTopKFirst}) {
    FilterCase rows = four_rows(7, 20000, 0.0, 0.0);
    for (int64_t i = 0; i < rows.logits.elements(); i += 1 + i % 2) {
      rows.logits.set_offset(i, rows.logits.get_offset(i) * 1e-3);
    }
    rows.top_p = {0.02F, 0.1F, 0.2F, 0.3F};
    rows.order = order;
    expect_filtered_parity(rows, 1, "half of them small");
  }
}

TEST(CudaSampleFilteredClusterTest, TiesAtTheCutGoToLowIds) {
  DIFFULEX_REQUIRE_DEVICE();
  expect_filtered_parity(four_rows(1, 50000, 0.5, 0.0), 1, "steps of one half");
  expect_filtered_parity(four_rows(2, 50000, 8.0, 4.0), 1, "few values");
}

TEST(CudaSampleFilteredClusterTest, ValuesThatShareABinAreLeftToTheGeneralKernel) {
  DIFFULEX_REQUIRE_DEVICE();
  FilterCase tiny = four_rows(3, 20000, 0.0, 0.0);
  for (int64_t i = 0; i < tiny.logits.elements(); ++i) {
    tiny.logits.set_offset(i, tiny.logits.get_offset(i) * 1e-3);
  }
  expect_filtered_parity(tiny, 1, "around zero");
  expect_filtered_parity(four_rows(4, 20000, 0.0, 600.0), 1, "large");
  expect_filtered_parity(four_rows(5, 20000, 0.0, -600.0), 1, "very negative");
  expect_filtered_parity(four_rows(8, 20000, 0.0, -200.0), 1, "so low that powers overflow");
}

}  // namespace
}  // namespace diffulex::test
