// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu_ops.h"
#include "ops/quant/code_rows.h"
#include "ops/shared/cpu_isa/kernel_table.h"
#include "ops/shared/parallel.h"

namespace diffulex::cpu {

Status act_and_mul(const ActAndMulParams& params, const ExecContext& context) {
  const KernelTable& kernels = kernel_table();
  const int64_t width = params.out.last();
  parallel_ranges(context, num_rows(params.x), row_grain(width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t offset = row_offset(params.x, row);
      kernels.act_row(ActRowArgs{element_at(params.x, offset), element_at(params.x, offset + width),
                                 element_at(params.out, row_offset(params.out, row)), width,
                                 params.x.dtype, params.act});
    }
  });
  return params.codes.present()
             ? cpu::quantize_rows(code_rows_of(params.out, params.codes, params.scale), context)
             : Status{};
}

}  // namespace diffulex::cpu
