// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <numeric>
#include <set>

#include <gtest/gtest.h>

#include "diffulex/ops/kv.h"
#include "ops/test_tensor.h"

namespace diffulex::test {
namespace {

struct CachePair {
  TestTensor k;
  TestTensor v;
};

constexpr int64_t kHeads = 3;
constexpr int64_t kDim = 24;

CachePair make_caches(DType dtype, KvLayout layout, int64_t num_pages, int64_t page_size) {
  if (layout == KvLayout::kDistinct) {
    return {TestTensor(dtype, {num_pages, kHeads, kDim / 8, page_size, 8}),
            TestTensor(dtype, {num_pages, kHeads, kDim, page_size})};
  }
  return {TestTensor(dtype, {num_pages, page_size, kHeads + 1, kDim + 8}),
          TestTensor(dtype, {num_pages, page_size, kHeads + 1, kDim + 8})};
}

std::vector<int64_t> key_index(KvLayout layout, int64_t page, int64_t offset, int64_t h,
                               int64_t d) {
  return layout == KvLayout::kDistinct ? std::vector<int64_t>{page, h, d / 8, offset, d % 8}
                                       : std::vector<int64_t>{page, offset, h, d};
}
std::vector<int64_t> value_index(KvLayout layout, int64_t page, int64_t offset, int64_t h,
                                 int64_t d) {
  return layout == KvLayout::kDistinct ? std::vector<int64_t>{page, h, d, offset}
                                       : std::vector<int64_t>{page, offset, h, d};
}

double rounded(DType dtype, double value) {
  TestTensor one(dtype, {1});
  one.set({0}, value);
  return one.get({0});
}

class KvCacheTest : public testing::TestWithParam<KvLayout> {};

TEST_P(KvCacheTest, StoreWritesExactlyTheMappedSlots) {
  std::mt19937_64 random(11);
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const DType cache_dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      const int64_t page_size = 8;
      CachePair caches = make_caches(cache_dtype, GetParam(), 5, page_size);
      caches.k.fill(kNaN);
      caches.v.fill(kNaN);
      TestTensor k(dtype, {6, kHeads, kDim}, {6, kHeads + 1, kDim});
      TestTensor v(dtype, {6, kHeads, kDim});
      k.fill_normal(&random);
      v.fill_normal(&random);
      std::vector<int64_t> slots = {17, -1, 0, 39, -7, 18};
      StoreKvCacheParams params;
      params.k = k.ref();
      params.v = v.ref();
      params.k_cache = caches.k.ref();
      params.v_cache = caches.v.ref();
      params.slot_mapping = ref_of(slots);
      params.kv_layout = GetParam();
      const Status status = store_kv_cache(params, ExecContext{});
      ASSERT_TRUE(status.ok()) << status.message();
      std::set<int64_t> touched_k;
      std::set<int64_t> touched_v;
      for (int64_t row = 0; row < 6; ++row) {
        const int64_t slot = slots[static_cast<size_t>(row)];
        for (int64_t h = 0; slot >= 0 && h < kHeads; ++h) {
          for (int64_t d = 0; d < kDim; ++d) {
            const auto k_at = key_index(GetParam(), slot / page_size, slot % page_size, h, d);
            const auto v_at = value_index(GetParam(), slot / page_size, slot % page_size, h, d);
            ASSERT_EQ(caches.k.get(k_at), rounded(cache_dtype, k.get({row, h, d})));
            ASSERT_EQ(caches.v.get(v_at), rounded(cache_dtype, v.get({row, h, d})));
            touched_k.insert(caches.k.offset(k_at));
            touched_v.insert(caches.v.offset(v_at));
          }
        }
      }
      for (int64_t i = 0; i < caches.k.elements(); ++i) {
        ASSERT_EQ(std::isnan(caches.k.get_offset(i)), touched_k.count(i) == 0);
      }
      for (int64_t i = 0; i < caches.v.elements(); ++i) {
        ASSERT_EQ(std::isnan(caches.v.get_offset(i)), touched_v.count(i) == 0);
      }
    }
  }
}

