// SPDX-License-Identifier: Apache-2.0
#pragma once

// Warpgroup matrix products (PTX 8.0, sm_90a): one wrapper per instruction. 16-bit or e4m3
// operands, fp32 accumulators: c[j] holds columns 8j .. 8j + 7 of the 64 rows of a warpgroup, with
// the register layout of mma.m16n8 in each warp (rows 16 * warp + lane / 4 and 8 below).

#include <cstdint>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace diffulex::cuda::ptx {

/// Descriptor of a shared-memory operand with the 128-byte swizzle. `address` is where the tile (or
/// its current 16-element step) starts in a buffer aligned to 1024 bytes.
/// K-major operand (rows of 128 bytes along K): stride_bytes = distance of groups of eight rows;
/// leading_bytes is not used. MN-major operand: leading_bytes = distance of 64-element groups along
/// MN, stride_bytes = distance of groups of eight K rows.
__device__ __forceinline__ uint64_t swizzle128_descriptor(uint32_t address, uint32_t leading_bytes,
                                                          uint32_t stride_bytes) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  return kSwizzle128 | (static_cast<uint64_t>((stride_bytes & 0x3FFFF) >> 4) << 32) |
         (static_cast<uint64_t>((leading_bytes & 0x3FFFF) >> 4) << 16) |
         static_cast<uint64_t>((address & 0x3FFFF) >> 4);
}

/// A descriptor whose address is `units` of 16 bytes on; the sum stays within the address.
__device__ __forceinline__ uint64_t move_descriptor(uint64_t descriptor, uint32_t units) {
  return (descriptor & 0xFFFFFFFF00000000U) | (static_cast<uint32_t>(descriptor) + units);
}

/// wgmma.fence: registers and shared memory written before are seen by the products issued next.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}

/// wgmma.commit_group: ends a batch of products.
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}

/// wgmma.wait_group: at most kPending batches of this warpgroup stay in flight.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}

/// Keeps the compiler from moving accesses of accumulators across an issue or a wait.
template <int kGroups>
__device__ __forceinline__ void wgmma_hold(float (&c)[kGroups][4]) {
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    asm volatile(""
                 : "+f"(c[group][0]), "+f"(c[group][1]), "+f"(c[group][2]),
                   "+f"(c[group][3])::"memory");
  }
}

// clang-format off
#define DIFFULEX_ACC_1(r) "+f"(c[r][0]), "+f"(c[r][1]), "+f"(c[r][2]), "+f"(c[r][3])
#define DIFFULEX_ACC_2(r) DIFFULEX_ACC_1(r), DIFFULEX_ACC_1((r) + 1)
#define DIFFULEX_ACC_4(r) DIFFULEX_ACC_2(r), DIFFULEX_ACC_2((r) + 2)
#define DIFFULEX_ACC_8(r) DIFFULEX_ACC_4(r), DIFFULEX_ACC_4((r) + 4)
#define DIFFULEX_ACC_12(r) DIFFULEX_ACC_8(r), DIFFULEX_ACC_4((r) + 8)
#define DIFFULEX_ACC_14(r) DIFFULEX_ACC_12(r), DIFFULEX_ACC_2((r) + 12)
#define DIFFULEX_ACC_16(r) DIFFULEX_ACC_8(r), DIFFULEX_ACC_8((r) + 8)
#define DIFFULEX_ACC_18(r) DIFFULEX_ACC_16(r), DIFFULEX_ACC_2((r) + 16)
#define DIFFULEX_ACC_20(r) DIFFULEX_ACC_16(r), DIFFULEX_ACC_4((r) + 16)
#define DIFFULEX_ACC_24(r) DIFFULEX_ACC_16(r), DIFFULEX_ACC_8((r) + 16)
#define DIFFULEX_ACC_32(r) DIFFULEX_ACC_16(r), DIFFULEX_ACC_16((r) + 16)

#define DIFFULEX_REGS_1 \
  "%0, %1, %2, %3"
#define DIFFULEX_REGS_2 \
  "%0, %1, %2, %3, %4, %5, %6, %7"
#define DIFFULEX_REGS_4 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define DIFFULEX_REGS_8 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define DIFFULEX_REGS_12 \
  DIFFULEX_REGS_8 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define DIFFULEX_REGS_14 \
  DIFFULEX_REGS_12 ", " \
  "%48, %49, %50, %51, %52, %53, %54, %55"
#define DIFFULEX_REGS_16 \
  DIFFULEX_REGS_12 ", " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define DIFFULEX_REGS_18 \
  DIFFULEX_REGS_16 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71"
#define DIFFULEX_REGS_20 \
  DIFFULEX_REGS_16 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define DIFFULEX_REGS_24 \
  DIFFULEX_REGS_20 ", " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define DIFFULEX_REGS_32 \
  DIFFULEX_REGS_24 ", " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// kGroups * 4 accumulators, then a descriptor pair and the accumulate flag.
