// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "ops/cpu_ops.h"
#include "ops/moe/routes_cpu.h"
#include "ops/shared/cpu_isa/kernel_table.h"
#include "ops/shared/parallel.h"

namespace diffulex::cpu {
namespace {

struct CombineSum;
struct CombineTerm;

/// `hidden` elements of `tensor` from `offset` on as floats.
const float* floats_of(const TensorRef& tensor, int64_t offset, int64_t hidden, float* wide) {
  const void* source = element_at(tensor, offset);
  if (tensor.dtype == DType::kF32) {
    return static_cast<const float*>(source);
  }
  kernel_table().load(GatherArgs{source, tensor.dtype, hidden, hidden, hidden}, wide);
  return wide;
}

void combine_token(const CombineArgs& args, int64_t token) {
  const KernelTable& kernels = kernel_table();
  const int64_t hidden = args.out.size[1];
  float* sum = thread_floats<CombineSum>(hidden);
  float* wide = thread_floats<CombineTerm>(hidden);
  std::fill_n(sum, hidden, 0.0F);
  for (int64_t k = 0; k < args.top_k; ++k) {
    const int64_t slot = token * args.top_k + k;
    if (args.routes.local(slot) < 0) {
      continue;
    }
    const float weight = args.weights == nullptr
                             ? 1.0F
                             : args.weights->as<const float>()[token * args.weights->stride[0] + k];
    kernels.add_scaled(sum, floats_of(args.slot_out, slot * args.slot_out.stride[0], hidden, wide),
                       weight, hidden);
  }
  if (args.addend.present()) {
    kernels.add_scaled(sum, floats_of(args.addend, token * args.addend.stride[0], hidden, wide),
                       1.0F, hidden);
  }
  kernels.store(sum, args.out.dtype, element_at(args.out, token * args.out.stride[0]), hidden);
}

}  // namespace

void combine_slots(const CombineArgs& args, const ExecContext& context) {
  const int64_t elements = args.out.size[1] * (args.top_k + 1);
  parallel_ranges(context, args.out.size[0], row_grain(elements), [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      combine_token(args, token);
    }
  });
}

Status moe_combine(const MoeCombineParams& params, const ExecContext& context) {
  const TensorRef no_map;
  const MoeRoutes routes(params.topk_ids, no_map, 0);  // any non-negative id counts
  combine_slots(CombineArgs{routes, params.slot_out, &params.topk_weights, params.addend,
                            params.out, params.topk_ids.size[1]},
                context);
  return {};
}

}  // namespace diffulex::cpu
