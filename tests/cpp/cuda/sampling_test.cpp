// SPDX-License-Identifier: Apache-2.0

// token_stats, merge_token_stats and accept_mask_fill on the device: ids and decisions equal to the
// CPU kernels', and for plain greedy rows the statistics held against fp64 directly.

#include "diffulex/ops/sampling.h"

#include <random>
#include <string>

#include <gtest/gtest.h>

#include "cuda/op_parity.h"

namespace diffulex::test {
namespace {

/// All inputs and outputs of one token_stats call.
struct StatsCase {
  StatsCase(uint64_t seed, DType logits_dtype, int64_t vocab_size, int64_t num_rows, int32_t top_k)
      : random(seed), dtype(logits_dtype), vocab(vocab_size), rows(num_rows), kt(top_k) {
    logits = TestTensor(dtype, {rows, vocab}, {rows, vocab + pick(&random, {0, 8, 3})});
    logits.fill_normal(&random, 4.0);
    extra = random_tensor(&random, dtype, {2, vocab});
    for (int64_t row = 0; row < rows; ++row) {
      row_index.push_back(static_cast<int32_t>(uniform(&random, -1, rows + 1)));
      temperature.push_back(static_cast<float>(row % 2) * 0.7F);
      uniforms.push_back((static_cast<double>(random() >> 12) + 0.5) / 4503599627370496.0);
      penalty_ids.push_back(uniform(&random, -1, vocab - 1));
      penalties.push_back(row % 3 == 2 ? 0.0F : 1.5F + static_cast<float>(row % 2));
    }
    forbidden = {uniform(&random, 0, vocab - 1), -1, vocab - 1};
    ids.assign(static_cast<size_t>(rows), 99);
    stats.assign(static_cast<size_t>(rows * kTokenStatsColumns), std::nanf(""));
    topk_ids.assign(static_cast<size_t>(rows * kt), 99);
    topk_probs.assign(static_cast<size_t>(rows * kt), std::nanf(""));
  }

  template <typename Place>
  TokenStatsParams params(const Place& place) {
    TokenStatsParams result;
    result.logits = place(logits.ref());
    if (with_gather) {
      result.extra_logits = place(extra.ref());
      result.row_index = place(ref_of(row_index));
    }
    if (with_draw) {
      result.inv_temperature = place(ref_of(temperature));
      result.uniforms = place(ref_of(uniforms));
    }
    result.forbidden_ids = place(ref_of(forbidden));
    result.penalty_ids = place(ref_of(penalty_ids));
    result.penalties = place(ref_of(penalties));
    result.ids = place(ref_of(ids));
    result.stats = place(ref_of(stats, {rows, kTokenStatsColumns}));
    if (kt > 0) {
      result.topk_ids = place(ref_of(topk_ids, {rows, kt}));
      result.topk_probs = place(ref_of(topk_probs, {rows, kt}));
    }
    return result;
  }

