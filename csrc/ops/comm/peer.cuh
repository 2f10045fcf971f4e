// SPDX-License-Identifier: Apache-2.0
#pragma once

// How ranks write to each other's buffers and wait for what the others write there.
//
// A sum needs no flags: a place that nothing was written to holds a pattern that no part contains,
// two halves of -0. A part of 16 bits has its -0 replaced by +0, one of 32 bits its single value
// with that pattern, -2^-134, by the next one. So one trip over the link brings data and news of
// it.

#include <cstdint>

#include "ops/comm/config.h"

namespace diffulex::cuda {

inline constexpr uint32_t kUnwritten = 0x80008000U;

/// A store that another device sees, in any order with others.
__device__ __forceinline__ void store_peer(void* target, uint4 value) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(value.x),
               "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}
__device__ __forceinline__ void store_peer(void* target, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(target), "l"(value) : "memory");
}

/// What another device may be writing.
__device__ __forceinline__ uint4 load_peer(const void* source) {
  uint4 value;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(source)
               : "memory");
  return value;
}
__device__ __forceinline__ uint64_t load_peer_word(const void* source) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(source) : "memory");
  return value;
}

__device__ __forceinline__ uint64_t device_time_ns() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

/// A mask of the 16-bit halves of `word` that are 0x8000.
__device__ __forceinline__ uint32_t unwritten_halves(uint32_t word) {
  return __vcmpeq2(word, kUnwritten);
}

/// `word` of a part of elements of kBytes bytes as it is sent.
template <int kBytes>
__device__ __forceinline__ uint32_t sendable(uint32_t word) {
  if constexpr (kBytes == 2) {
    return word & ~unwritten_halves(word);
  } else {
    return word == kUnwritten ? kUnwritten + 1 : word;
  }
}
template <int kBytes>
__device__ __forceinline__ uint4 sendable(uint4 words) {
  return {sendable<kBytes>(words.x), sendable<kBytes>(words.y), sendable<kBytes>(words.z),
          sendable<kBytes>(words.w)};
}

/// Whether every element of 16 bytes has arrived.
template <int kBytes>
__device__ __forceinline__ bool has_arrived(uint4 words) {
  if constexpr (kBytes == 2) {
    return (unwritten_halves(words.x) | unwritten_halves(words.y) | unwritten_halves(words.z) |
            unwritten_halves(words.w)) == 0;
  } else {
    return words.x != kUnwritten && words.y != kUnwritten && words.z != kUnwritten &&
           words.w != kUnwritten;
  }
}

__device__ __forceinline__ int64_t* state_word(int64_t* state, CollectiveState word) {
  return state + static_cast<int>(word);
}

/// The end of waiting: what a thread asks between two looks at a place. Given up once, it does not
/// wait again, and what the kernel returns is void.
class Patience final {
 public:
  __device__ Patience(const int64_t* state, uint64_t exchange)
      : state_(state), exchange_(exchange) {}

  /// False when the caller is to leave; `peer` is the rank it waits for.
  __device__ __forceinline__ bool lasts(int peer) {
    if (gave_up_) {
      return false;
    }
    if (++looks_ % kLooks == 0) {
      check(peer);
    }
    return !gave_up_;
  }

 private:
  static constexpr uint32_t kLooks = 256;
  /// Between two looks at host memory. All waiting warps of a kernel look, half a microsecond each:
  /// the ordinary waits of a step must not get there.
  static constexpr uint64_t kPauseNs = 2'000'000;

  __device__ __noinline__ void check(int peer) {
    const uint64_t now = device_time_ns();
    if (began_ == 0) {
      began_ = now;
      asked_ = now;
    }
    if (now - asked_ < kPauseNs) {
      return;
    }
    asked_ = now;
    auto* control =
        reinterpret_cast<volatile int64_t*>(state_[static_cast<int>(CollectiveState::kControl)]);
    if (control == nullptr) {
      return;
    }
    if (control[static_cast<int>(CollectiveControl::kAbort)] != 0) {
      gave_up_ = true;
      return;
    }
    const auto limit = static_cast<uint64_t>(state_[static_cast<int>(CollectiveState::kTimeout)]);
    if (limit == 0 || now - began_ < limit) {
      return;
    }
    gave_up_ = true;
    control[static_cast<int>(CollectiveControl::kPeer)] = peer;
    control[static_cast<int>(CollectiveControl::kEpoch)] = static_cast<int64_t>(exchange_);
    __threadfence_system();
    control[static_cast<int>(CollectiveControl::kStatus)] = 1;
    // Every wait that follows would time out as well.
    control[static_cast<int>(CollectiveControl::kAbort)] = 1;
  }

  const int64_t* state_;
  uint64_t exchange_;
  uint64_t began_ = 0;
  uint64_t asked_ = 0;
  uint32_t looks_ = 0;
  bool gave_up_ = false;
};

/// 16 bytes of elements of kBytes bytes that `peer` writes to `source`.
template <int kBytes>
__device__ __forceinline__ uint4 receive(const void* source, int peer, uint4 first,
                                         Patience* patience) {
  while (!has_arrived<kBytes>(first) && patience->lasts(peer)) {
    first = load_peer(source);
  }
  return first;
}

/// The number of this exchange for every thread of a CTA, one of which calls take_ticket() later.
/// Contains a barrier.
__device__ __forceinline__ uint64_t read_epoch(const int64_t* epoch, uint64_t* shared) {
  if (threadIdx.x == 0) {
    *shared = static_cast<uint64_t>(*reinterpret_cast<const volatile int64_t*>(epoch));
  }
  __syncthreads();
  return *shared;
}

/// True for the last CTA of a launch to ask, when all of them have read the number of the exchange:
/// it may then be advanced. The word of the ticket is chosen by that number, so that no CTA asks
/// before it has read it. One thread per CTA.
__device__ __forceinline__ bool take_ticket(int64_t* tickets, uint64_t epoch) {
  auto* ticket = reinterpret_cast<unsigned long long*>(tickets + epoch % 4);
  if (atomicAdd(ticket, 1ULL) + 1 < gridDim.x) {
    return false;
  }
  *ticket = 0;
  return true;
}

}  // namespace diffulex::cuda