#define DIFFULEX_WGMMA_SS(groups, n, type, a_op, b_op, flag, ta, tb)                             \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " flag ", 0;\n"                                \
               "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {"               \
               DIFFULEX_REGS_##groups "}, " a_op ", " b_op ", p, 1, 1, " ta ", " tb ";\n}\n"     \
               : DIFFULEX_ACC_##groups(0)                                                        \
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kTransposeA),            \
                 "n"(kTransposeB))

// The same with the left operand in four registers.
#define DIFFULEX_WGMMA_RS(groups, n, type, a0, a1, a2, a3, b_op, flag, tb)                       \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " flag ", 0;\n"                                \
               "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {"               \
               DIFFULEX_REGS_##groups "}, {" a0 ", " a1 ", " a2 ", " a3 "}, " b_op               \
               ", p, 1, 1, " tb ";\n}\n"                                                         \
               : DIFFULEX_ACC_##groups(0)                                                        \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                             \
                 "r"(static_cast<int>(accumulate)), "n"(kTransposeB))

// e4m3 operands, both K-major.
#define DIFFULEX_WGMMA_E4M3(groups, n, a_op, b_op, flag)                                         \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " flag ", 0;\n"                                \
               "wgmma.mma_async.sync.aligned.m64n" n "k32.f32.e4m3.e4m3 {"                       \
               DIFFULEX_REGS_##groups "}, " a_op ", " b_op ", p, 1, 1;\n}\n"                     \
               : DIFFULEX_ACC_##groups(0)                                                        \
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)))

#define DIFFULEX_SS_1(type) \
  DIFFULEX_WGMMA_SS(1, "8", type, "%4", "%5", "%6", "%7", "%8")
#define DIFFULEX_RS_1(type) \
  DIFFULEX_WGMMA_RS(1, "8", type, "%4", "%5", "%6", "%7", "%8", "%9", "%10")
#define DIFFULEX_SS_2(type) \
  DIFFULEX_WGMMA_SS(2, "16", type, "%8", "%9", "%10", "%11", "%12")
#define DIFFULEX_RS_2(type) \
  DIFFULEX_WGMMA_RS(2, "16", type, "%8", "%9", "%10", "%11", "%12", "%13", "%14")
#define DIFFULEX_SS_4(type) \
  DIFFULEX_WGMMA_SS(4, "32", type, "%16", "%17", "%18", "%19", "%20")
#define DIFFULEX_RS_4(type) \
  DIFFULEX_WGMMA_RS(4, "32", type, "%16", "%17", "%18", "%19", "%20", "%21", "%22")
#define DIFFULEX_SS_8(type) \
  DIFFULEX_WGMMA_SS(8, "64", type, "%32", "%33", "%34", "%35", "%36")
