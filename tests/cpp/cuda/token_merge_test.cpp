// SPDX-License-Identifier: Apache-2.0

// The embedding mixes on the device against the CPU kernels, which have their own fp64 tests.

#include <random>

#include <gtest/gtest.h>

#include "cuda/op_parity.h"
#include "ops/merge_case.h"

namespace diffulex::test {
namespace {

constexpr DType kDTypes[] = {DType::kF32, DType::kF16, DType::kBF16};

TEST(CudaTokenMergeTest, MatchesCpu) {
  DIFFULEX_REQUIRE_DEVICE();
  std::mt19937_64 random(1);
  for (uint64_t seed = 0; seed < num_seeds(120); ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    const DType dtype = kDTypes[seed % 3];
    const int64_t width = pick(&random, {1, 7, 64, 100, 2048, 2816, 8192, 8200});
    MergeCase cpu(&random, dtype, uniform(&random, 1, 9), width, uniform(&random, 1, 16), 50,
                  pick(&random, {0, 8, 3}));
    MergeCase gpu = cpu;
    for (const bool on_device : {false, true}) {
      TokenMergeEmbedParams params = (on_device ? gpu : cpu).params();
      params.merge_kind = seed % 4 == 0 ? MergeKind::kIterSmoothTopk : MergeKind::kDmaxTopk;
      params.renormalize = seed % 2 == 0;
      params.weight = 0.75F;
      DeviceMirror mirror(seed % 5 == 0 ? 1 : 0);
      DeviceContext context(0);
      if (on_device) {
        for (TensorRef* tensor : {&params.hidden, &params.embedding, &params.merge_mask,
                                  &params.topk_ids, &params.topk_probs, &params.residual_probs}) {
          *tensor = mirror.upload(*tensor);
        }
      }
      const Status status = token_merge_embed(params, on_device ? context.get() : ExecContext());
      ASSERT_TRUE(status.ok()) << status.message();
      if (on_device) {
        mirror.download();
      }
    }
    expect_parity(cpu.hidden_states, gpu.hidden_states, dtype, "hidden");
  }
}

TEST(CudaTokenMergeTest, ShardPartsMatchCpu) {
  DIFFULEX_REQUIRE_DEVICE();
  std::mt19937_64 random(2);
  for (uint64_t seed = 0; seed < num_seeds(30); ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    const DType dtype = kDTypes[seed % 3];
    const int64_t width = pick(&random, {5, 64, 2816});
    MergeCase cpu(&random, dtype, 6, width, 4, 50, 0);
    MergeCase gpu = cpu;
    TestTensor cpu_part(DType::kF32, {6, width + 1});
    cpu_part.fill(kNaN);
    TestTensor gpu_part = cpu_part;
    for (const bool on_device : {false, true}) {
      MergeCase& merge = on_device ? gpu : cpu;
      TestTensor& part = on_device ? gpu_part : cpu_part;
      DeviceMirror mirror;
      DeviceContext context(0);
      const auto place = [&](const TensorRef& ref) { return on_device ? mirror.upload(ref) : ref; };
      TokenMergePartialParams shard;
      TensorRef table = merge.table.ref();
      table.size[0] = 20;
      shard.embedding = place(table);
      shard.merge_mask = place(ref_of(merge.mask));
      shard.topk_ids = place(ref_of(merge.ids, {6, 4}));
      shard.topk_probs = place(ref_of(merge.probs, {6, 4}));
      shard.residual_probs = place(ref_of(merge.residual));
      shard.partial = place(part.ref());
      shard.mask_token_id = merge.mask_token_id;
      shard.vocab_start = 30;
      const ExecContext exec = on_device ? context.get() : ExecContext();
      Status status = token_merge_partial(shard, exec);
      ASSERT_TRUE(status.ok()) << status.message();
      TokenMergeFinalizeParams last;
      last.partial = shard.partial;
      last.merge_mask = shard.merge_mask;
      last.hidden = place(merge.hidden_states.ref());
      last.renormalize = seed % 2 == 0;
      status = token_merge_finalize(last, exec);
      ASSERT_TRUE(status.ok()) << status.message();
      if (on_device) {
        mirror.download();
      }
    }
    expect_parity(cpu_part, gpu_part, DType::kF32, "partial");
    expect_parity(cpu.hidden_states, gpu.hidden_states, dtype, "hidden");
  }
}

TEST(CudaSoftEmbeddingTest, MatchesCpu) {
  DIFFULEX_REQUIRE_DEVICE();
  std::mt19937_64 random(3);
  for (uint64_t seed = 0; seed < num_seeds(60); ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    const DType table_dtype = kDTypes[seed % 3];
    const int64_t rows = pick(&random, {1, 5, 127, 129, 300});
    const int64_t vocab = pick(&random, {1, 31, 1000, 4097, 40000});
    const int64_t width = pick(&random, {1, 8, 100, 136, 264});
    SoftCase cpu(&random, kDTypes[seed / 3 % 3], table_dtype, rows, vocab, width,
                 pick(&random, {0, 8, 3}));
    SoftCase gpu = cpu;
    for (const bool on_device : {false, true}) {
      SoftEmbeddingParams params = (on_device ? gpu : cpu).params();
      params.vocab_limit = seed % 4 == 0 ? vocab * 3 / 4 : -1;
      DeviceMirror mirror(seed % 5 == 0 ? 1 : 0);
      DeviceContext context(
          soft_embedding_workspace_bytes(rows, vocab, width, table_dtype, Device::kCuda));
      if (on_device) {
        for (TensorRef* tensor : {&params.logits, &params.lse, &params.inv_temperature,
                                  &params.embedding, &params.row_valid, &params.out}) {
          *tensor = mirror.upload(*tensor);
        }
      }
      const Status status = soft_embedding(params, on_device ? context.get() : ExecContext());
      ASSERT_TRUE(status.ok()) << status.message();
      if (on_device) {
        mirror.download();
      }
    }
    // Both round the probabilities to the dtype of the table, from values an ulp apart.
    const double bound = 2.5 * 5.0 * rounding_error(table_dtype, 1.0) + 5e-5;
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = 0; i < width; ++i) {
        ASSERT_NEAR(gpu.out.get({row, i}), cpu.out.get({row, i}), bound) << row << " " << i;
      }
    }
  }
}

}  // namespace
}  // namespace diffulex::test
