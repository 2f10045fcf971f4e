// SPDX-License-Identifier: Apache-2.0
#pragma once

// Bulk tensor copies (PTX 8.0, sm_90): one wrapper per instruction. Coordinates are in elements,
// innermost dimension first; parts of a box outside the tensor become zeros and count as copied.

#include <cstdint>

#include <cuda.h>

namespace diffulex::cuda::ptx {

/// elect.sync: true in one lane of a converged warp. Copies issued under it need no loop over
/// lanes, which the compiler otherwise makes for their uniform operands.
__device__ __forceinline__ bool elect_one() {
  uint32_t chosen;
  asm volatile(
      "{\n.reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n}\n"
      : "=r"(chosen)::"memory");
  return chosen != 0;
}

/// prefetch.tensormap.
__device__ __forceinline__ void tma_prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(map) : "memory");
}

/// cp.async.bulk.tensor, global to the shared memory of this CTA; completes on `barrier`.
__device__ __forceinline__ void tma_load(uint32_t target, const CUtensorMap* map, uint32_t barrier,
                                         int32_t x0, int32_t x1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4}], [%2];\n" ::"r"(target),
      "l"(map), "r"(barrier), "r"(x0), "r"(x1)
      : "memory");
}
__device__ __forceinline__ void tma_load(uint32_t target, const CUtensorMap* map, uint32_t barrier,
                                         int32_t x0, int32_t x1, int32_t x2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5}], [%2];\n" ::"r"(target),
      "l"(map), "r"(barrier), "r"(x0), "r"(x1), "r"(x2)
      : "memory");
}
__device__ __forceinline__ void tma_load(uint32_t target, const CUtensorMap* map, uint32_t barrier,
                                         int32_t x0, int32_t x1, int32_t x2, int32_t x3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];\n" ::"r"(target),
      "l"(map), "r"(barrier), "r"(x0), "r"(x1), "r"(x2), "r"(x3)
      : "memory");
}

/// cp.async.bulk: `bytes`, a multiple of 16, between addresses that are multiples of 16.
__device__ __forceinline__ void bulk_load(uint32_t target, const void* source, uint32_t bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::
          "r"(target),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

/// createpolicy: what the L2 cache does with the lines of a hinted load.
__device__ __forceinline__ uint64_t policy_evict_first() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;\n" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint64_t policy_evict_normal() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;\n" : "=l"(policy));
  return policy;
}

/// As tma_load, with a policy for the L2 cache.
__device__ __forceinline__ void tma_load_hinted(uint32_t target, const CUtensorMap* map,
                                                uint32_t barrier, uint64_t policy, int32_t x0,
                                                int32_t x1, int32_t x2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%4, %5, %6}], [%2], %3;\n" ::"r"(target),
      "l"(map), "r"(barrier), "l"(policy), "r"(x0), "r"(x1), "r"(x2)
      : "memory");
}
__device__ __forceinline__ void tma_load_hinted(uint32_t target, const CUtensorMap* map,
                                                uint32_t barrier, uint64_t policy, int32_t x0,
                                                int32_t x1, int32_t x2, int32_t x3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%4, %5, %6, %7}], [%2], %3;\n" ::"r"(target),
      "l"(map), "r"(barrier), "l"(policy), "r"(x0), "r"(x1), "r"(x2), "r"(x3)
      : "memory");
}
__device__ __forceinline__ void tma_load_hinted(uint32_t target, const CUtensorMap* map,
                                                uint32_t barrier, uint64_t policy, int32_t x0,
                                                int32_t x1, int32_t x2, int32_t x3, int32_t x4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%4, %5, %6, %7, %8}], [%2], %3;\n" ::"r"(target),
      "l"(map), "r"(barrier), "l"(policy), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
      : "memory");
}

/// As above, to the same offset of every CTA of the cluster whose bit is set in `ctas`; completes
/// on the barrier of that offset in each.
__device__ __forceinline__ void tma_load_multicast(uint32_t target, const CUtensorMap* map,
                                                   uint32_t barrier, uint16_t ctas, uint64_t policy,
                                                   int32_t x0, int32_t x1, int32_t x2, int32_t x3,
                                                   int32_t x4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%5, %6, %7, %8, %9}], [%2], %3, %4;\n" ::"r"(
          target),
      "l"(map), "r"(barrier), "h"(ctas), "l"(policy), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
      : "memory");
}

}  // namespace diffulex::cuda::ptx