  std::mt19937_64 random;
  DType dtype;
  int64_t vocab;
  int64_t rows;
  int32_t kt;
  bool with_gather = true;
  bool with_draw = true;
  TestTensor logits;
  TestTensor extra;
  std::vector<int32_t> row_index;
  std::vector<float> temperature;
  std::vector<double> uniforms;
  std::vector<int64_t> penalty_ids;
  std::vector<float> penalties;
  std::vector<int64_t> forbidden;
  std::vector<int64_t> ids;
  std::vector<float> stats;
  std::vector<int64_t> topk_ids;
  std::vector<float> topk_probs;
};

void expect_close(const std::vector<float>& want, const std::vector<float>& got, const char* what) {
  for (size_t i = 0; i < want.size(); ++i) {
    if (std::isinf(want[i])) {
      ASSERT_EQ(want[i], got[i]) << what << " " << i;
      continue;
    }
    ASSERT_LE(std::abs(got[i] - want[i]), 2e-5 * (1.0 + std::abs(want[i])))
        << what << " column " << i % kTokenStatsColumns << " of " << i / kTokenStatsColumns;
  }
}

template <typename Adjust>
void run_both(StatsCase* cpu, StatsCase* gpu, const Adjust& adjust) {
  TokenStatsParams host = cpu->params([](const TensorRef& ref) { return ref; });
  adjust(&host);
  Status status = token_stats(host, ExecContext());
  ASSERT_TRUE(status.ok()) << status.message();
  DeviceMirror mirror;
  TokenStatsParams device = gpu->params([&](const TensorRef& ref) { return mirror.upload(ref); });
  adjust(&device);
  DeviceContext context(token_stats_workspace_bytes(gpu->rows, gpu->vocab, gpu->kt, Device::kCuda));
  status = token_stats(device, context.get());
  ASSERT_TRUE(status.ok()) << status.message();
  mirror.download();
}

TEST(CudaTokenStatsTest, MatchesCpu) {
  DIFFULEX_REQUIRE_DEVICE();
  std::mt19937_64 random(6);
  int64_t draws = 0;
  int64_t equal_draws = 0;
  for (uint64_t seed = 0; seed < num_seeds(120); ++seed) {
    const DType dtype = static_cast<DType>(seed % 3);
    const int64_t vocab = pick(&random, {1, 5, 50, 2047, 2048, 2049, 4096, 9001, 40000});
    const int32_t kt = static_cast<int32_t>(pick(&random, {0, 1, 8, 64}));
    StatsCase cpu(seed, dtype, vocab, uniform(&random, 1, 9), kt);
    if (seed % 4 == 1) {  // values that need care
      for (int64_t i = 0; i < cpu.logits.elements(); i += 7) {
        const double bad[] = {kNaN, kInf, -kInf, 4.0};
        cpu.logits.set_offset(i, bad[i % 4]);
      }
    }
    if (seed % 4 == 2) {  // ties everywhere
      cpu.logits.fill(1.0);
    }
    StatsCase gpu = cpu;
    run_both(&cpu, &gpu, [&](TokenStatsParams* params) {
      params->vocab_limit = seed % 5 == 0 ? std::max<int64_t>(1, vocab - 3) : -1;
      params->softcap = seed % 6 == 5 ? 30.0F : 0.0F;
      params->exclusion = static_cast<ExclusionMode>(seed % 3);
    });
    ASSERT_FALSE(HasFatalFailure()) << "seed " << seed;
    bool same_ids = true;
    for (size_t row = 0; row < cpu.ids.size(); ++row) {
      if (cpu.temperature[row] == 0.0F) {
        ASSERT_EQ(cpu.ids[row], gpu.ids[row]) << "seed " << seed << " row " << row;
        continue;
      }
      ++draws;
      equal_draws += cpu.ids[row] == gpu.ids[row] ? 1 : 0;
      same_ids = same_ids && cpu.ids[row] == gpu.ids[row];
    }
    ASSERT_EQ(cpu.topk_ids, gpu.topk_ids) << "seed " << seed;
    expect_close(cpu.topk_probs, gpu.topk_probs, "top-k");
    if (same_ids) {
      expect_close(cpu.stats, gpu.stats, "stats");
    }
    ASSERT_FALSE(HasFatalFailure()) << "seed " << seed << " vocab " << vocab;
  }
  // A draw may differ where the uniform meets a boundary of the distribution to the last bits.
  EXPECT_GE(equal_draws, draws - draws / 100) << draws << " draws";
}

TEST(CudaTokenStatsTest, GreedyRowsMatchFp64) {
  DIFFULEX_REQUIRE_DEVICE();
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    StatsCase gpu(17, dtype, 30011, 4, 0);
    StatsCase cpu = gpu;
    cpu.with_gather = gpu.with_gather = false;
    cpu.with_draw = gpu.with_draw = false;
    cpu.penalties.assign(4, 0.0F);
    gpu.penalties = cpu.penalties;
    run_both(&cpu, &gpu, [](TokenStatsParams* /*params*/) {});
    ASSERT_FALSE(HasFatalFailure());
    for (int64_t row = 0; row < gpu.rows; ++row) {
      double top = -kInf;
      int64_t best = -1;
      for (int64_t id = 0; id < gpu.vocab; ++id) {
        const bool is_forbidden = id == gpu.forbidden[0] || id == gpu.forbidden[2];
        if (!is_forbidden && gpu.logits.get({row, id}) > top) {
          top = gpu.logits.get({row, id});
          best = id;
        }
      }
      double sum = 0.0;
      double weighted = 0.0;
      for (int64_t id = 0; id < gpu.vocab; ++id) {
        const double power = std::exp(gpu.logits.get({row, id}) - top);
        sum += power;
        weighted += power * (gpu.logits.get({row, id}) - top);
      }
      const float* stats = gpu.stats.data() + row * kTokenStatsColumns;
      EXPECT_EQ(gpu.ids[static_cast<size_t>(row)], best);
      EXPECT_NEAR(stats[kStatsConfidence], 1.0 / sum, 1e-5 / sum);
      EXPECT_NEAR(stats[kStatsLogSumExp], top + std::log(sum), 1e-5);
      EXPECT_NEAR(stats[kStatsEntropy], std::log(sum) - weighted / sum, 1e-4);
      EXPECT_EQ(stats[kStatsMaxLogit], static_cast<float>(top));
      EXPECT_EQ(stats[kStatsBadCount], 0.0F);
    }
  }
}

/// One value that is not finite must be counted wherever it stands: a soft cap makes infinities
/// finite, and excluded columns have no part in the sums.
TEST(CudaTokenStatsTest, OneBadValueIsCountedWhereverItStands) {
  DIFFULEX_REQUIRE_DEVICE();
  const int64_t vocab = 5003;
  const int64_t limit = vocab - 7;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (int mode = 0; mode < 3; ++mode) {
      for (const float softcap : {0.0F, 30.0F}) {
        // Rows of a candidate, the forbidden id, a column past the limit, the penalised one.
        StatsCase gpu(5, dtype, vocab, 12, 5);
        gpu.with_gather = gpu.with_draw = false;
        const int64_t columns[] = {4134, gpu.forbidden[0], vocab - 2, 1700};
        const double bad[] = {kInf, -kInf, kNaN};
        for (int64_t row = 0; row < gpu.rows; ++row) {
          gpu.logits.set({row, columns[row % 4]}, bad[row / 4]);
          gpu.penalty_ids[static_cast<size_t>(row)] = 1700;
        }
        StatsCase cpu = gpu;
        run_both(&cpu, &gpu, [&](TokenStatsParams* params) {
          params->vocab_limit = limit;
          params->softcap = softcap;
          params->exclusion = static_cast<ExclusionMode>(mode);
        });
        ASSERT_FALSE(HasFatalFailure());
        const std::string what = std::string(to_string(dtype)) + " mode " + std::to_string(mode) +
                                 " cap " + std::to_string(softcap);
        for (int64_t row = 0; row < gpu.rows; ++row) {
          const auto place = static_cast<size_t>(row * kTokenStatsColumns + kStatsBadCount);
          EXPECT_EQ(gpu.stats[place], 1.0F) << what << " row " << row;
        }
        EXPECT_EQ(cpu.ids, gpu.ids) << what;
        EXPECT_EQ(cpu.topk_ids, gpu.topk_ids) << what;
        expect_close(cpu.topk_probs, gpu.topk_probs, "top-k");
        expect_close(cpu.stats, gpu.stats, "stats");
        ASSERT_FALSE(HasFatalFailure()) << what;
      }
    }
  }
}

