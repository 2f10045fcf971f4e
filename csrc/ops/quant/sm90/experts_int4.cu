// SPDX-License-Identifier: Apache-2.0
//
// The Hopper products of experts of 4 bits in tiles.
#include "ops/moe/sm90/launch.cuh"

namespace diffulex::cuda::sm90 {
namespace {

template <int kScaleRows, bool kGateUp>
struct OfScales final {
  template <int kTile>
  using Of = MoeTiledTraits<kScaleRows, kGateUp>;
  using Kind = MoeKind<Of, kMoeTiledTile>;
};

template <bool kGateUp>
Status launch_kind(const ExpertGemm& gemm, const ExecContext& context) {
  switch (kNibbleStageDepth / gemm.nibbles.group) {
    case 1:
      return OfScales<1, kGateUp>::Kind::launch(gemm, context);
    case 2:
      return OfScales<2, kGateUp>::Kind::launch(gemm, context);
    case 4:
      return OfScales<4, kGateUp>::Kind::launch(gemm, context);
    default:
      return make_error(StatusCode::kNoKernel, kMoeWhere,
                        ": w13_scale and w2_scale: expected groups of 32, 64 or 128 columns, got ",
                        gemm.nibbles.group);
  }
}

template <bool kGateUp>
Status prepare_kind(int32_t device_index) {
  DIFFULEX_RETURN_IF_ERROR((OfScales<1, kGateUp>::Kind::prepare(device_index)));
  DIFFULEX_RETURN_IF_ERROR((OfScales<2, kGateUp>::Kind::prepare(device_index)));
  return OfScales<4, kGateUp>::Kind::prepare(device_index);
}

}  // namespace

Status launch_moe_int4(const ExpertGemm& gemm, const ExecContext& context) {
  return gemm.is_gate_up ? launch_kind<true>(gemm, context) : launch_kind<false>(gemm, context);
}

Status prepare_moe_int4(int32_t device_index) {
  DIFFULEX_RETURN_IF_ERROR(prepare_kind<true>(device_index));
  return prepare_kind<false>(device_index);
}

}  // namespace diffulex::cuda::sm90
