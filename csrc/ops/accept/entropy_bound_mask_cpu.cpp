// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "diffulex/core/acceptance.h"
#include "ops/cpu_ops.h"
#include "ops/shared/data_checks_cpu.h"
#include "ops/shared/parallel.h"

namespace diffulex::cpu {
namespace {

constexpr const char* kOp = "entropy_bound_mask";
// A segment is sorted: some microseconds each.
constexpr int64_t kSegmentGrain = 4;

Status check_segments(const EntropyBoundMaskParams& params) {
  DIFFULEX_RETURN_IF_ERROR(check_offsets(kOp, "segments", params.segments, params.entropy.size[0]));
  for (int64_t segment = 0; segment + 1 < params.segments.size[0]; ++segment) {
    const int64_t length =
        index_at(params.segments, segment + 1) - index_at(params.segments, segment);
    if (length > kMaxAcceptPositions) {
      return data_error(kOp, "segments", segment,
                        "at most " + std::to_string(kMaxAcceptPositions) + " rows per segment",
                        length);
    }
  }
  return {};
}

void mask_segment(const EntropyBoundMaskParams& params, int64_t begin, int64_t end) {
  uint8_t* mask = params.mask.as<uint8_t>() + begin;
  if (params.bound < 0.0F) {
    std::fill_n(mask, end - begin, uint8_t{1});
    return;
  }
  mark_within_entropy_bound(params.entropy.as<const float>() + begin,
                            static_cast<int32_t>(end - begin), params.bound, mask);
}

}  // namespace

Status entropy_bound_mask(const EntropyBoundMaskParams& params, const ExecContext& context) {
  DIFFULEX_RETURN_IF_ERROR(check_segments(params));
  const int64_t num_segments = params.segments.size[0] - 1;
  parallel_ranges(context, num_segments, kSegmentGrain, [&](int64_t begin, int64_t end) {
    for (int64_t segment = begin; segment < end; ++segment) {
      mask_segment(params, index_at(params.segments, segment),
                   index_at(params.segments, segment + 1));
    }
  });
  return {};
}

}  // namespace diffulex::cpu