/// Columns that only fill a chunk have no weight under a soft cap; a stored value has, however low.
TEST(CudaTokenStatsTest, CappedShortRowsMatchFp64) {
  DIFFULEX_REQUIRE_DEVICE();
  constexpr double kCap = 30.0;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const int64_t vocab : {2, 50, 2051}) {
      StatsCase gpu(9, dtype, vocab, 6, 0);
      gpu.with_gather = false;
      gpu.uniforms.assign(6, 0.5);
      gpu.penalties.assign(6, 0.0F);
      gpu.temperature = {0.0F, 0.0F, 0.25F, 0.25F, 0.5882353F, 0.5882353F};
      for (int64_t row = 1; row < gpu.rows; row += 2) {
        gpu.logits.set({row, vocab - 1}, -65504.0);  // lowest finite value of the smallest type
      }
      StatsCase cpu = gpu;
      run_both(&cpu, &gpu, [&](TokenStatsParams* params) {
        params->softcap = static_cast<float>(kCap);
        params->exclusion = ExclusionMode::kOff;
      });
      ASSERT_FALSE(HasFatalFailure());
      for (int64_t row = 0; row < gpu.rows; ++row) {
        const float inverse = gpu.temperature[static_cast<size_t>(row)];
        double sum = 0.0;
        double weighted = 0.0;
        for (int64_t id = 0; id < vocab; ++id) {
          const double z = kCap * std::tanh(gpu.logits.get({row, id}) / kCap) *
                           (inverse == 0.0F ? 1.0 : static_cast<double>(inverse));
          sum += std::exp(z);
          weighted += std::exp(z) * z;
        }
        const float* stats = gpu.stats.data() + row * kTokenStatsColumns;
        EXPECT_NEAR(stats[kStatsEntropy], std::log(sum) - weighted / sum, 5e-5)
            << to_string(dtype) << " V " << vocab << " row " << row;
        EXPECT_NEAR(stats[kStatsLogSumExp], std::log(sum), 2e-5);
        EXPECT_EQ(stats[kStatsBadCount], 0.0F);
      }
    }
  }
}

