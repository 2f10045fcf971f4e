// SPDX-License-Identifier: Apache-2.0

// A product of e4m3 codes by CUTLASS, as a peer of `linear_scaled` in the kernel benchmark:
// D[M, N] = A[M, K] B[N, K]^T with a float32 scale for each 128 columns of a row of A and for each
// block of 128 x 128 of B. benchmarks/python/kernel_bench/cutlass_peer.py compiles this file where
// it finds the headers; the build of the product does not.

#include <cstdint>

#include <cuda_runtime.h>
#include <cute/tensor.hpp>
#include <cutlass/cutlass.h>
#include <cutlass/detail/blockwise_scale_layout.hpp>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/gemm/kernel/gemm_universal.hpp>

namespace {

using cute::_1;
using cute::_128;
using cute::_2;
using cute::_64;

using Code = cutlass::float_e4m3_t;
using Result = cutlass::bfloat16_t;

constexpr int kGroup = 128;

// Scales of A are [groups of the depth][rows], those of B [blocks of rows][groups of the depth].
using Scales = cutlass::detail::Sm90BlockwiseScaleConfig<1, kGroup, kGroup, cute::GMMA::Major::MN,
                                                         cute::GMMA::Major::K>;

struct Operands {
  const Code* a;
  const float* a_scale;
  int a_scale_stride;
  const Code* b;
  const float* b_scale;
  Result* d;
  int rows;
  int columns;
  int depth;
};

template <typename TileRows, typename Cluster, typename Mainloop, typename Epilogue>
struct Product {
  using Tile = cute::Shape<TileRows, _128, _128>;

  using CollectiveEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, void,
      cutlass::layout::RowMajor, 8, Result, cutlass::layout::RowMajor, 8, Epilogue>::CollectiveOp;

  using Stages = cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
      sizeof(typename CollectiveEpilogue::SharedStorage))>;

  using CollectiveMainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Code,
      cute::tuple<cutlass::layout::RowMajor, Scales::LayoutSFA>, 16, Code,
      cute::tuple<cutlass::layout::ColumnMajor, Scales::LayoutSFB>, 16, float, Tile, Cluster,
      Stages, Mainloop>::CollectiveOp;

  using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>,
                                                      CollectiveMainloop, CollectiveEpilogue>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

  static cutlass::Status run(const Operands& x, void* workspace, size_t workspace_bytes,
                             cudaStream_t stream) {
    const auto rows_of = [](int64_t width) { return cute::make_stride(width, _1{}, int64_t{0}); };
    // Rows of scales are padded: their layout is that of as many rows of A as a row of scales has.
    const auto a_layout =
        Scales::tile_atom_to_shape_SFA(cute::make_shape(x.a_scale_stride, x.columns, x.depth, 1));
    const auto b_layout =
        Scales::tile_atom_to_shape_SFB(cute::make_shape(x.rows, x.columns, x.depth, 1));

    typename Gemm::Arguments arguments{
        cutlass::gemm::GemmUniversalMode::kGemm,
        {x.rows, x.columns, x.depth, 1},
        {x.a, rows_of(x.depth), x.b, rows_of(x.depth), x.a_scale, a_layout, x.b_scale, b_layout},
        {{}, nullptr, rows_of(x.columns), x.d, rows_of(x.columns)},
    };
    arguments.epilogue.thread.alpha = 1.0F;
    arguments.epilogue.thread.beta = 0.0F;

    cutlass::Status status = Gemm::can_implement(arguments);
    if (status != cutlass::Status::kSuccess) {
      return status;
    }
    if (Gemm::get_workspace_size(arguments) > workspace_bytes) {
      return cutlass::Status::kErrorMemoryAllocation;
    }
    Gemm gemm;
    status = gemm.initialize(arguments, workspace, stream);
    return status == cutlass::Status::kSuccess ? gemm.run(stream) : status;
  }
};

using Cluster = cute::Shape<_1, _2, _1>;
using High = Product<_128, Cluster, cutlass::gemm::KernelTmaWarpSpecializedCooperativeFP8Blockwise,
                     cutlass::epilogue::TmaWarpSpecializedCooperative>;
using Low = Product<_64, Cluster, cutlass::gemm::KernelTmaWarpSpecializedPingpongFP8Blockwise,
                    cutlass::epilogue::TmaWarpSpecialized>;

/// Whether the current device is of the one compute capability that the kernels are compiled for.
cudaError_t check_device() {
  int device = 0;
  int major = 0;
  int minor = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  }
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  }
  if (error != cudaSuccess) {
    return error;
  }
  return major == 9 && minor == 0 ? cudaSuccess : cudaErrorNoKernelImageForDevice;
}

}  // namespace

extern "C" {

/// Tiles of `tile_rows` (64 or 128) x 128 of D. A and B are e4m3, D bfloat16, all row-major and
/// whole. Scales of A are [groups][a_scale_stride], a multiple of 4 and at least `rows`; of B
/// [blocks of rows][groups]. Returns 0, a status of CUTLASS, or minus an error of the CUDA runtime.
int cutlass_fp8_product(int tile_rows, const void* a, const float* a_scale, int a_scale_stride,
                        const void* b, const float* b_scale, void* d, int rows, int columns,
                        int depth, void* workspace, size_t workspace_bytes, cudaStream_t stream) {
  if (const cudaError_t error = check_device(); error != cudaSuccess) {
    return -static_cast<int>(error);
  }
  const bool has_tile = tile_rows == 64 || tile_rows == 128;
  if (!has_tile || rows < 1 || columns < 1 || depth < 1 || a_scale_stride < rows) {
    return static_cast<int>(cutlass::Status::kErrorInvalidProblem);
  }
  const Operands operands{static_cast<const Code*>(a),
                          a_scale,
                          a_scale_stride,
                          static_cast<const Code*>(b),
                          b_scale,
                          static_cast<Result*>(d),
                          rows,
                          columns,
                          depth};
  const auto run = tile_rows == 64 ? &Low::run : &High::run;
  return static_cast<int>(run(operands, workspace, workspace_bytes, stream));
}

/// What a result of `cutlass_fp8_product` other than 0 means.
const char* cutlass_fp8_message(int result) {
  return result < 0 ? cudaGetErrorString(static_cast<cudaError_t>(-result))
                    : cutlass::cutlassGetStatusString(static_cast<cutlass::Status>(result));
}

}  // extern "C"
