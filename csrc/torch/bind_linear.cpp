// SPDX-License-Identifier: Apache-2.0
#include "diffulex/ops/linear.h"
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

void linear_few_rows(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                     const Tensor& out, int64_t act) {
  OpArguments arguments("linear_few_rows");
  LinearFewRowsParams params;
  params.x = arguments.input("x", x);
  params.weight = arguments.input("weight", weight);
  params.bias = arguments.input("bias", bias);
  params.out = arguments.output("out", out);
  if (act != -1) {
    params.act = arguments.enumeration<Activation>("act", act);
  }
  arguments.run(&diffulex::linear_few_rows, params);
}

}  // namespace diffulex::torch_ops
