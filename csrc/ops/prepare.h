// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "diffulex/core/status.h"
#include "diffulex/ops/exec_context.h"

namespace diffulex::cuda {

/// One function per file of kernels: loads its code on the current device and sets its attributes,
/// so that a stream capture meets neither. Called by warmup().
[[nodiscard]] Status prepare_accept_dmax();
[[nodiscard]] Status prepare_accept_edit();
[[nodiscard]] Status prepare_accept_gemma();
[[nodiscard]] Status prepare_accept_mask_fill();
[[nodiscard]] Status prepare_activation();
[[nodiscard]] Status prepare_advance_decode();
[[nodiscard]] Status prepare_attention_kernels(const ExecContext& context);
[[nodiscard]] Status prepare_entropy_bound_mask();
[[nodiscard]] Status prepare_fused_moe(const ExecContext& context);
[[nodiscard]] Status prepare_kv_cache();
[[nodiscard]] Status prepare_linear_few_rows(const ExecContext& context);
[[nodiscard]] Status prepare_merge_token_stats();
[[nodiscard]] Status prepare_moe_combine();
[[nodiscard]] Status prepare_moe_permute();
[[nodiscard]] Status prepare_norm();
[[nodiscard]] Status prepare_rope();
[[nodiscard]] Status prepare_router_gemm();
[[nodiscard]] Status prepare_routing();
[[nodiscard]] Status prepare_sample_filtered();
[[nodiscard]] Status prepare_soft_embedding();
[[nodiscard]] Status prepare_token_merge();
[[nodiscard]] Status prepare_token_stats();

}  // namespace diffulex::cuda
