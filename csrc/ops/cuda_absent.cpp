// SPDX-License-Identifier: Apache-2.0
#include "ops/cuda_ops.h"

namespace diffulex::cuda {
namespace {

Status absent(const char* op) {
  return make_error(StatusCode::kNoKernel, "diffulex::", op,
                    ": device: expected a build with CUDA, got cuda tensors and a library built "
                    "without CUDA");
}

}  // namespace

#define DIFFULEX_OP(name, Params, ...)                                    \
  Status name(const Params& /*params*/, const ExecContext& /*context*/) { \
    return absent(#name);                                                 \
  }
#define DIFFULEX_CPU_OP(...)
#define DIFFULEX_SM90_OP(...)
#include "ops/ops.def"

}  // namespace diffulex::cuda
