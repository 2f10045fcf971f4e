// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "diffulex/ops/merge.h"
#include "ops/guarded_tensor.h"
#include "ops/merge_case.h"

namespace diffulex::test {
namespace {

using testing::HasSubstr;

constexpr DType kDTypes[] = {DType::kF32, DType::kF16, DType::kBF16};

struct Finish {
  MergeKind kind;
  bool renormalize;
};
constexpr Finish kFinishes[] = {{MergeKind::kDmaxTopk, false},
                                {MergeKind::kDmaxTopk, true},
                                {MergeKind::kIterSmoothTopk, false}};

/// Runs body(begin, end) in three uneven pieces, last first: results must not depend on it.
void piecewise(int64_t begin, int64_t end, int64_t /*grain*/, RangeFn body, void* context,
               void* /*pool*/) {
  const int64_t first = begin + (end - begin) / 3;
  const int64_t second = begin + (end - begin) * 3 / 4;
  body(second, end, context);
  body(begin, first, context);
  body(first, second, context);
}

TEST(TokenMerge, MatchesTheFormula) {
  std::mt19937_64 random(5);
  for (int64_t trial = 0; trial < 60; ++trial) {
    SCOPED_TRACE(testing::Message() << "trial " << trial);
    const DType dtype = kDTypes[trial % 3];
    const Finish finish = kFinishes[trial / 3 % 3];
    const int64_t width = pick(&random, {1, 5, 16, 33, 130});
    MergeCase merge(&random, dtype, 7, width, uniform(&random, 1, 16), 30, trial % 4);
    const MergeCase before = merge;
    TokenMergeEmbedParams params = merge.params();
    params.merge_kind = finish.kind;
    params.renormalize = finish.renormalize;
    params.weight = 0.5F;
    ASSERT_TRUE(token_merge_embed(params, ExecContext{}).ok());
    for (int64_t row = 0; row < 7; ++row) {
      const bool is_merged = before.mask[static_cast<size_t>(row)] != 0;
      const std::vector<double> want = before.expected(row, finish.kind, finish.renormalize, 0.5);
      for (int64_t i = 0; i < width; ++i) {
        const double got = merge.hidden_states.get({row, i});
        if (!is_merged) {
          ASSERT_EQ(got, before.hidden_states.get({row, i}));
          continue;
        }
        const double expected = want[static_cast<size_t>(i)];
        ASSERT_LE(std::abs(got - expected), rounding_error(dtype, expected) + 4e-6);
      }
    }
  }
}

/// E[1] = (3, 4), E[2] = (1, 0), E[7] = (4, -3), which is the mask token; hidden starts as E[2].
struct WorkedMerge {
  explicit WorkedMerge(int64_t top_k)
      : hidden(DType::kF32, {1, 2}), table(DType::kF32, {8, 2}), ids(top_k), probs(top_k) {
    const std::pair<int64_t, std::pair<double, double>> rows[] = {
        {1, {3, 4}}, {2, {1, 0}}, {7, {4, -3}}};
    table.fill(1e6);
    for (const auto& [id, row] : rows) {
      table.set({id, 0}, row.first);
      table.set({id, 1}, row.second);
    }
    hidden.set({0, 0}, 1.0);
    hidden.set({0, 1}, 0.0);
  }
  void run(MergeKind kind) {
    TokenMergeEmbedParams params;
    const auto top_k = static_cast<int64_t>(ids.size());
    params.hidden = hidden.ref();
    params.embedding = table.ref();
    params.merge_mask = ref_of(mask);
    params.topk_ids = ref_of(ids, {1, top_k});
    params.topk_probs = ref_of(probs, {1, top_k});
    params.residual_probs = ref_of(residual);
    params.mask_token_id = 7;
    params.merge_kind = kind;
    params.renormalize = kind == MergeKind::kDmaxTopk;
    ASSERT_TRUE(token_merge_embed(params, ExecContext{}).ok());
  }
  void expect(double first, double second) const {
    EXPECT_NEAR(hidden.get({0, 0}), first, 2e-6);
    EXPECT_NEAR(hidden.get({0, 1}), second, 2e-6);
  }

