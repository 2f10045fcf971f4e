// SPDX-License-Identifier: Apache-2.0
#include "ops/moe/sm90/launch.cuh"

namespace diffulex::cuda::sm90 {
namespace {

template <int kTile>
using GateUp = MoeScaledTraits<kTile, true>;
template <int kTile>
using Down = MoeScaledTraits<kTile, false>;
template <template <int> typename TraitsOf>
using Kind = MoeKind<TraitsOf, 16, 32, 64, 96, kMoeMaxScaledTile>;

}  // namespace

Status launch_moe_e4m3(const ExpertGemm& gemm, const ExecContext& context) {
  return gemm.is_gate_up ? Kind<GateUp>::launch(gemm, context) : Kind<Down>::launch(gemm, context);
}

Status prepare_moe_e4m3(int32_t device_index) {
  DIFFULEX_RETURN_IF_ERROR(Kind<GateUp>::prepare(device_index));
  return Kind<Down>::prepare(device_index);
}

}  // namespace diffulex::cuda::sm90
