// SPDX-License-Identifier: Apache-2.0
#include "ops/moe/sm90/launch.cuh"

namespace diffulex::cuda::sm90 {
namespace {

template <bool kGateUp>
Status launch_kind(const ExpertGemm& gemm, const ExecContext& context) {
  switch (gemm.tile) {
    case 16:
      return launch_moe_tile<MoeScaledTraits<16, kGateUp>>(gemm, context);
    case 32:
      return launch_moe_tile<MoeScaledTraits<32, kGateUp>>(gemm, context);
    case 64:
      return launch_moe_tile<MoeScaledTraits<64, kGateUp>>(gemm, context);
    case 96:
      return launch_moe_tile<MoeScaledTraits<96, kGateUp>>(gemm, context);
    case kMoeMaxScaledTile:
      return launch_moe_tile<MoeScaledTraits<kMoeMaxScaledTile, kGateUp>>(gemm, context);
    default:
      return make_error(StatusCode::kNoKernel, kMoeWhere,
                        ": tile: expected 16, 32, 64, 96 or 128 with codes, got ", gemm.tile);
  }
}

template <bool kGateUp>
Status prepare_kind(int32_t device_index) {
  DIFFULEX_RETURN_IF_ERROR((prepare_moe_tile<MoeScaledTraits<16, kGateUp>>(device_index)));
  DIFFULEX_RETURN_IF_ERROR((prepare_moe_tile<MoeScaledTraits<32, kGateUp>>(device_index)));
  DIFFULEX_RETURN_IF_ERROR((prepare_moe_tile<MoeScaledTraits<64, kGateUp>>(device_index)));
  DIFFULEX_RETURN_IF_ERROR((prepare_moe_tile<MoeScaledTraits<96, kGateUp>>(device_index)));
  return prepare_moe_tile<MoeScaledTraits<kMoeMaxScaledTile, kGateUp>>(device_index);
}

}  // namespace

Status launch_moe_e4m3(const ExpertGemm& gemm, const ExecContext& context) {
  return gemm.is_gate_up ? launch_kind<true>(gemm, context) : launch_kind<false>(gemm, context);
}

Status prepare_moe_e4m3(int32_t device_index) {
  DIFFULEX_RETURN_IF_ERROR(prepare_kind<true>(device_index));
  return prepare_kind<false>(device_index);
}

}  // namespace diffulex::cuda::sm90
