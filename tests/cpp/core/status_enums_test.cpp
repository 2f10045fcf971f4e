// SPDX-License-Identifier: Apache-2.0
#include "diffulex/core/status_enums.h"

#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "diffulex/core/arena.h"
#include "diffulex/core/status.h"

namespace diffulex {
namespace {

/// Every value from 0 has the given name; the value after the last and negative ones are unknown.
template <typename Enum>
void expect_names(const std::vector<std::string>& names) {
  for (size_t i = 0; i < names.size(); ++i) {
    EXPECT_EQ(to_string(static_cast<Enum>(i)), names[i]);
  }
  EXPECT_STREQ(to_string(static_cast<Enum>(names.size())), "unknown");
  EXPECT_STREQ(to_string(static_cast<Enum>(-1)), "unknown");
}

TEST(StatusEnums, NamesAreThoseOfTheDocumentsInTheirOrder) {
  expect_names<RequestStatus>(
      {"WAITING", "PENDING", "PREFILLING", "DECODING", "COMPLETED", "FINISHED"});
  expect_names<BlockStatus>({"DUMMY", "ACTIVE", "TO_CACHE", "IN_CACHE"});
  expect_names<BlockType>({"IN_CONTEXT", "LAST_IN_CONTEXT", "OUT_OF_CONTEXT"});
  expect_names<FinishReason>({"none", "eos_token_generated", "max_new_tokens_reached",
                              "max_model_len_reached", "max_nfe_reached",
                              "max_repetition_run_reached", "aborted", "rejected", "error"});
  expect_names<RowMode>({"PREFILL_BLOCK_CAUSAL", "DECODE_BLOCK_CAUSAL", "CACHE_ONLY",
                         "PREFILL_PREFIX_FULL", "CAUSAL", "CANVAS"});
  expect_names<PlanKind>({"idle", "prefill", "decode"});
  expect_names<ArenaDtype>({"uint8", "int32", "int64", "float32", "float64"});
}

TEST(StatusEnums, StatusCodesHaveDistinctNames) {
  std::set<std::string> names;
  for (const StatusCode code :
       {StatusCode::kOk, StatusCode::kInvalidArgument, StatusCode::kOutOfRange,
        StatusCode::kNotFound, StatusCode::kAlreadyExists, StatusCode::kUnsupported,
        StatusCode::kOutOfPages, StatusCode::kQueueFull, StatusCode::kOutOfMemory,
        StatusCode::kCudaError, StatusCode::kNoKernel, StatusCode::kInternal}) {
    EXPECT_STRNE(to_string(code), "unknown");
    EXPECT_TRUE(names.insert(to_string(code)).second);
  }
  EXPECT_STREQ(to_string(static_cast<StatusCode>(1000)), "unknown");
}

}  // namespace
}  // namespace diffulex
