// SPDX-License-Identifier: Apache-2.0
#include "diffulex/kernels/linear.h"
#include "torch/ops.h"

namespace diffulex::torch_ops {

void linear_packed(const Tensor& x, const Tensor& packed_weight, const Tensor& out,
                   int64_t out_features) {
  OpArguments arguments("linear_packed");
  LinearPackedParams params;
  params.x = arguments.input("x", x);
  params.packed_weight = arguments.input("packed_weight", packed_weight);
  params.out = arguments.output("out", out);
  params.out_features = arguments.int32("out_features", out_features);
  arguments.run(&diffulex::linear_packed, params);
}

}  // namespace diffulex::torch_ops
