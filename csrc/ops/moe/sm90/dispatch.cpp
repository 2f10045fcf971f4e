// SPDX-License-Identifier: Apache-2.0
//
// Which of the Hopper expert products exist here: all of them, or those of bfloat16, e4m3 codes and
// nibbles in the minimal profile.
#include "ops/moe/sm90/launch.h"
#include "ops/shared/cuda/hopper.h"

namespace diffulex::cuda {
namespace {

#ifdef DIFFULEX_CUDA_MINIMAL
constexpr bool kHasF16 = false;
#else
constexpr bool kHasF16 = true;
#endif

}  // namespace

bool has_moe_wgmma(DType dtype, int32_t device_index) {
  const bool has_dtype = dtype == DType::kBF16 || dtype == DType::kF8E4M3 || dtype == DType::kU8 ||
                         (kHasF16 && dtype == DType::kF16);
  return has_dtype && is_hopper_device(device_index);
}

Status launch_moe_wgmma(const ExpertGemm& gemm, DType dtype, const ExecContext& context) {
#ifndef DIFFULEX_CUDA_MINIMAL
  if (dtype == DType::kF16) {
    return sm90::launch_moe_f16(gemm, context);
  }
#endif
  if (dtype == DType::kBF16) {
    return sm90::launch_moe_bf16(gemm, context);
  }
  if (dtype == DType::kF8E4M3) {
    return sm90::launch_moe_e4m3(gemm, context);
  }
  if (dtype == DType::kU8) {
    return sm90::launch_moe_int4(gemm, context);
  }
  return make_error(
      StatusCode::kNoKernel, "diffulex::fused_moe", ": dtype: expected ",
      kHasF16 ? "float16, bfloat16, float8_e4m3fn or uint8" : "bfloat16, float8_e4m3fn or uint8",
      ", got ", to_string(dtype));
}

Status prepare_moe_wgmma(int32_t device_index) {
  if (!is_hopper_device(device_index)) {
    return Status::ok_status();
  }
  DIFFULEX_RETURN_IF_ERROR(prepare_gather_rows());
#ifndef DIFFULEX_CUDA_MINIMAL
  DIFFULEX_RETURN_IF_ERROR(sm90::prepare_moe_f16(device_index));
#endif
  DIFFULEX_RETURN_IF_ERROR(sm90::prepare_moe_e4m3(device_index));
  DIFFULEX_RETURN_IF_ERROR(sm90::prepare_moe_int4(device_index));
  return sm90::prepare_moe_bf16(device_index);
}

}  // namespace diffulex::cuda