  TestTensor hidden, table;
  std::vector<uint8_t> mask = {1};
  std::vector<int64_t> ids;
  std::vector<float> probs, residual = {0.0F};
};

TEST(TokenMerge, VectorF) {
  WorkedMerge first(1);
  first.ids = {1};
  first.probs = {.92F};
  first.residual = {.08F};
  first.run(MergeKind::kDmaxTopk);
  first.expect(3.335240, 3.725072);
  WorkedMerge second(1);
  second.ids = {2};
  second.probs = {.60F};
  second.residual = {.40F};
  second.run(MergeKind::kDmaxTopk);
  second.expect(2.282528, -1.245015);
  WorkedMerge two(2);
  two.ids = {2, 1};
  two.probs = {.60F, .10F};
  two.residual = {.30F};
  two.run(MergeKind::kDmaxTopk);
  two.expect(2.529295, -.602213);
  WorkedMerge smooth(1);
  smooth.ids = {2};
  smooth.probs = {.60F};
  smooth.residual = {.40F};  // not read
  smooth.run(MergeKind::kIterSmoothTopk);
  smooth.expect(1.6, 0.0);
}

TEST(TokenMerge, ShardsGiveTheWhole) {
  std::mt19937_64 random(6);
  for (const Finish finish : kFinishes) {
    MergeCase merge(&random, DType::kF32, 6, 40, 4, 30, 0);
    MergeCase whole = merge;
    TokenMergeEmbedParams params = whole.params();
    params.merge_kind = finish.kind;
    params.renormalize = finish.renormalize;
    ASSERT_TRUE(token_merge_embed(params, ExecContext{}).ok());
    TestTensor total(DType::kF32, {6, 41});
    for (const auto& [start, stop] : {std::pair<int64_t, int64_t>{0, 11}, {11, 12}, {12, 30}}) {
      TestTensor part(DType::kF32, {6, 41});
      part.fill(kNaN);
      TokenMergePartialParams shard;
      shard.embedding = merge.params().embedding;
      shard.embedding.data = shard.embedding.as<float>() + start * shard.embedding.stride[0];
      shard.embedding.size[0] = stop - start;
      shard.merge_mask = ref_of(merge.mask);
      shard.topk_ids = ref_of(merge.ids, {6, 4});
      shard.topk_probs = ref_of(merge.probs, {6, 4});
      shard.residual_probs = ref_of(merge.residual);
      shard.partial = part.ref();
      shard.mask_token_id = merge.mask_token_id;
      shard.merge_kind = finish.kind;
      shard.vocab_start = start;
      ASSERT_TRUE(token_merge_partial(shard, ExecContext{}).ok());
      for (int64_t i = 0; i < total.elements(); ++i) {
        total.set_offset(i, total.get_offset(i) + part.get_offset(i));
      }
    }
    TokenMergeFinalizeParams last;
    last.partial = total.ref();
    last.merge_mask = ref_of(merge.mask);
    last.hidden = merge.hidden_states.ref();
    last.merge_kind = finish.kind;
    last.renormalize = finish.renormalize;
    ASSERT_TRUE(token_merge_finalize(last, ExecContext{}).ok());
    for (int64_t i = 0; i < 6 * 40; ++i) {
      ASSERT_NEAR(merge.hidden_states.get_offset(i), whole.hidden_states.get_offset(i), 4e-6);
    }
  }
}

TEST(SoftEmbedding, MatchesTheFormula) {
  std::mt19937_64 random(7);
  for (int64_t trial = 0; trial < 30; ++trial) {
    SCOPED_TRACE(testing::Message() << "trial " << trial);
    const DType table_dtype = kDTypes[trial % 3];
    const int64_t rows = pick(&random, {1, 2, 13});
    const int64_t vocab = pick(&random, {1, 9, 256, 300, 2500});
    const int64_t width = pick(&random, {1, 31, 32, 70});
    SoftCase soft(&random, kDTypes[trial / 3 % 3], table_dtype, rows, vocab, width, trial % 4);
    ASSERT_TRUE(soft_embedding(soft.params(), ExecContext{}).ok());
    // Probabilities are rounded to the dtype of the table: at most half a unit each, of their
    // sum 1.
    const double rounding = 2.5 * 5.0 * rounding_error(table_dtype, 1.0);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = 0; i < width; ++i) {
        ASSERT_NEAR(soft.out.get({row, i}), soft.expected(row, i), rounding + 5e-5);
      }
    }
  }
}

TEST(SoftEmbedding, VectorG) {
  // R0 at T = .8 with W[v] = (.2v, .2v + .1), scaled by sqrt(2).
  const double row[] = {.02, .92, .01, .01, .01, .01, .01, .01};
  TestTensor logits(DType::kF32, {1, 8});
  TestTensor table(DType::kF32, {8, 2});
  TestTensor out(DType::kF32, {1, 2});
  double sum = 0.0;
  for (int64_t id = 0; id < 8; ++id) {
    logits.set({0, id}, std::log(row[id]));
    table.set({id, 0}, .2 * static_cast<double>(id));
    table.set({id, 1}, .2 * static_cast<double>(id) + .1);
    sum += std::pow(row[id], 1.25);
  }
  std::vector<float> lse = {static_cast<float>(std::log(sum))};
  std::vector<float> inverse = {1.25F};
  SoftEmbeddingParams params;
  params.logits = logits.ref();
  params.lse = ref_of(lse);
  params.inv_temperature = ref_of(inverse);
  params.embedding = table.ref();
  params.out = out.ref();
  params.normalizer = std::sqrt(2.0F);
  ASSERT_TRUE(soft_embedding(params, ExecContext{}).ok());
  EXPECT_NEAR(out.get({0, 0}), .300800, 2e-6);
  EXPECT_NEAR(out.get({0, 1}), .442221, 2e-6);
}

