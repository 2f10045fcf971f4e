// SPDX-License-Identifier: Apache-2.0
//
// Stands in for the Hopper sampling kernels in builds without the sm_90 group.
#include "ops/sampling/sm90/sample_filtered_cluster.h"
#include "ops/sampling/sm90/token_stats_cluster.h"

namespace diffulex::cuda::sm90 {

bool has_token_stats(int64_t /*num_chunks*/, const ExecContext& /*context*/) {
  return false;
}

Status token_stats(const TokenStatsArgs& /*args*/, DType /*dtype*/,
                   const ExecContext& /*context*/) {
  return make_error(StatusCode::kNoKernel,
                    "diffulex::token_stats: expected a build for compute capability 9.0, got none");
}

Status prepare_token_stats() {
  return Status::ok_status();
}

bool has_sample_filtered(const FilterArgs& /*args*/, DType /*dtype*/,
                         const ExecContext& /*context*/) {
  return false;
}

Status sample_filtered(const FilterArgs& /*args*/, const ExecContext& /*context*/) {
  return make_error(
      StatusCode::kNoKernel,
      "diffulex::sample_filtered: expected a build for compute capability 9.0, got none");
}

Status prepare_sample_filtered() {
  return Status::ok_status();
}

}  // namespace diffulex::cuda::sm90
