// SPDX-License-Identifier: Apache-2.0

// Norm, rotary, activation and cache ops on the device against the CPU kernels, which have their
// own fp64 tests. Widths and gaps are chosen so that vector and scalar paths both run.

#include <random>

#include <gtest/gtest.h>

#include "cuda/op_parity.h"
#include "diffulex/ops/activation.h"
#include "diffulex/ops/kv.h"
#include "diffulex/ops/norm.h"
#include "diffulex/ops/rope.h"

namespace diffulex::test {
namespace {

constexpr DType kDTypes[] = {DType::kF32, DType::kF16, DType::kBF16};

ExecContext device_context() {
  ExecContext context;
  context.device = Device::kCuda;
  return context;
}

TEST(CudaNormTest, AllKindsMatchCpu) {
  DIFFULEX_REQUIRE_DEVICE();
  std::mt19937_64 random(1);
  for (uint64_t seed = 0; seed < num_seeds(150); ++seed) {
    const DType dtype = kDTypes[seed % 3];
    const int64_t width = pick(&random, {1, 7, 64, 100, 128, 1024, 1032, 2048, 4096, 5120, 16392});
    const int64_t rows = uniform(&random, 1, 9);
    const int64_t gap = pick(&random, {0, 8, 3});
    TestTensor x = random_tensor(&random, dtype, {rows, 2, width}, gap);
    TestTensor residual = random_tensor(&random, dtype, {rows, 2, width}, gap);
    TestTensor out(dtype, {rows, 2, width});
    out.fill(kNaN);
    TestTensor weight = random_tensor(&random, seed % 2 == 0 ? dtype : DType::kF32, {width});
    TestTensor out_scale = random_tensor(&random, DType::kF32, {1});
    for (int kind = 0; kind < 3; ++kind) {
      TestTensor cpu[3] = {x, residual, out};
      TestTensor gpu[3] = {x, residual, out};
      for (const bool on_device : {false, true}) {
        TestTensor* tensors = on_device ? gpu : cpu;
        DeviceMirror mirror;
        const auto place = [&](const TensorRef& ref) {
          return on_device ? mirror.upload(ref) : ref;
        };
        RmsNormParams params;
        params.x = place(tensors[0].ref());
        params.eps = 1e-6F;
        if (seed % 5 != 0) {
          params.weight = place(weight.ref());
          params.weight_offset = seed % 2 == 0 ? 0.0F : 1.0F;
        }
        if (kind > 0) {
          params.residual = place(tensors[1].ref());
        }
        if (kind != 1) {
          params.out = place(tensors[2].ref());
        }
        if (kind == 2 && seed % 4 != 0) {
          params.out_scale = place(out_scale.ref());
        }
        const ExecContext context = on_device ? device_context() : ExecContext();
        const Status status = kind == 0   ? rms_norm(params, context)
                              : kind == 1 ? add_rms_norm(params, context)
                                          : rms_norm_add(params, context);
        ASSERT_TRUE(status.ok()) << status.message();
        if (on_device) {
          mirror.download();
        }
      }
      for (int i = 0; i < 3; ++i) {
        expect_parity(cpu[i], gpu[i], dtype, "norm");
        if (HasFatalFailure()) {
          FAIL() << "kind " << kind << " width " << width << " seed " << seed;
        }
      }
    }
  }
}

TEST(CudaNormTest, ARowDoesNotDependOnTheNumberOfRows) {
  DIFFULEX_REQUIRE_DEVICE();
  std::mt19937_64 random(2);
  for (const int64_t width : {128, 4096, 999}) {
    TestTensor x = random_tensor(&random, DType::kBF16, {33, width});
    TestTensor many(DType::kBF16, {33, width});
    TestTensor one(DType::kBF16, {1, width});
    for (const bool alone : {false, true}) {
      DeviceMirror mirror;
      RmsNormParams params;
      params.x = mirror.upload(x.ref());
      params.x.size[0] = alone ? 1 : 33;
      params.out = mirror.upload(alone ? one.ref() : many.ref());
      ASSERT_TRUE(rms_norm(params, device_context()).ok());
      mirror.download();
    }
    for (int64_t i = 0; i < width; ++i) {
      ASSERT_EQ(one.get({0, i}), many.get({0, i}));
    }
  }
}

TEST(CudaActivationTest, AllActivationsMatchCpu) {
  DIFFULEX_REQUIRE_DEVICE();
  std::mt19937_64 random(3);
  for (uint64_t seed = 0; seed < num_seeds(60); ++seed) {
    const DType dtype = kDTypes[seed % 3];
    const int64_t width = pick(&random, {1, 7, 64, 96, 1000});
    TestTensor x = random_tensor(&random, dtype, {5, 3, 2 * width}, pick(&random, {0, 16, 1}));
    x.set({0, 0, 0}, -100.0);
    TestTensor cpu(dtype, {5, 3, width});
    cpu.fill(kNaN);
    TestTensor gpu = cpu;
    ActAndMulParams params;
    params.act = static_cast<Activation>(seed / 3 % 3);
    params.x = x.ref();
    params.out = cpu.ref();
    ASSERT_TRUE(act_and_mul(params, ExecContext()).ok());
    DeviceMirror mirror;
    params.x = mirror.upload(x.ref());
    params.out = mirror.upload(gpu.ref());
    ASSERT_TRUE(act_and_mul(params, device_context()).ok());
    mirror.download();
    expect_parity(cpu, gpu, dtype, "act_and_mul");
    ASSERT_FALSE(HasFatalFailure()) << "seed " << seed << " width " << width;
  }
}

TestTensor angle_table(int64_t positions, int64_t rotary_dim) {
  TestTensor table(DType::kF32, {positions, rotary_dim});
  for (int64_t p = 0; p < positions; ++p) {
    for (int64_t i = 0; i < rotary_dim / 2; ++i) {
      const double angle =
          static_cast<double>(p) *
          std::pow(10000.0, -2.0 * static_cast<double>(i) / static_cast<double>(rotary_dim));
      table.set({p, i}, std::cos(angle));
      table.set({p, rotary_dim / 2 + i}, std::sin(angle));
    }
  }
  return table;
}

/// Runs qk_norm_rope_store on rows of `qkv` from `first` on, on the device and in place.
void store_rows(TestTensor* qkv, int64_t first, int64_t count, TestTensor* table,
                TestTensor* weight, TestTensor* k_cache, TestTensor* v_cache) {
  std::vector<int64_t> positions;
  std::vector<int32_t> slots;
  for (int64_t t = first; t < first + count; ++t) {
    positions.push_back(t % 50);
    slots.push_back(static_cast<int32_t>(t % 7 == 3 ? -1 : t));
  }
  TensorRef rows = qkv->ref();
  rows.data = static_cast<uint16_t*>(rows.data) + first * rows.stride[0];
  rows.size[0] = count;
  DeviceMirror mirror;
  QkNormRopeParams params;
  params.qkv = mirror.upload(rows);
  params.positions = mirror.upload(ref_of(positions));
  params.cos_sin_cache = mirror.upload(table->ref());
  params.q_weight = mirror.upload(weight->ref());
  params.k_weight = params.q_weight;
  params.k_cache = mirror.upload(k_cache->ref());
  params.v_cache = mirror.upload(v_cache->ref());
  params.slot_mapping = mirror.upload(ref_of(slots));
  params.num_q_heads = 5;
  params.num_kv_heads = 3;
  params.head_dim = static_cast<int32_t>(weight->ref().size[0]);
  params.weight_offset = 0.5F;
  const Status status = qk_norm_rope_store(params, device_context());
  ASSERT_TRUE(status.ok()) << status.message();
  mirror.download();
}

TEST(CudaRopeTest, ARowDoesNotDependOnHowManyThereAre) {
  DIFFULEX_REQUIRE_DEVICE();
  std::mt19937_64 random(6);
  constexpr int64_t kTokens = 600;
  constexpr int64_t kFew = 100;
  for (const int64_t dim : {64, 128, 256, 512}) {
    const DType dtype = dim == 128 ? DType::kBF16 : DType::kF16;
    TestTensor table = angle_table(50, dim == 256 ? 64 : dim);
    TestTensor weight = random_tensor(&random, dtype, {dim});
    TestTensor many[3] = {random_tensor(&random, dtype, {kTokens, 11 * dim}),
                          TestTensor(dtype, {38, 16, 3, dim}), TestTensor(dtype, {38, 16, 3, dim})};
    many[1].fill(kNaN);
    many[2].fill(kNaN);
    TestTensor few[3] = {many[0], many[1], many[2]};
    store_rows(&many[0], 0, kTokens, &table, &weight, &many[1], &many[2]);
    for (int64_t first = 0; first < kTokens; first += kFew) {
      store_rows(&few[0], first, kFew, &table, &weight, &few[1], &few[2]);
    }
    for (int i = 0; i < 3; ++i) {
      ASSERT_EQ(many[i].bytes(), few[i].bytes()) << "tensor " << i << " D " << dim;
    }
  }
}

TEST(CudaRopeTest, FusedAndPlainMatchCpu) {
  DIFFULEX_REQUIRE_DEVICE();
  std::mt19937_64 random(4);
  for (uint64_t seed = 0; seed < num_seeds(150); ++seed) {
    const DType dtype = kDTypes[seed % 3];
    const int64_t dim = pick(&random, {16, 24, 64, 80, 128, 256, 512});
    const int64_t rotary = pick(&random, {dim, dim / 2, 8});
    const int64_t hq = uniform(&random, 1, 5);
    const int64_t hkv = uniform(&random, 1, 2);
    // From 512 tokens on another kernel takes over where it can.
    const int64_t tokens = seed % 6 == 5 ? uniform(&random, 512, 530) : uniform(&random, 1, 9);
    const bool raw_k = seed % 5 == 4;
    const bool stores = seed % 2 == 0;
    const KvLayout layout = seed % 4 == 0 ? KvLayout::kDistinct : KvLayout::kUnified;
    const DType cache_dtype = seed % 7 == 0 ? DType::kF32 : dtype;
    TestTensor table = angle_table(50, rotary);
    std::vector<int64_t> positions;
    std::vector<int32_t> slots;
    for (int64_t t = 0; t < tokens; ++t) {
      positions.push_back(uniform(&random, 0, 49));
      slots.push_back(static_cast<int32_t>(t % 3 == 2 || t >= 32 ? -1 : (t * 5) % 32));
    }
    TestTensor qkv = random_tensor(&random, dtype, {tokens, (hq + (raw_k ? 1 : 2) * hkv) * dim},
                                   pick(&random, {0, 8, 1}));
    TestTensor v_out(dtype, {tokens, hkv, dim});
    v_out.fill(kNaN);
    TestTensor q_weight = random_tensor(&random, dtype, {dim});
    TestTensor k_weight = random_tensor(&random, DType::kF32, {dim});
    TestTensor k_cache = layout == KvLayout::kDistinct
                             ? TestTensor(cache_dtype, {4, hkv, dim / 8, 8, 8})
                             : TestTensor(cache_dtype, {4, 8, hkv, dim});
    TestTensor v_cache = layout == KvLayout::kDistinct ? TestTensor(cache_dtype, {4, hkv, dim, 8})
                                                       : TestTensor(cache_dtype, {4, 8, hkv, dim});
    k_cache.fill(kNaN);
    v_cache.fill(kNaN);
    TestTensor cpu[4] = {qkv, v_out, k_cache, v_cache};
    TestTensor gpu[4] = {qkv, v_out, k_cache, v_cache};
    for (const bool on_device : {false, true}) {
      TestTensor* tensors = on_device ? gpu : cpu;
      DeviceMirror mirror;
      const auto place = [&](const TensorRef& ref) { return on_device ? mirror.upload(ref) : ref; };
      QkNormRopeParams params;
      params.qkv = place(tensors[0].ref());
      params.positions = place(ref_of(positions));
      params.cos_sin_cache = place(table.ref());
      if (seed % 3 != 1) {
        params.q_weight = place(q_weight.ref());
        params.k_weight = place(k_weight.ref());
      }
      params.num_q_heads = static_cast<int32_t>(hq);
      params.num_kv_heads = static_cast<int32_t>(hkv);
      params.head_dim = static_cast<int32_t>(dim);
      params.neox = seed % 4 < 2;
      params.norm_v = seed % 3 == 0;
      params.v_from_raw_k = raw_k;
      params.kv_layout = layout;
      if (raw_k) {
        params.v_out = place(tensors[1].ref());
      }
      if (stores) {
        params.k_cache = place(tensors[2].ref());
        params.v_cache = place(tensors[3].ref());
        params.slot_mapping = place(ref_of(slots));
      }
      const ExecContext context = on_device ? device_context() : ExecContext();
      const Status status =
          stores ? qk_norm_rope_store(params, context) : qk_norm_rope(params, context);
      ASSERT_TRUE(status.ok()) << status.message();
      if (on_device) {
        mirror.download();
      }
    }
    for (int i = 0; i < 4; ++i) {
      expect_parity(cpu[i], gpu[i], dtype, "qk_norm_rope");
      if (HasFatalFailure()) {
        FAIL() << "seed " << seed << " tensor " << i << " D " << dim << " rotary " << rotary;
      }
    }
    TestTensor q = random_tensor(&random, dtype, {tokens, hq, dim});
    TestTensor k = random_tensor(&random, dtype, {tokens, hkv * dim}, 8);
    TestTensor q_gpu = q;
    TestTensor k_gpu = k;
    RotaryParams plain;
    plain.positions = ref_of(positions);
    plain.q = q.ref();
    plain.k = k.ref();
    plain.cos_sin_cache = table.ref();
    plain.head_dim = static_cast<int32_t>(dim);
    plain.neox = seed % 2 == 0;
    const Status status = rotary_embedding(plain, ExecContext());
    ASSERT_TRUE(status.ok()) << status.message();
    DeviceMirror mirror;
    plain.positions = mirror.upload(ref_of(positions));
    plain.q = mirror.upload(q_gpu.ref());
    plain.k = mirror.upload(k_gpu.ref());
    plain.cos_sin_cache = mirror.upload(table.ref());
    ASSERT_TRUE(rotary_embedding(plain, device_context()).ok());
    mirror.download();
    expect_parity(q, q_gpu, dtype, "rotary q");
    expect_parity(k, k_gpu, dtype, "rotary k");
    ASSERT_FALSE(HasFatalFailure()) << "seed " << seed;
  }
}

TEST(CudaKvCacheTest, StoreLoadAndCopyMatchCpu) {
  DIFFULEX_REQUIRE_DEVICE();
  std::mt19937_64 random(5);
  for (uint64_t seed = 0; seed < num_seeds(80); ++seed) {
    const DType dtype = kDTypes[seed % 3];
    const DType cache_dtype = seed % 4 == 0 ? kDTypes[seed / 3 % 3] : dtype;
    const KvLayout layout = seed % 3 == 1 ? KvLayout::kDistinct : KvLayout::kUnified;
    const int64_t heads = uniform(&random, 1, 3);
    const int64_t dim = pick(&random, {8, 24, 64});
    const int64_t page_size = pick(&random, {4, 8, 16});
    const int64_t num_pages = 9;
    const int64_t rows = 24;
    const bool is_distinct = layout == KvLayout::kDistinct;
    TestTensor k_cache = is_distinct
                             ? TestTensor(cache_dtype, {num_pages, heads, dim / 8, page_size, 8})
                             : TestTensor(cache_dtype, {num_pages, page_size, heads, dim},
                                          {num_pages, page_size, heads + 1, dim + 8});
    TestTensor v_cache = is_distinct ? TestTensor(cache_dtype, {num_pages, heads, dim, page_size})
                                     : TestTensor(cache_dtype, {num_pages, page_size, heads, dim});
    k_cache.fill(kNaN);
    v_cache.fill(kNaN);
    TestTensor k = random_tensor(&random, dtype, {rows, heads, dim});
    TestTensor v(dtype, {rows, heads, dim}, {rows, heads + 2, dim});
    v.fill_normal(&random);
    std::vector<int64_t> slots;
    for (int64_t i = 0; i < rows; ++i) {
      slots.push_back(i % 5 == 4 ? -3 : i);
    }
    std::vector<int32_t> pairs = {0, 7, -1, 5, 1, 8};
    std::vector<int32_t> table = {2, 0, -1, 1, 0, 1, 2, -1};  // two requests of four pages
    const auto c0 = static_cast<int32_t>(page_size);
    const auto c1 = static_cast<int32_t>(2 * page_size + 1);
    std::vector<int32_t> context_lens = {c0, c1};
    std::vector<int32_t> cu_q = {0, 3, 5};
    std::vector<int32_t> cu_k = {0, c0 + 3, c0 + 3 + c1 + 2};
    const int64_t num_out = cu_k[2] + 2;
    TestTensor k_out(dtype, {num_out, heads, dim});
    TestTensor v_out(dtype, {num_out, heads, dim});
    k_out.fill(kNaN);
    v_out.fill(kNaN);
    TestTensor cpu[4] = {k_cache, v_cache, k_out, v_out};
    TestTensor gpu[4] = {k_cache, v_cache, k_out, v_out};
    for (const bool on_device : {false, true}) {
      TestTensor* tensors = on_device ? gpu : cpu;
      DeviceMirror mirror;
      const auto place = [&](const TensorRef& ref) { return on_device ? mirror.upload(ref) : ref; };
      const ExecContext context = on_device ? device_context() : ExecContext();
      const TensorRef k_place = place(tensors[0].ref());
      const TensorRef v_place = place(tensors[1].ref());
      StoreKvCacheParams store;
      store.k = place(k.ref());
      store.v = place(v.ref());
      store.k_cache = k_place;
      store.v_cache = v_place;
      store.slot_mapping = place(ref_of(slots));
      store.kv_layout = layout;
      Status status = store_kv_cache(store, context);
      ASSERT_TRUE(status.ok()) << status.message();
      CopyKvPagesParams copy;
      copy.k_cache = k_place;
      copy.v_cache = v_place;
      copy.src_dst = place(ref_of(pairs, {3, 2}));
      status = copy_kv_pages(copy, context);
      ASSERT_TRUE(status.ok()) << status.message();
      LoadKvCacheParams load;
      load.k_cache = k_place;
      load.v_cache = v_place;
      load.k_new = store.k;
      load.v_new = store.v;
      load.page_table = place(ref_of(table, {2, 4}));
      load.context_lens = place(ref_of(context_lens));
      load.cu_seqlens_q = place(ref_of(cu_q));
      load.cu_seqlens_k = place(ref_of(cu_k));
      load.k_out = place(tensors[2].ref());
      load.v_out = place(tensors[3].ref());
      load.kv_layout = layout;
      status = load_kv_cache(load, context);
      ASSERT_TRUE(status.ok()) << status.message();
      if (on_device) {
        mirror.download();
      }
    }
    for (int i = 0; i < 4; ++i) {
      expect_parity(cpu[i], gpu[i], dtype, "kv cache");
      if (HasFatalFailure()) {
        FAIL() << "seed " << seed << " tensor " << i;
      }
    }
  }
}

TEST(CudaKvCacheTest, CheckDataReportsABadSlot) {
  DIFFULEX_REQUIRE_DEVICE();
  TestTensor cache(DType::kBF16, {2, 4, 1, 8});
  TestTensor k(DType::kBF16, {1, 1, 8});
  std::vector<int32_t> slots = {8};
  DeviceMirror mirror;
  StoreKvCacheParams params;
  params.k = mirror.upload(k.ref());
  params.v = mirror.upload(k.ref());
  params.k_cache = mirror.upload(cache.ref());
  params.v_cache = mirror.upload(cache.ref());
  params.slot_mapping = mirror.upload(ref_of(slots));
  ExecContext context = device_context();
  EXPECT_TRUE(store_kv_cache(params, context).ok());  // skipped without the check
  context.check_data = true;
  const Status status = store_kv_cache(params, context);
  EXPECT_EQ(status.code(), StatusCode::kOutOfRange);
  EXPECT_NE(status.message().find("slot_mapping"), std::string::npos) << status.message();
  mirror.download();
}

}  // namespace
}  // namespace diffulex::test