TEST(SoftEmbedding, DoesNotDependOnThreadsOrRowBlocks) {
  std::mt19937_64 random(8);
  SoftCase soft(&random, DType::kBF16, DType::kBF16, 400, 2100, 40, 0);
  SoftCase again = soft;
  ASSERT_TRUE(soft_embedding(soft.params(), ExecContext{}).ok());
  ExecContext context;
  context.parallel_for = piecewise;
  ASSERT_TRUE(soft_embedding(again.params(), context).ok());
  EXPECT_EQ(soft.out.bytes(), again.out.bytes());
}

TEST(SoftEmbedding, WorkspaceIsBounded) {
  EXPECT_EQ(soft_embedding_workspace_bytes(256, 262144, 2816, DType::kBF16, Device::kCpu), 0U);
  EXPECT_EQ(soft_embedding_workspace_bytes(0, 262144, 2816, DType::kBF16, Device::kCuda), 0U);
  // 32 MiB of probabilities and six sums of [256, 2816].
  EXPECT_EQ(soft_embedding_workspace_bytes(256, 262144, 2816, DType::kBF16, Device::kCuda),
            (size_t{32} << 20) + size_t{6} * 256 * 2816 * 4);
  // A single row must not ask for a chunk wider than the vocabulary.
  EXPECT_LE(soft_embedding_workspace_bytes(1, 1000, 64, DType::kF32, Device::kCuda), 1U << 16);
}

TEST(TokenMerge, StaysInsideItsTensors) {
  std::mt19937_64 random(9);
  for (const DType dtype : kDTypes) {
    for (const int64_t width : {1, 3, 8, 17, 33, 100}) {
      for (const Finish finish : kFinishes) {
        MergeCase merge(&random, dtype, 5, width, 2, 12, 0);
        TokenMergeEmbedParams params = merge.params();
        const GuardedTensor hidden(params.hidden);
        const GuardedTensor table(params.embedding);
        const GuardedTensor mask(params.merge_mask);
        const GuardedTensor ids(params.topk_ids);
        const GuardedTensor probs(params.topk_probs);
        const GuardedTensor residual(params.residual_probs);
        params.hidden = hidden.ref();
        params.embedding = table.ref();
        params.merge_mask = mask.ref();
        params.topk_ids = ids.ref();
        params.topk_probs = probs.ref();
        params.residual_probs = residual.ref();
        params.merge_kind = finish.kind;
        params.renormalize = finish.renormalize;
        ASSERT_TRUE(token_merge_embed(params, ExecContext{}).ok());
      }
    }
  }
}

TEST(SoftEmbedding, StaysInsideItsTensors) {
  std::mt19937_64 random(10);
  for (const DType dtype : kDTypes) {
    for (const int64_t vocab : {1, 7, 255, 257, 2049}) {
      for (const int64_t width : {1, 31, 32, 33}) {
        SoftCase soft(&random, dtype, dtype, 3, vocab, width, 0);
        SoftEmbeddingParams params = soft.params();
        const GuardedTensor logits(params.logits);
        const GuardedTensor lse(params.lse);
        const GuardedTensor inverse(params.inv_temperature);
        const GuardedTensor table(params.embedding);
        const GuardedTensor valid(params.row_valid);
        const GuardedTensor out(params.out);
        params.logits = logits.ref();
        params.lse = lse.ref();
        params.inv_temperature = inverse.ref();
        params.embedding = table.ref();
        params.row_valid = valid.ref();
        params.out = out.ref();
        ASSERT_TRUE(soft_embedding(params, ExecContext{}).ok());
      }
    }
  }
}

TEST(TokenMerge, Errors) {
  std::mt19937_64 random(11);
  MergeCase merge(&random, DType::kF32, 3, 8, 2, 10, 0);
  merge.mask = {1, 0, 1};
  merge.ids = {1, 2, 99, 99, 3, 10};
  const MergeCase before = merge;
  Status status = token_merge_embed(merge.params(), ExecContext{});
  EXPECT_EQ(status.code(), StatusCode::kOutOfRange);
  // Row 1 has no descriptor: its ids do not count.
  EXPECT_THAT(status.message(), HasSubstr("topk_ids[5]: expected an id below 10, got 10"));
  EXPECT_EQ(merge.hidden_states.bytes(), before.hidden_states.bytes());
  TokenMergeEmbedParams params = merge.params();
  params.mask_token_id = 10;
  status = token_merge_embed(params, ExecContext{});
  EXPECT_THAT(status.message(), HasSubstr("mask_token_id: expected a value in [0, 10), got 10"));
  params = merge.params();
  params.weight = std::numeric_limits<float>::infinity();
  status = token_merge_embed(params, ExecContext{});
  EXPECT_THAT(status.message(), HasSubstr("weight: expected a finite number"));
}

}  // namespace
}  // namespace diffulex::test
