// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "diffulex/core/thread_pool.h"
#include "diffulex/ops/attention.h"
#include "ops/attention_case.h"

namespace diffulex::test {
namespace {

CaseRequest random_request(std::mt19937_64* random, const CaseShape& shape, bool long_context) {
  const int64_t page = shape.page_size;
  const int64_t block = shape.block_size;
  CaseRequest request;
  request.num_rows = uniform(random, 0, 3) == 0 ? uniform(random, 0, 3) : uniform(random, 1, 33);
  request.num_valid =
      uniform(random, 0, 2) == 0 ? uniform(random, 0, request.num_rows) : request.num_rows;
  const int64_t multiple = page * uniform(random, 1, std::max<int64_t>(1, 96 / page));
  request.context = std::max<int64_t>(
      0, pick(random, {0, uniform(random, 0, page - 1), multiple, multiple - block,
                       multiple + block, uniform(random, 1, 130)}));
  if (long_context) {
    request.context = uniform(random, 500, 2000);
  }
  request.kind = uniform(random, 0, 4);
  request.hole = uniform(random, 0, 3) == 0;
  request.anchored = uniform(random, 0, 3) == 0;
  request.prefix = uniform(random, 0, request.context + request.num_rows);
  request.padded_prefix = request.prefix + uniform(random, 0, 2 * page);
  request.start = request.context;
  if (request.kind == 4 || uniform(random, 0, 5) == 0) {
    request.start = uniform(random, 0, request.context + 2 * block);
  }
  return request;
}

AttentionCase random_case(uint64_t seed) {
  std::mt19937_64 random(seed);
  CaseShape shape;
  shape.dtype = static_cast<DType>(pick(&random, {0, 1, 2}));
  shape.layout = uniform(&random, 0, 2) == 0 ? KvLayout::kDistinct : KvLayout::kUnified;
  shape.group = pick(&random, {1, 1, 2, 4, 7, 8});
  shape.num_kv_heads = shape.group > 2 ? 1 : uniform(&random, 1, 2);
  shape.head_dim = seed % 40 == 0  ? pick(&random, {128, 256, 512})
                   : seed % 5 == 0 ? 64
                                   : pick(&random, {8, 16, 24, 32, 40});
  shape.page_size = pick(&random, {4, 8, 16, 32, 64, 256});
  shape.block_size = pick(&random, {4, 8, 16, 32, 256});
  shape.window = pick(&random, {0, 0, 1, shape.block_size, 100});
  shape.softcap = uniform(&random, 0, 3) == 0 ? 30.0 : 0.0;
  shape.extra_heads = uniform(&random, 0, 1);
  shape.extra_dims = pick(&random, {0, 3, 8});
  shape.key_group = pick(&random, {1, 4, 8});
  shape.padding_rows = pick(&random, {0, 0, 5});
  const bool long_context = seed % 60 == 1;
  const int64_t count = long_context ? 1 : uniform(&random, 0, seed % 10 == 0 ? 9 : 4);
  std::vector<CaseRequest> requests;
  for (int64_t r = 0; r < count; ++r) {
    requests.push_back(random_request(&random, shape, long_context));
  }
  return AttentionCase(shape, requests, seed + 1000000);
}

TEST(BlockAttention, RandomMasksMatchTheReferenceWithPoison) {
  ThreadPool pool(3);
  for (uint64_t seed = 0; seed < 600; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    AttentionCase attention_case = random_case(seed);
    ExecContext context;
    if (seed % 2 == 1) {
      context.parallel_for = ThreadPool::parallel_for;
      context.parallel_pool = &pool;
    }
    const Status status = block_attention(attention_case.params(), context);
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_LE(attention_case.worst_error(), 1.0);
  }
}

TEST(BlockAttention, ResultDoesNotDependOnThreads) {
  CaseShape shape;
  shape.num_kv_heads = 4;
  shape.group = 2;
  shape.head_dim = 64;
  shape.page_size = 16;
  AttentionCase attention_case(shape,
                               {{40, 40, 300, 1, false, 0, 0, 300},
                                {7, 7, 90, 0, false, 0, 0, 90},
                                {64, 64, 0, 2, false, 0, 0, 0}},
                               5);
  ASSERT_TRUE(block_attention(attention_case.params(), ExecContext{}).ok());
  const std::vector<uint8_t> expected = attention_case.out().bytes();
  const std::vector<float> expected_lse = attention_case.lse();
  for (int32_t threads = 2; threads <= 5; ++threads) {
    ThreadPool pool(threads);
    ExecContext context;
    context.parallel_for = ThreadPool::parallel_for;
    context.parallel_pool = &pool;
    attention_case.clear_outputs();
    ASSERT_TRUE(block_attention(attention_case.params(), context).ok());
    EXPECT_EQ(attention_case.out().bytes(), expected) << threads << " threads";
    EXPECT_EQ(attention_case.lse(), expected_lse) << threads << " threads";
  }
}

TEST(BlockAttention, RequestAloneEqualsRequestInBatch) {
  CaseShape shape;
  shape.group = 4;
  shape.head_dim = 32;
  shape.page_size = 8;
  const CaseRequest request{24, 24, 0, 1, false, 0, 0, 0};
  AttentionCase alone(shape, {request}, 77);
  AttentionCase batch(shape, {request, request}, 77);
  ASSERT_TRUE(block_attention(alone.params(), ExecContext{}).ok());
  ASSERT_TRUE(block_attention(batch.params(), ExecContext{}).ok());
  // Same generator state, so request 0 has equal rows only if the buffers agree: copy them over.
  BlockAttentionParams params = batch.params();
  const BlockAttentionParams source = alone.params();
  for (int64_t row = 0; row < 24; ++row) {
    std::memcpy(params.q.as<float>() + row * params.q.stride[0],
                source.q.as<float>() + row * source.q.stride[0], sizeof(float) * 4 * 32);
    std::memcpy(params.k.as<float>() + row * params.k.stride[0],
                source.k.as<float>() + row * source.k.stride[0], sizeof(float) * 32);
    std::memcpy(params.v.as<float>() + row * params.v.stride[0],
                source.v.as<float>() + row * source.v.stride[0], sizeof(float) * 32);
  }
  ASSERT_TRUE(block_attention(params, ExecContext{}).ok());
  EXPECT_EQ(std::memcmp(params.out.data, source.out.data, sizeof(float) * 24 * 4 * 32), 0);
}

TEST(BlockAttention, NoRequestsZeroesEveryRow) {
  CaseShape shape;
  shape.padding_rows = 6;
  AttentionCase attention_case(shape, {}, 1);
  ASSERT_TRUE(block_attention(attention_case.params(), ExecContext{}).ok());
  EXPECT_EQ(attention_case.worst_error(), 0.0);
}

TEST(BlockAttention, NoRowsIsANoOp) {
  AttentionCase attention_case(CaseShape{}, {}, 1);
  EXPECT_TRUE(block_attention(attention_case.params(), ExecContext{}).ok());
}

TEST(BlockAttention, EmptyCacheWithoutContext) {
  AttentionCase attention_case(CaseShape{}, {{9, 9, 0, 1, false, 0, 0, 0}}, 2);
  BlockAttentionParams params = attention_case.params();
  params.k_cache.size[0] = 0;
  params.v_cache.size[0] = 0;
  params.page_table.size[1] = 0;
  const Status status = block_attention(params, ExecContext{});
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_LE(attention_case.worst_error(), 1.0);
}

TEST(BlockAttention, AbsentOptionalArgumentsMeanTheirDefaults) {
  AttentionCase attention_case(CaseShape{}, {{9, 9, 13, 1, false, 0, 0, 13}}, 3);
  BlockAttentionParams params = attention_case.params();
  params.prefix_lens = TensorRef{};
  params.padded_prefix_lens = TensorRef{};
  params.q_starts = TensorRef{};
  ASSERT_TRUE(block_attention(params, ExecContext{}).ok());
  EXPECT_LE(attention_case.worst_error(), 1.0);
  const std::vector<uint8_t> expected = attention_case.out().bytes();
  attention_case.clear_outputs();
  params.lse = TensorRef{};
  ASSERT_TRUE(block_attention(params, ExecContext{}).ok());
  EXPECT_EQ(attention_case.out().bytes(), expected);
}

TEST(BlockAttention, DataViolationsAreReportedBeforeAnyWrite) {
  AttentionCase attention_case(CaseShape{},
                               {{4, 4, 8, 1, false, 0, 0, 8}, {4, 4, 3, 0, false, 0, 0, 3}}, 4);
  const std::vector<uint8_t> before = attention_case.out().bytes();
  const auto expect = [&](const char* text) {
    const Status status = block_attention(attention_case.params(), ExecContext{});
    EXPECT_EQ(status.code(), StatusCode::kOutOfRange);
    EXPECT_NE(status.message().find(text), std::string::npos) << status.message();
    EXPECT_EQ(attention_case.out().bytes(), before);
  };
  const int32_t page = attention_case.page_table()[1];
  attention_case.page_table()[1] = static_cast<int32_t>(attention_case.num_pages());
  expect("diffulex::block_attention: page_table[0][1]: expected a page id below");
  attention_case.page_table()[1] = page;
  attention_case.context_lens()[1] = 1000;
  expect("context_lens[1]: expected 0 to the page table's");
  attention_case.context_lens()[1] = -1;
  expect("context_lens[1]: expected 0 to the page table's 16 tokens, got -1");
  attention_case.context_lens()[1] = 12;
  expect("context_lens[1]: expected at most max_context_len 8, got 12");
  attention_case.context_lens()[1] = 3;
  attention_case.mask_kinds()[0] = 5;
  expect("mask_kinds[0]: expected a kind 0 to 4, optionally with bits 0x100 and 0x200, got 5");
  attention_case.mask_kinds()[0] = 0x400;
  expect("mask_kinds[0]: expected a kind 0 to 4");
  attention_case.mask_kinds()[0] = 1;
  attention_case.cu_seqlens_q()[1] = 9;
  expect("cu_seqlens_q[2]: expected a non-decreasing value >= 9, got 8");
  attention_case.cu_seqlens_q()[1] = 3;
  expect("cu_seqlens_q[1]: expected at most max_seqlen_q 4 rows, got 5");
  attention_case.cu_seqlens_q()[1] = 4;
  attention_case.cu_seqlens_q()[0] = 1;
  expect("cu_seqlens_q[0]: expected 0, got 1");
}

}  // namespace
}  // namespace diffulex::test
