// SPDX-License-Identifier: Apache-2.0
#pragma once

// The only place with inline PTX: one wrapper per instruction.

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace diffulex::cuda::ptx {

/// The same in all lanes, as the compiler knows.
__device__ __forceinline__ int32_t uniform(int32_t value) {
  return __shfl_sync(0xFFFFFFFFU, value, 0);
}

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

/// prefetch (PTX 2.0): the line of `address` into L2.
__device__ __forceinline__ void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];\n" ::"l"(address));
}

/// cp.async (PTX 7.0, sm_80): 16 bytes from global to shared, or zeros when `is_read` is false;
/// the source must be a valid address in both cases.
__device__ __forceinline__ void cp_async16(uint32_t target, const void* source, bool is_read) {
  const int bytes = is_read ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(target), "l"(source),
               "r"(bytes)
               : "memory");
}

/// cp.async of 4 bytes (PTX 7.0, sm_80).
__device__ __forceinline__ void cp_async4(uint32_t target, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\n" ::"r"(target), "l"(source) : "memory");
}

/// st.shared: 16 bytes.
__device__ __forceinline__ void store_shared16(uint32_t target, const uint4& value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(target), "r"(value.x),
               "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

/// As above, or zeros when `is_read` is false; the source must be a valid address in both cases.
__device__ __forceinline__ void cp_async4(uint32_t target, const void* source, bool is_read) {
  const int bytes = is_read ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(target), "l"(source),
               "r"(bytes)
               : "memory");
}

/// cp.async.commit_group (PTX 7.0, sm_80).
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}

/// cp.async.wait_group (PTX 7.0, sm_80): at most kPending groups of this thread stay in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

/// cp.async.mbarrier.arrive.noinc (PTX 7.1, sm_80): an arrival on `barrier`, which counted on it,
/// once the earlier cp.async of this thread have landed.
__device__ __forceinline__ void cp_async_arrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];\n" ::"r"(barrier) : "memory");
}

/// ldmatrix (PTX 6.5, sm_75): four 8x8 matrices of 16-bit elements.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&fragment)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(address)
               : "memory");
}

/// As above, each matrix transposed.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&fragment)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(address)
               : "memory");
}

/// stmatrix (PTX 7.8, sm_90): four 8x8 matrices of 16-bit elements, each transposed; lane i gives
/// the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, const uint32_t (&fragment)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(address),
      "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3])
      : "memory");
}

/// ld.shared of 16 bytes.
__device__ __forceinline__ float4 shared_load4(uint32_t address) {
  float4 value;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];\n"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

/// st.shared of 16 bytes.
__device__ __forceinline__ void shared_store4(uint32_t address, const float (&value)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"r"(address), "f"(value[0]),
               "f"(value[1]), "f"(value[2]), "f"(value[3])
               : "memory");
}

/// ld.shared of 4 bytes.
__device__ __forceinline__ float shared_load1(uint32_t address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];\n" : "=f"(value) : "r"(address) : "memory");
  return value;
}

/// ld.shared of 8 bytes.
__device__ __forceinline__ float2 shared_load2(uint32_t address) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];\n"
               : "=f"(value.x), "=f"(value.y)
               : "r"(address)
               : "memory");
  return value;
}

/// ld.shared of two words.
__device__ __forceinline__ uint2 shared_load_pair(uint32_t address) {
  uint2 value;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];\n"
               : "=r"(value.x), "=r"(value.y)
               : "r"(address)
               : "memory");
  return value;
}

/// ld.shared of a bfloat16.
__device__ __forceinline__ __nv_bfloat16 shared_load_bf16(uint32_t address) {
  uint16_t bits;
  asm volatile("ld.shared.b16 %0, [%1];\n" : "=h"(bits) : "r"(address) : "memory");
  return __ushort_as_bfloat16(bits);
}

/// lop3: (value & mask) | bits in one instruction.
__device__ __forceinline__ uint32_t and_or(uint32_t value, uint32_t mask, uint32_t bits) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;\n" : "=r"(result) : "r"(value), "r"(mask), "r"(bits));
  return result;
}

/// movmatrix (PTX 7.8, sm_75): an 8x8 matrix of 16-bit elements held by a warp, transposed.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t fragment) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(result) : "r"(fragment));
  return result;
}

/// mma.m16n8k16 (PTX 7.0, sm_80), fp32 accumulation: c += a * b.
template <typename T>
__device__ __forceinline__ void mma_16816(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                          uint32_t b1);
template <>
__device__ __forceinline__ void mma_16816<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4],
                                                         uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma_16816<__half>(float (&c)[4], const uint32_t (&a)[4],
                                                  uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// mma.m16n8k8 (PTX 7.0, sm_80) of float32 operands of which the upper 19 bits count.
__device__ __forceinline__ void mma_1688_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                              uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// ex2.approx (PTX 1.4): 2^x, relative error below 2^-22; -inf gives 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(result) : "f"(x));
  return result;
}

}  // namespace diffulex::cuda::ptx
