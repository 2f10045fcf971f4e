// SPDX-License-Identifier: Apache-2.0
#include "torch/ops.h"

namespace diffulex::torch_ops {

void register_ops(torch::stable::detail::StableLibrary& library) {
  // An op for CPU tensors alone stands in both: for CUDA it explains where it runs.
#define DIFFULEX_OP(name, ...) library.impl(#name, TORCH_BOX(&name));
#include "ops/ops.def"
}

}  // namespace diffulex::torch_ops

STABLE_TORCH_LIBRARY_IMPL(diffulex, CPU, library) {
  diffulex::torch_ops::register_ops(library);
}