TEST_P(KvCacheTest, StoreThenLoadRoundTrips) {
  std::mt19937_64 random(12);
  for (int64_t trial = 0; trial < 40; ++trial) {
    SCOPED_TRACE(testing::Message() << "trial " << trial);
    const DType dtype = static_cast<DType>(pick(&random, {0, 1, 2}));
    const int64_t page_size = pick(&random, {4, 8, 16});
    // Contexts of 0, one page exactly, and anything else.
    std::vector<int32_t> context = {0, static_cast<int32_t>(page_size),
                                    static_cast<int32_t>(uniform(&random, 1, 40))};
    std::vector<int32_t> fresh = {3, 0, static_cast<int32_t>(uniform(&random, 0, 5))};
    const int64_t max_pages = 40 / page_size + 2;
    CachePair caches = make_caches(dtype, GetParam(), 3 * max_pages, page_size);
    std::vector<int32_t> pages(static_cast<size_t>(3 * max_pages));
    std::iota(pages.begin(), pages.end(), 0);
    std::shuffle(pages.begin(), pages.end(), random);
    const int64_t cached = context[0] + context[1] + context[2];
    const int64_t rows = fresh[0] + fresh[1] + fresh[2];
    TestTensor k(dtype, {cached, kHeads, kDim});
    TestTensor v(dtype, {cached, kHeads, kDim});
    TestTensor k_new(dtype, {rows, kHeads, kDim});
    TestTensor v_new(dtype, {rows, kHeads, kDim}, {rows, kHeads + 1, kDim});
    for (TestTensor* tensor : {&k, &v, &k_new, &v_new}) {
      tensor->fill_normal(&random);
    }
    std::vector<int32_t> slots;
    for (size_t r = 0; r < 3; ++r) {
      for (int64_t j = 0; j < context[r]; ++j) {
        const int64_t page =
            pages[r * static_cast<size_t>(max_pages) + static_cast<size_t>(j / page_size)];
        slots.push_back(static_cast<int32_t>(page * page_size + j % page_size));
      }
    }
    StoreKvCacheParams store;
    store.k = k.ref();
    store.v = v.ref();
    store.k_cache = caches.k.ref();
    store.v_cache = caches.v.ref();
    store.slot_mapping = ref_of(slots);
    store.kv_layout = GetParam();
    ASSERT_TRUE(store_kv_cache(store, ExecContext{}).ok());
    // Unmap the last page of request 2: its rows read as zeros.
    const int64_t unmapped = (context[2] - 1) / page_size;
    pages[2 * static_cast<size_t>(max_pages) + static_cast<size_t>(unmapped)] = -1;
    std::vector<int32_t> cu_q = {0, fresh[0], fresh[0] + fresh[1], fresh[0] + fresh[1] + fresh[2]};
    std::vector<int32_t> cu_k = {0};
    for (size_t r = 0; r < 3; ++r) {
      cu_k.push_back(cu_k.back() + context[r] + fresh[r]);
    }
    TestTensor k_out(dtype, {cu_k.back() + 4, kHeads, kDim});
    TestTensor v_out(dtype, {cu_k.back() + 4, kHeads, kDim});
    k_out.fill(kNaN);
    v_out.fill(kNaN);
    LoadKvCacheParams load;
    load.k_cache = caches.k.ref();
    load.v_cache = caches.v.ref();
    load.k_new = k_new.ref();
    load.v_new = v_new.ref();
    load.page_table = ref_of(pages, {3, max_pages});
    load.context_lens = ref_of(context);
    load.cu_seqlens_q = ref_of(cu_q);
    load.cu_seqlens_k = ref_of(cu_k);
    load.k_out = k_out.ref();
    load.v_out = v_out.ref();
    load.kv_layout = GetParam();
    const Status status = load_kv_cache(load, ExecContext{});
    ASSERT_TRUE(status.ok()) << status.message();
    int64_t cached_row = 0;
    for (size_t r = 0; r < 3; ++r) {
      for (int64_t j = 0; j < context[r] + fresh[r]; ++j) {
        const int64_t out_row = cu_k[r] + j;
        const bool from_cache = j < context[r];
        const bool zero = r == 2 && from_cache && j / page_size == unmapped;
        const int64_t source = from_cache ? cached_row : cu_q[r] + j - context[r];
        for (int64_t h = 0; h < kHeads; ++h) {
          for (int64_t d = 0; d < kDim; ++d) {
            const double want_k = zero ? 0.0 : (from_cache ? k : k_new).get({source, h, d});
            const double want_v = zero ? 0.0 : (from_cache ? v : v_new).get({source, h, d});
            ASSERT_EQ(k_out.get({out_row, h, d}), want_k);
            ASSERT_EQ(v_out.get({out_row, h, d}), want_v);
          }
        }
        cached_row += from_cache ? 1 : 0;
      }
    }
    for (int64_t i = k_out.offset({cu_k.back(), 0, 0}); i < k_out.elements(); ++i) {
      ASSERT_EQ(k_out.get_offset(i), 0.0);
      ASSERT_EQ(v_out.get_offset(i), 0.0);
    }
  }
}

