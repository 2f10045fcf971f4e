// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace diffulex {

/// Life cycle of a request. Transitions:
///
///   WAITING -admitted-> PENDING -rows to prefill-> PREFILLING -span finished-> DECODING
///   PENDING -nothing to prefill-> DECODING
///   PENDING | PREFILLING | DECODING -preempted-> WAITING
///   PREFILLING | DECODING -stop condition-> COMPLETED -pages freed-> FINISHED
///   any -abort-> FINISHED
enum class RequestStatus : int32_t {
  kWaiting = 0,
  kPending = 1,
  kPrefilling = 2,
  kDecoding = 3,
  kCompleted = 4,  // result ready, pages still held (transient)
  kFinished = 5,
};

/// State of one diffusion block; the transition table is in block_rules.h.
enum class BlockStatus : int32_t {
  kDummy = 0,    // placeholder, not computed
  kActive = 1,   // being denoised
  kToCache = 2,  // tokens final, KV not stored yet
  kInCache = 3,  // tokens final, KV stored
};

/// Whether a block, or a block after it, may be activated.
enum class BlockType : int32_t {
  kInContext = 0,
  kLastInContext = 1,  // no block after it may be activated
  kOutOfContext = 2,   // never computed or reported
};

/// Why a request ended; kNone while it runs.
enum class FinishReason : int32_t {
  kNone = 0,
  kEosTokenGenerated = 1,
  kMaxNewTokensReached = 2,
  kMaxModelLenReached = 3,
  kMaxNfeReached = 4,
  kMaxRepetitionRunReached = 5,
  kAborted = 6,
  kRejected = 7,
  kError = 8,
};

/// Visibility rule of the rows of one request in a forward.
enum class RowMode : int32_t {
  kPrefillBlockCausal = 0,
  kDecodeBlockCausal = 1,
  kCacheOnly = 2,
  kPrefillPrefixFull = 3,
  kCausal = 4,
  kCanvas = 5,
};

/// What a scheduled step is.
enum class PlanKind : int32_t { kIdle = 0, kPrefill = 1, kDecode = 2 };

/// Name of a request status as in the documents, e.g. "WAITING". Total: unknown gives "unknown".
[[nodiscard]] constexpr const char* to_string(RequestStatus status) noexcept {
  switch (status) {
    case RequestStatus::kWaiting:
      return "WAITING";
    case RequestStatus::kPending:
      return "PENDING";
    case RequestStatus::kPrefilling:
      return "PREFILLING";
    case RequestStatus::kDecoding:
      return "DECODING";
    case RequestStatus::kCompleted:
      return "COMPLETED";
    case RequestStatus::kFinished:
      return "FINISHED";
  }
  return "unknown";
}

/// Name of a block status, e.g. "TO_CACHE". Total.
[[nodiscard]] constexpr const char* to_string(BlockStatus status) noexcept {
  switch (status) {
    case BlockStatus::kDummy:
      return "DUMMY";
    case BlockStatus::kActive:
      return "ACTIVE";
    case BlockStatus::kToCache:
      return "TO_CACHE";
    case BlockStatus::kInCache:
      return "IN_CACHE";
  }
  return "unknown";
}

/// Name of a block type, e.g. "IN_CONTEXT". Total.
[[nodiscard]] constexpr const char* to_string(BlockType type) noexcept {
  switch (type) {
    case BlockType::kInContext:
      return "IN_CONTEXT";
    case BlockType::kLastInContext:
      return "LAST_IN_CONTEXT";
    case BlockType::kOutOfContext:
      return "OUT_OF_CONTEXT";
  }
  return "unknown";
}

/// Name of a finish reason, e.g. "eos_token_generated"; "none" while running. Total.
[[nodiscard]] constexpr const char* to_string(FinishReason reason) noexcept {
  switch (reason) {
    case FinishReason::kNone:
      return "none";
    case FinishReason::kEosTokenGenerated:
      return "eos_token_generated";
    case FinishReason::kMaxNewTokensReached:
      return "max_new_tokens_reached";
    case FinishReason::kMaxModelLenReached:
      return "max_model_len_reached";
    case FinishReason::kMaxNfeReached:
      return "max_nfe_reached";
    case FinishReason::kMaxRepetitionRunReached:
      return "max_repetition_run_reached";
    case FinishReason::kAborted:
      return "aborted";
    case FinishReason::kRejected:
      return "rejected";
    case FinishReason::kError:
      return "error";
  }
  return "unknown";
}

/// Name of a row mode, e.g. "DECODE_BLOCK_CAUSAL". Total.
[[nodiscard]] constexpr const char* to_string(RowMode mode) noexcept {
  switch (mode) {
    case RowMode::kPrefillBlockCausal:
      return "PREFILL_BLOCK_CAUSAL";
    case RowMode::kDecodeBlockCausal:
      return "DECODE_BLOCK_CAUSAL";
    case RowMode::kCacheOnly:
      return "CACHE_ONLY";
    case RowMode::kPrefillPrefixFull:
      return "PREFILL_PREFIX_FULL";
    case RowMode::kCausal:
      return "CAUSAL";
    case RowMode::kCanvas:
      return "CANVAS";
  }
  return "unknown";
}

/// Name of a plan kind: "idle", "prefill", "decode". Total.
[[nodiscard]] constexpr const char* to_string(PlanKind kind) noexcept {
  switch (kind) {
    case PlanKind::kIdle:
      return "idle";
    case PlanKind::kPrefill:
      return "prefill";
    case PlanKind::kDecode:
      return "decode";
  }
  return "unknown";
}

}  // namespace diffulex
