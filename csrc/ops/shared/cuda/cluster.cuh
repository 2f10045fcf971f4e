// SPDX-License-Identifier: Apache-2.0
#pragma once

// Thread block clusters (PTX 7.8, sm_90): one wrapper per instruction.

#include <cstdint>

namespace diffulex::cuda::ptx {

/// Rank of this CTA in its cluster.
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
  return rank;
}

/// Index of this cluster in the grid.
__device__ __forceinline__ uint32_t cluster_index() {
  uint32_t index;
  asm volatile("mov.u32 %0, %%clusterid.x;\n" : "=r"(index));
  return index;
}

/// barrier.cluster: every thread of every CTA of the cluster; writes before are seen after.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n" ::: "memory");
}
/// The same without order: tells only that this thread has begun.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\n" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;\n" ::: "memory");
}

/// mapa: address of `address` in the shared memory of CTA `rank` of the cluster.
__device__ __forceinline__ uint32_t cluster_address(uint32_t address, uint32_t rank) {
  uint32_t result;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(result) : "r"(address), "r"(rank));
  return result;
}

/// ld.shared::cluster of 4 bytes.
__device__ __forceinline__ int32_t cluster_load(uint32_t address) {
  int32_t value;
  asm volatile("ld.shared::cluster.s32 %0, [%1];\n" : "=r"(value) : "r"(address) : "memory");
  return value;
}

/// st.async of 16 bytes to another CTA of the cluster; completes them on `barrier` there, whose
/// waiters (mbarrier_wait_cluster) see them. No fence is needed, unlike before an arrival.
__device__ __forceinline__ void cluster_store4_async(uint32_t address, const float (&value)[4],
                                                     uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];\n" ::"r"(address),
      "f"(value[0]), "f"(value[1]), "f"(value[2]), "f"(value[3]), "r"(barrier)
      : "memory");
}

/// As above, 8 bytes.
__device__ __forceinline__ void cluster_store8_async(uint32_t address, uint64_t value,
                                                     uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];\n" ::"r"(address),
      "l"(value), "r"(barrier)
      : "memory");
}

/// mbarrier.arrive.expect_tx on the barrier of any CTA of the cluster (cluster_address): arrives
/// and announces `bytes` of st.async, some of which may have landed; in the order of this CTA only.
__device__ __forceinline__ void cluster_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;\n" ::"r"(barrier),
               "r"(bytes)
               : "memory");
}

/// mapa: the twin of the shared object `local` in CTA `rank` of the cluster, for ordinary accesses.
template <typename Value>
__device__ __forceinline__ Value* cluster_pointer(Value* local, uint32_t rank) {
  Value* result;
  asm volatile("mapa.u64 %0, %1, %2;\n" : "=l"(result) : "l"(local), "r"(rank));
  return result;
}

}  // namespace diffulex::cuda::ptx