TEST_P(KvCacheTest, CopyMovesWholePagesAndNothingElse) {
  std::mt19937_64 random(13);
  CachePair caches = make_caches(DType::kBF16, GetParam(), 6, 4);
  caches.k.fill_normal(&random);
  caches.v.fill_normal(&random);
  const TestTensor k_before = caches.k;
  const TestTensor v_before = caches.v;
  std::vector<int32_t> pairs = {0, 3, -1, 4, 2, -1, 5, 1};
  CopyKvPagesParams params;
  params.k_cache = caches.k.ref();
  params.v_cache = caches.v.ref();
  params.src_dst = ref_of(pairs, {4, 2});
  ASSERT_TRUE(copy_kv_pages(params, ExecContext{}).ok());
  const int64_t source_of[] = {0, 5, 2, 0, 4, 5};
  const int64_t k_page = caches.k.elements() / 6;
  const int64_t v_page = caches.v.elements() / 6;
  for (int64_t page = 0; page < 6; ++page) {
    for (int64_t i = 0; i < k_page; ++i) {
      ASSERT_EQ(caches.k.get_offset(page * k_page + i),
                k_before.get_offset(source_of[page] * k_page + i));
    }
    for (int64_t i = 0; i < v_page; ++i) {
      ASSERT_EQ(caches.v.get_offset(page * v_page + i),
                v_before.get_offset(source_of[page] * v_page + i));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, KvCacheTest,
                         testing::Values(KvLayout::kUnified, KvLayout::kDistinct));

TEST(KvCacheData, ViolationsAreReportedBeforeAnyWrite) {
  CachePair caches = make_caches(DType::kF32, KvLayout::kUnified, 2, 4);
  const std::vector<uint8_t> before = caches.k.bytes();
  TestTensor k(DType::kF32, {2, kHeads, kDim});
  k.fill(1.0);
  std::vector<int32_t> slots = {0, 8};
  StoreKvCacheParams store;
  store.k = k.ref();
  store.v = k.ref();
  store.k_cache = caches.k.ref();
  store.v_cache = caches.v.ref();
  store.slot_mapping = ref_of(slots);
  Status status = store_kv_cache(store, ExecContext{});
  EXPECT_EQ(status.code(), StatusCode::kOutOfRange);
  EXPECT_EQ(status.message(),
            "diffulex::store_kv_cache: slot_mapping[1]: expected a slot below 8, got 8");
  EXPECT_EQ(caches.k.bytes(), before);
  std::vector<int32_t> pairs = {0, 2};
  CopyKvPagesParams copy;
  copy.k_cache = caches.k.ref();
  copy.v_cache = caches.v.ref();
  copy.src_dst = ref_of(pairs, {1, 2});
  status = copy_kv_pages(copy, ExecContext{});
  EXPECT_EQ(status.code(), StatusCode::kOutOfRange);
  EXPECT_EQ(status.message(),
            "diffulex::copy_kv_pages: src_dst[0]: expected page ids below 2, got 2");
  std::vector<int32_t> chain = {0, 1, 1, 0};
  copy.src_dst = ref_of(chain, {2, 2});
  status = copy_kv_pages(copy, ExecContext{});
  EXPECT_EQ(status.code(), StatusCode::kOutOfRange);
  EXPECT_NE(status.message().find("expected disjoint sources and destinations, got page 0"),
            std::string::npos);
  EXPECT_EQ(caches.k.bytes(), before);

  std::vector<int32_t> pages = {0, 1};
  std::vector<int32_t> context = {4};
  std::vector<int32_t> cu_q = {0, 2};
  std::vector<int32_t> cu_k = {0, 5};
  TestTensor out(DType::kF32, {6, kHeads, kDim});
  LoadKvCacheParams load;
  load.k_cache = caches.k.ref();
  load.v_cache = caches.v.ref();
  load.k_new = k.ref();
  load.v_new = k.ref();
  load.page_table = ref_of(pages, {1, 2});
  load.context_lens = ref_of(context);
  load.cu_seqlens_q = ref_of(cu_q);
  load.cu_seqlens_k = ref_of(cu_k);
  load.k_out = out.ref();
  load.v_out = out.ref();
  status = load_kv_cache(load, ExecContext{});
  EXPECT_EQ(status.code(), StatusCode::kOutOfRange);
  EXPECT_EQ(status.message(),
            "diffulex::load_kv_cache: cu_seqlens_k[0]: expected context + rows = 6 rows per "
            "request, got 5");
  cu_k[1] = 6;
  pages[0] = 2;
  status = load_kv_cache(load, ExecContext{});
  EXPECT_EQ(status.message(),
            "diffulex::load_kv_cache: page_table[0][0]: expected a page id below 2, got 2");
}

}  // namespace
}  // namespace diffulex::test
