// SPDX-License-Identifier: Apache-2.0
#include "diffulex/ops/activation.h"
#include "torch/ops.h"

namespace diffulex::torch_ops {

void act_and_mul(const Tensor& x, const Tensor& out, int64_t act) {
  OpArguments arguments("act_and_mul");
  ActAndMulParams params;
  params.x = arguments.input("x", x);
  params.out = arguments.output("out", out);
  params.act = arguments.enumeration<Activation>("act", act);
  arguments.run(&diffulex::act_and_mul, params);
}

}  // namespace diffulex::torch_ops
