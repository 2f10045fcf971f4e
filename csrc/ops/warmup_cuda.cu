// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include "diffulex/ops/warmup.h"
#include "ops/cuda_ops.h"
#include "ops/prepare.h"
#include "ops/shared/cuda/launch.cuh"

namespace diffulex {
namespace cuda {

Status warmup(const ExecContext& context) {
  DeviceGuard guard(context);
  DIFFULEX_RETURN_IF_ERROR(guard.status("diffulex::warmup"));
  DIFFULEX_RETURN_IF_ERROR(prepare_attention_kernels(context));
  DIFFULEX_RETURN_IF_ERROR(prepare_kv_cache());
  DIFFULEX_RETURN_IF_ERROR(prepare_linear_few_rows(context));
  DIFFULEX_RETURN_IF_ERROR(prepare_norm());
  DIFFULEX_RETURN_IF_ERROR(prepare_rope());
  DIFFULEX_RETURN_IF_ERROR(prepare_activation());
  DIFFULEX_RETURN_IF_ERROR(prepare_advance_decode());
  DIFFULEX_RETURN_IF_ERROR(prepare_routing());
  DIFFULEX_RETURN_IF_ERROR(prepare_router_gemm());
  DIFFULEX_RETURN_IF_ERROR(prepare_moe_permute());
  DIFFULEX_RETURN_IF_ERROR(prepare_moe_combine());
  DIFFULEX_RETURN_IF_ERROR(prepare_fused_moe(context));
  DIFFULEX_RETURN_IF_ERROR(prepare_token_stats());
  DIFFULEX_RETURN_IF_ERROR(prepare_merge_token_stats());
  DIFFULEX_RETURN_IF_ERROR(prepare_token_merge());
  DIFFULEX_RETURN_IF_ERROR(prepare_soft_embedding());
  DIFFULEX_RETURN_IF_ERROR(prepare_sample_filtered());
  DIFFULEX_RETURN_IF_ERROR(prepare_entropy_bound_mask());
  DIFFULEX_RETURN_IF_ERROR(prepare_accept_dmax());
  DIFFULEX_RETURN_IF_ERROR(prepare_accept_edit());
  DIFFULEX_RETURN_IF_ERROR(prepare_accept_gemma());
  return prepare_accept_mask_fill();
}

}  // namespace cuda

Status warmup(const ExecContext& context) {
  return context.device == Device::kCuda ? cuda::warmup(context) : Status::ok_status();
}

}  // namespace diffulex