TEST(CudaTokenStatsTest, MergedShardsEqualTheWholeRow) {
  DIFFULEX_REQUIRE_DEVICE();
  for (uint64_t seed = 0; seed < num_seeds(12); ++seed) {
    const int64_t vocab = 6000;
    const int32_t kt = 8;
    StatsCase whole(seed, DType::kBF16, vocab, 5, kt);
    whole.with_gather = false;
    whole.with_draw = false;
    StatsCase cpu = whole;
    run_both(&cpu, &whole, [](TokenStatsParams*) {});
    ASSERT_FALSE(HasFatalFailure());
    const int64_t parts = 3;
    std::vector<int64_t> part_ids(static_cast<size_t>(parts * 5));
    std::vector<float> part_stats(static_cast<size_t>(parts * 5 * kTokenStatsColumns));
    std::vector<int64_t> part_topk_ids(static_cast<size_t>(parts * 5 * kt));
    std::vector<float> part_topk_vals(static_cast<size_t>(parts * 5 * kt));
    DeviceMirror mirror;
    const TensorRef ids_ref = mirror.upload(ref_of(part_ids, {parts, 5}));
    const TensorRef stats_ref = mirror.upload(ref_of(part_stats, {parts, 5, kTokenStatsColumns}));
    const TensorRef topk_ids_ref = mirror.upload(ref_of(part_topk_ids, {parts, 5, kt}));
    const TensorRef topk_vals_ref = mirror.upload(ref_of(part_topk_vals, {parts, 5, kt}));
    const auto slice = [](TensorRef tensor, int64_t index) {
      tensor.data =
          static_cast<uint8_t*>(tensor.data) + index * tensor.stride[0] * dtype_bytes(tensor.dtype);
      for (int32_t dim = 0; dim + 1 < tensor.rank; ++dim) {
        tensor.size[dim] = tensor.size[dim + 1];
        tensor.stride[dim] = tensor.stride[dim + 1];
      }
      --tensor.rank;
      return tensor;
    };
    DeviceContext context(token_stats_workspace_bytes(5, vocab, kt, Device::kCuda));
    for (int64_t part = 0; part < parts; ++part) {
      TokenStatsParams params =
          whole.params([&](const TensorRef& ref) { return mirror.upload(ref); });
      params.logits.data = static_cast<uint8_t*>(params.logits.data) + part * 2000 * 2;
      params.logits.size[1] = 2000;
      params.vocab_start = part * 2000;
      params.partial = true;
      params.ids = slice(ids_ref, part);
      params.stats = slice(stats_ref, part);
      params.topk_ids = slice(topk_ids_ref, part);
      params.topk_probs = slice(topk_vals_ref, part);
      const Status status = token_stats(params, context.get());
      ASSERT_TRUE(status.ok()) << status.message();
    }
    std::vector<int64_t> ids(5, 0);
    std::vector<float> stats(5 * kTokenStatsColumns, 0.0F);
    std::vector<int64_t> topk_ids(static_cast<size_t>(5 * kt), 0);
    std::vector<float> topk_probs(static_cast<size_t>(5 * kt), 0.0F);
    MergeTokenStatsParams merge;
    merge.part_ids = ids_ref;
    merge.part_stats = stats_ref;
    merge.part_topk_ids = topk_ids_ref;
    merge.part_topk_vals = topk_vals_ref;
    merge.ids = mirror.upload(ref_of(ids));
    merge.stats = mirror.upload(ref_of(stats, {5, kTokenStatsColumns}));
    merge.topk_ids = mirror.upload(ref_of(topk_ids, {5, kt}));
    merge.topk_probs = mirror.upload(ref_of(topk_probs, {5, kt}));
    const Status status = merge_token_stats(merge, context.get());
    ASSERT_TRUE(status.ok()) << status.message();
    const StatsCase before = whole;
    mirror.download();
    EXPECT_EQ(ids, before.ids);
    EXPECT_EQ(topk_ids, before.topk_ids);
    expect_close(before.stats, stats, "merged stats");
    expect_close(before.topk_probs, topk_probs, "merged top-k");
  }
}