#define DIFFULEX_RS_8(type) \
  DIFFULEX_WGMMA_RS(8, "64", type, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
#define DIFFULEX_SS_12(type) \
  DIFFULEX_WGMMA_SS(12, "96", type, "%48", "%49", "%50", "%51", "%52")
#define DIFFULEX_SS_14(type) \
  DIFFULEX_WGMMA_SS(14, "112", type, "%56", "%57", "%58", "%59", "%60")
#define DIFFULEX_SS_16(type) \
  DIFFULEX_WGMMA_SS(16, "128", type, "%64", "%65", "%66", "%67", "%68")
#define DIFFULEX_RS_16(type) \
  DIFFULEX_WGMMA_RS(16, "128", type, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
#define DIFFULEX_SS_18(type) \
  DIFFULEX_WGMMA_SS(18, "144", type, "%72", "%73", "%74", "%75", "%76")
#define DIFFULEX_SS_20(type) \
  DIFFULEX_WGMMA_SS(20, "160", type, "%80", "%81", "%82", "%83", "%84")
#define DIFFULEX_SS_32(type) \
  DIFFULEX_WGMMA_SS(32, "256", type, "%128", "%129", "%130", "%131", "%132")
#define DIFFULEX_RS_32(type) \
  DIFFULEX_WGMMA_RS(32, "256", type, "%128", "%129", "%130", "%131", "%132", "%133", "%134")

#define DIFFULEX_WGMMA_CASE(kind, groups)            \
  if constexpr (kGroups == groups) {                 \
    if constexpr (std::is_same_v<T, __nv_bfloat16>) { \
      DIFFULEX_##kind##_##groups("bf16");            \
    } else {                                         \
      DIFFULEX_##kind##_##groups("f16");             \
    }                                                \
  }
// clang-format on

/// c (+)= A B for 64 rows, 8 * kGroups columns and one 16-element step of K, both operands in
/// shared memory. T is __nv_bfloat16 or __half; the flags mark MN-major operands.
template <typename T, int kTransposeA = 0, int kTransposeB = 0, int kGroups>
__device__ __forceinline__ void wgmma_ss(float (&c)[kGroups][4], uint64_t a, uint64_t b,
                                         bool accumulate) {
  static_assert(kGroups == 1 || kGroups == 2 || kGroups == 4 || kGroups == 8 || kGroups == 12 ||
                    kGroups == 14 || kGroups == 16 || kGroups == 18 || kGroups == 20 ||
                    kGroups == 32,
                "8, 16, 32, 64, 96, 112, 128, 144, 160 or 256 columns");
  DIFFULEX_WGMMA_CASE(SS, 1)
  DIFFULEX_WGMMA_CASE(SS, 2)
  DIFFULEX_WGMMA_CASE(SS, 4)
  DIFFULEX_WGMMA_CASE(SS, 8)
  DIFFULEX_WGMMA_CASE(SS, 12)
  DIFFULEX_WGMMA_CASE(SS, 14)
  DIFFULEX_WGMMA_CASE(SS, 16)
  DIFFULEX_WGMMA_CASE(SS, 18)
  DIFFULEX_WGMMA_CASE(SS, 20)
  DIFFULEX_WGMMA_CASE(SS, 32)
}

/// c (+)= A B of e4m3 codes for 64 rows, 8 * kGroups columns and one 32-element step of K, both
/// operands in shared memory and K-major. The unit keeps about 14 bits of a sum: few steps only.
template <int kGroups>
__device__ __forceinline__ void wgmma_e4m3(float (&c)[kGroups][4], uint64_t a, uint64_t b,
                                           bool accumulate) {
  static_assert(kGroups == 2 || kGroups == 4 || kGroups == 8 || kGroups == 12 || kGroups == 16 ||
                    kGroups == 24,
                "16, 32, 64, 96, 128 or 192 columns");
  if constexpr (kGroups == 2) {
    DIFFULEX_WGMMA_E4M3(2, "16", "%8", "%9", "%10");
  } else if constexpr (kGroups == 4) {
    DIFFULEX_WGMMA_E4M3(4, "32", "%16", "%17", "%18");
  } else if constexpr (kGroups == 8) {
    DIFFULEX_WGMMA_E4M3(8, "64", "%32", "%33", "%34");
  } else if constexpr (kGroups == 12) {
    DIFFULEX_WGMMA_E4M3(12, "96", "%48", "%49", "%50");
  } else if constexpr (kGroups == 16) {
    DIFFULEX_WGMMA_E4M3(16, "128", "%64", "%65", "%66");
  } else {
    DIFFULEX_WGMMA_E4M3(24, "192", "%96", "%97", "%98");
  }
}

/// As above with A (the fragment layout of mma.m16n8k16) in registers, which must stay untouched
/// until the batch has been waited for.
template <typename T, int kTransposeB = 0, int kGroups>
__device__ __forceinline__ void wgmma_rs(float (&c)[kGroups][4], const uint32_t (&a)[4], uint64_t b,
                                         bool accumulate) {
  static_assert(kGroups == 1 || kGroups == 2 || kGroups == 4 || kGroups == 8 || kGroups == 16 ||
                    kGroups == 32,
                "8, 16, 32, 64, 128 or 256 columns");
  DIFFULEX_WGMMA_CASE(RS, 1)
  DIFFULEX_WGMMA_CASE(RS, 2)
  DIFFULEX_WGMMA_CASE(RS, 4)
  DIFFULEX_WGMMA_CASE(RS, 8)
  DIFFULEX_WGMMA_CASE(RS, 16)
  DIFFULEX_WGMMA_CASE(RS, 32)
}

#undef DIFFULEX_WGMMA_CASE
#undef DIFFULEX_WGMMA_SS
#undef DIFFULEX_WGMMA_RS
#undef DIFFULEX_WGMMA_E4M3
#undef DIFFULEX_ACC_1
#undef DIFFULEX_ACC_2
#undef DIFFULEX_ACC_4
#undef DIFFULEX_ACC_8
#undef DIFFULEX_ACC_12
#undef DIFFULEX_ACC_14
#undef DIFFULEX_ACC_16
#undef DIFFULEX_ACC_18
#undef DIFFULEX_ACC_20
#undef DIFFULEX_ACC_24
#undef DIFFULEX_ACC_32
#undef DIFFULEX_REGS_1
#undef DIFFULEX_REGS_2
#undef DIFFULEX_REGS_4
#undef DIFFULEX_REGS_8
#undef DIFFULEX_REGS_12
#undef DIFFULEX_REGS_14
#undef DIFFULEX_REGS_16
#undef DIFFULEX_REGS_18
#undef DIFFULEX_REGS_20
#undef DIFFULEX_REGS_24
#undef DIFFULEX_REGS_32
#undef DIFFULEX_SS_1
#undef DIFFULEX_SS_2
#undef DIFFULEX_SS_4
#undef DIFFULEX_SS_8
#undef DIFFULEX_SS_12
#undef DIFFULEX_SS_14
#undef DIFFULEX_SS_16
#undef DIFFULEX_SS_18
#undef DIFFULEX_SS_20
#undef DIFFULEX_SS_32
#undef DIFFULEX_RS_1
#undef DIFFULEX_RS_2
#undef DIFFULEX_RS_4
#undef DIFFULEX_RS_8
#undef DIFFULEX_RS_16
#undef DIFFULEX_RS_32

}  // namespace diffulex::cuda::ptx
