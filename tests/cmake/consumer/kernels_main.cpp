// SPDX-License-Identifier: Apache-2.0
//
// Uses diffulex::kernels: norm of a row of ones is one.
#include <cmath>
#include <cstdio>

#include "diffulex/ops/norm.h"
#include "diffulex/version.h"

namespace {

diffulex::TensorRef make_row(float* data, int64_t len) {
  diffulex::TensorRef row;
  row.data = data;
  row.dtype = diffulex::DType::kF32;
  row.rank = 2;
  row.size[0] = 1;
  row.size[1] = len;
  row.stride[0] = len;
  row.stride[1] = 1;
  return row;
}

}  // namespace

int main() {
  float x[] = {1.0F, 1.0F, 1.0F, 1.0F};
  float out[4] = {};
  diffulex::RmsNormParams params;
  params.x = make_row(x, 4);
  params.out = make_row(out, 4);
  params.eps = 0.0F;
  const diffulex::Status status = diffulex::rms_norm(params, diffulex::ExecContext());
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", status.message().c_str());
    return 1;
  }
  for (const float value : out) {
    if (std::fabs(value - 1.0F) > 1e-6F) {
      std::fprintf(stderr, "expected 1, got %g\n", static_cast<double>(value));
      return 1;
    }
  }
  std::printf("diffulex %s kernels\n", DIFFULEX_VERSION_STRING);
  return 0;
}
