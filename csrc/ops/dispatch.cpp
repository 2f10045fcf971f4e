// SPDX-License-Identifier: Apache-2.0

// Every public op: shape checks, early return for empty inputs, then the implementation of the
// device. No exception leaves this file.

#include <exception>

#include "ops/attention/check.h"
#include "ops/checks.h"
#include "ops/cpu_ops.h"
#include "ops/cuda_ops.h"
#include "ops/quant/expert_tiles.h"
#include "ops/shared/tensor_checks.h"

namespace diffulex {
namespace {

/// Implementations of one op.
template <typename Params>
struct Implementations {
  const char* op;
  Status (*check)(const Params&);
  bool (*empty)(const Params&);
  Status (*cpu)(const Params&, const ExecContext&);
  Status (*cuda)(const Params&, const ExecContext&);
  size_t (*workspace_bytes)(const Params&, Device);
};

template <typename Params>
size_t no_workspace(const Params& /*params*/, Device /*device*/) {
  return 0;
}

template <typename Params>
Status dispatch(const Implementations<Params>& op, const Params& params,
                const ExecContext& context) {
  try {
    DIFFULEX_RETURN_IF_ERROR(op.check(params));
    if (op.empty(params)) {
      return {};
    }
    DIFFULEX_RETURN_IF_ERROR(
        check_workspace(op.op, context, op.workspace_bytes(params, context.device)));
    return context.device == Device::kCuda ? op.cuda(params, context) : op.cpu(params, context);
  } catch (const std::bad_alloc&) {
    return make_error(StatusCode::kOutOfMemory, "diffulex::", op.op,
                      ": host memory: expected enough for scratch, got an allocation failure");
  } catch (const std::exception& error) {
    return make_error(StatusCode::kInternal, "diffulex::", op.op, ": ", error.what());
  }
}

size_t attention_scratch(const BlockAttentionParams& params, Device device) {
  return attention_workspace_bytes(attention_shape(params), device);
}

size_t soft_embedding_scratch(const SoftEmbeddingParams& params, Device device) {
  return soft_embedding_workspace_bytes(params.out.size[0], params.logits.size[1],
                                        params.out.size[1], params.embedding.dtype, device);
}

size_t token_stats_scratch(const TokenStatsParams& params, Device device) {
  const int32_t top_k =
      params.topk_ids.present() ? static_cast<int32_t>(params.topk_ids.size[1]) : 0;
  return token_stats_workspace_bytes(params.ids.size[0], params.logits.size[1], top_k, device);
}

size_t fused_moe_workspace(const FusedMoeParams& params, Device device) {
  return fused_moe_workspace_bytes({params.x.size[0], static_cast<int32_t>(params.topk_ids.size[1]),
                                    static_cast<int32_t>(params.w13.size[0]), params.x.size[1],
                                    in_shape_of_rows(params).w13.size[1] / 2, params.x.dtype,
                                    params.w13_scale.present() && params.w13.dtype != DType::kU8},
                                   device);
}

size_t packed_workspace(const FusedExpertsPackedParams& params, Device device) {
  const int64_t num_rows = params.x.numel() / params.x.last();
  return fused_experts_packed_workspace_bytes(num_rows, static_cast<int32_t>(params.w13.size[0]),
                                              params.w2.size[2], params.x.dtype, device);
}

Status not_on_cuda(const char* op) {
  return make_error(StatusCode::kUnsupported, "diffulex::", op,
                    ": x: expected a CPU tensor, got cuda");
}

Status not_on_cpu(const char* op) {
  return make_error(StatusCode::kUnsupported, "diffulex::", op,
                    ": x: expected a CUDA tensor, got cpu");
}

}  // namespace

#define DIFFULEX_DISPATCH(name, Params, is_empty, workspace_bytes, on_cpu, on_cuda)         \
  Status name(const Params& params, const ExecContext& context) {                           \
    return dispatch<Params>(                                                                \
        {#name, check_##name, []([[maybe_unused]] const Params& args) { return is_empty; }, \
         on_cpu, on_cuda, workspace_bytes},                                                 \
        params, context);                                                                   \
  }
#define DIFFULEX_OP(name, Params, is_empty, workspace_bytes) \
  DIFFULEX_DISPATCH(name, Params, is_empty, workspace_bytes, cpu::name, cuda::name)
#define DIFFULEX_CPU_OP(name, Params, is_empty, workspace_bytes)        \
  DIFFULEX_DISPATCH(name, Params, is_empty, workspace_bytes, cpu::name, \
                    ([](const Params&, const ExecContext&) { return not_on_cuda(#name); }))
#define DIFFULEX_CUDA_OP(name, Params, is_empty, workspace_bytes)                          \
  DIFFULEX_DISPATCH(name, Params, is_empty, workspace_bytes,                               \
                    ([](const Params&, const ExecContext&) { return not_on_cpu(#name); }), \
                    cuda::name)
#include "ops/ops.def"

}  // namespace diffulex