TEST(CudaAcceptMaskFillTest, MatchesCpu) {
  DIFFULEX_REQUIRE_DEVICE();
  std::mt19937_64 random(8);
  for (uint64_t seed = 0; seed < num_seeds(400); ++seed) {
    const int64_t block = pick(&random, {1, 4, 8, 32, 33, 256});
    const int64_t blocks = uniform(&random, 1, 6);
    const int64_t rows = blocks * block;
    const int64_t mask = 7;
    std::vector<int64_t> tokens, ids, write_ids(static_cast<size_t>(rows), 55);
    std::vector<int32_t> row_index, start, valid, steps;
    std::vector<int32_t> left(static_cast<size_t>(blocks), 55), flags(left);
    std::vector<uint8_t> gate;
    std::vector<float> threshold, stats, confidence(static_cast<size_t>(rows), 55.0F);
    for (int64_t i = 0; i < rows; ++i) {
      tokens.push_back(uniform(&random, 0, 2) == 0 ? 3 : mask);
      row_index.push_back(static_cast<int32_t>(uniform(&random, 0, 60) == 0 ? -1 : i));
      ids.push_back(uniform(&random, 0, 60) == 0 ? -1 : uniform(&random, 0, 999));
      const double p = static_cast<double>(uniform(&random, 0, 20)) / 20.0;
      for (int64_t column = 0; column < kTokenStatsColumns; ++column) {
        stats.push_back(static_cast<float>(static_cast<double>(uniform(&random, 0, 9)) / 10.0));
      }
      stats[stats.size() - kTokenStatsColumns + kStatsConfidence] = static_cast<float>(p);
    }
    for (int64_t i = 0; i < blocks; ++i) {
      start.push_back(static_cast<int32_t>(uniform(&random, 0, block) / 2));
      valid.push_back(
          static_cast<int32_t>(uniform(&random, 0, 3) == 0 ? uniform(&random, 0, block) : block));
      steps.push_back(static_cast<int32_t>(uniform(&random, 0, block)));
      gate.push_back(static_cast<uint8_t>(uniform(&random, 0, 1)));
      threshold.push_back(0.05F * static_cast<float>(uniform(&random, 10, 21)));
    }
    const auto params = [&](const auto& place) {
      AcceptMaskFillParams result;
      result.tokens = place(ref_of(tokens, {blocks, block}));
      result.row_index = place(ref_of(row_index, {blocks, block}));
      result.editable_start = place(ref_of(start));
      result.valid_len = place(ref_of(valid));
      result.gate = place(ref_of(gate));
      result.accept_threshold = place(ref_of(threshold));
      result.open_steps = place(ref_of(steps));
      result.ids = place(ref_of(ids));
      result.stats = place(ref_of(stats, {rows, kTokenStatsColumns}));
      result.write_ids = place(ref_of(write_ids, {blocks, block}));
      result.confidence = place(ref_of(confidence, {blocks, block}));
      result.masks_left = place(ref_of(left));
      result.flags = place(ref_of(flags));
      result.mask_token_id = mask;
      result.rule = static_cast<AcceptRule>(seed % 9);
      result.confidence_kind = static_cast<ConfidenceKind>(seed / 7 % 3);
      result.raw_confidence = seed % 5 == 0;
      result.denoising_steps = seed % 4 == 0 ? 0 : static_cast<int32_t>(1 + seed % 6);
      result.force_accept_last_step = seed % 3 == 0;
      result.factor = 0.5F + static_cast<float>(seed % 4);
      result.entropy_bound = 0.4F * static_cast<float>(seed % 5);
      result.low_threshold = 0.2F * static_cast<float>(seed % 4);
      return result;
    };
    DeviceMirror mirror;
    const AcceptMaskFillParams device =
        params([&](const TensorRef& ref) { return mirror.upload(ref); });
    const AcceptMaskFillParams host = params([](const TensorRef& ref) { return ref; });
    Status status = accept_mask_fill(host, ExecContext());
    ASSERT_TRUE(status.ok()) << status.message();
    const auto want_ids = write_ids;
    const auto want_confidence = confidence;
    const auto want_left = left;
    const auto want_flags = flags;
    DeviceContext context(0);
    status = accept_mask_fill(device, context.get());
    ASSERT_TRUE(status.ok()) << status.message();
    mirror.download();
    ASSERT_EQ(write_ids, want_ids) << "seed " << seed;
    ASSERT_EQ(confidence, want_confidence) << "seed " << seed;
    ASSERT_EQ(left, want_left) << "seed " << seed;
    ASSERT_EQ(flags, want_flags) << "seed " << seed;
  }
}

}  // namespace
}  // namespace diffulex::test
