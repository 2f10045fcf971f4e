// SPDX-License-Identifier: Apache-2.0
#include "ops/comm/config.h"

#include <algorithm>

namespace diffulex {
namespace {

constexpr int64_t kMiB = 1 << 20;
constexpr int64_t kMostBytes = 16 * kMiB;

/// Most bytes of a one-shot sum. With two ranks it moves what any other way moves.
int64_t one_shot_bytes(int32_t world) {
  return world <= 2 ? kMostBytes : world <= 4 ? kMiB : kMiB / 2;
}

}  // namespace

CollectiveAlgorithm collective_plan(int32_t world, int64_t num_bytes) {
  if (num_bytes > kMostBytes) {
    return CollectiveAlgorithm::kLibrary;
  }
  return num_bytes <= one_shot_bytes(world) ? CollectiveAlgorithm::kOneShot
                                            : CollectiveAlgorithm::kTwoShot;
}

int64_t collective_epoch_bytes(int32_t world) {
  const int64_t one_shot = (world - 1) * one_shot_bytes(world);
  // The parts of 16-bit rows and sums of twice their bytes; one row more for each uneven owner.
  const int64_t row_bytes = 16384 * sizeof(float);
  return world <= 2 ? one_shot : std::max(one_shot, 3 * kMostBytes + world * row_bytes);
}

int64_t collective_gather_bytes(int32_t world) {
  return kNumGathers * world * 2 * kMaxRecordBytes;
}

}  // namespace diffulex
