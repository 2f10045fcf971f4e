// SPDX-License-Identifier: Apache-2.0
#include "torch/ops.h"

STABLE_TORCH_LIBRARY_IMPL(diffulex, CUDA, library) {
  diffulex::torch_ops::register_ops(library);
}
