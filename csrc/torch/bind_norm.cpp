// SPDX-License-Identifier: Apache-2.0
#include "diffulex/ops/norm.h"
#include "torch/ops.h"

namespace diffulex::torch_ops {

void rms_norm(const Tensor& x, const OptionalTensor& weight, const Tensor& out, double eps,
              double weight_offset) {
  OpArguments arguments("rms_norm");
  RmsNormParams params;
  params.x = arguments.input("x", x);
  params.weight = arguments.input("weight", weight);
  params.out = arguments.output("out", out);
  params.eps = static_cast<float>(eps);
  params.weight_offset = static_cast<float>(weight_offset);
  arguments.run(&diffulex::rms_norm, params);
}

void add_rms_norm(const Tensor& x, const Tensor& residual, const OptionalTensor& weight, double eps,
                  double weight_offset) {
  OpArguments arguments("add_rms_norm");
  RmsNormParams params;
  params.x = arguments.output("x", x);
  params.residual = arguments.output("residual", residual);
  params.weight = arguments.input("weight", weight);
  params.eps = static_cast<float>(eps);
  params.weight_offset = static_cast<float>(weight_offset);
  arguments.run(&diffulex::add_rms_norm, params);
}

void rms_norm_add(const Tensor& x, const Tensor& residual, const OptionalTensor& weight,
                  const OptionalTensor& out_scale, const Tensor& out, double eps,
                  double weight_offset) {
  OpArguments arguments("rms_norm_add");
  RmsNormParams params;
  params.x = arguments.input("x", x);
  params.residual = arguments.input("residual", residual);
  params.weight = arguments.input("weight", weight);
  params.out_scale = arguments.input("out_scale", out_scale);
  params.out = arguments.output("out", out);
  params.eps = static_cast<float>(eps);
  params.weight_offset = static_cast<float>(weight_offset);
  arguments.run(&diffulex::rms_norm_add, params);
}

}  // namespace diffulex::torch_ops
