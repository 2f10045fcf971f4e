// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu_ops.h"
#include "ops/quant/code_rows.h"
#include "ops/shared/cpu_isa/kernel_table.h"
#include "ops/shared/half.h"
#include "ops/shared/parallel.h"

namespace diffulex::cpu {
namespace {

struct NormTag;

float scalar_value(const TensorRef& tensor) {
  switch (tensor.dtype) {
    case DType::kBF16:
      return bf16_to_float(*tensor.as<const uint16_t>());
    case DType::kF16:
      return f16_to_float(*tensor.as<const uint16_t>());
    default:
      return *tensor.as<const float>();
  }
}

Status run(const RmsNormParams& params, const ExecContext& context, NormKind kind) {
  const KernelTable& kernels = kernel_table();
  const int64_t hidden = params.x.last();
  const TensorRef& out = kind == NormKind::kAddFirst ? params.x : params.out;
  NormRowArgs common;
  common.weight = params.weight.present() ? params.weight.data : nullptr;
  common.n = hidden;
  common.dtype = params.x.dtype;
  common.weight_dtype = params.weight.dtype;
  common.kind = kind;
  common.eps = params.eps;
  common.weight_offset = params.weight_offset;
  common.out_scale = params.out_scale.present() ? scalar_value(params.out_scale) : 1.0F;
  parallel_ranges(context, num_rows(params.x), row_grain(hidden), [&](int64_t begin, int64_t end) {
    NormRowArgs args = common;
    args.scratch = thread_floats<NormTag>(hidden + kDimPad);
    for (int64_t row = begin; row < end; ++row) {
      args.x = element_at(params.x, row_offset(params.x, row));
      args.out = element_at(out, row_offset(out, row));
      if (kind != NormKind::kPlain) {
        args.residual = element_at(params.residual, row_offset(params.residual, row));
      }
      kernels.norm_row(args);
    }
  });
  return params.codes.present()
             ? cpu::quantize_rows(code_rows_of(out, params.codes, params.scale), context)
             : Status{};
}

}  // namespace

Status rms_norm(const RmsNormParams& params, const ExecContext& context) {
  return run(params, context, NormKind::kPlain);
}

Status add_rms_norm(const RmsNormParams& params, const ExecContext& context) {
  return run(params, context, NormKind::kAddFirst);
}

Status rms_norm_add(const RmsNormParams& params, const ExecContext& context) {
  return run(params, context, NormKind::kAddAfter);
}

}  // namespace diffulex::cpu
