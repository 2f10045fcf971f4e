// SPDX-License-Identifier: Apache-2.0
//
// Tensor maps are encoded by the driver, whose entry point is looked up at run time: libraries that
// link libcuda do not load on machines without a driver.
#include "ops/shared/cuda/tensor_map.h"

#include <cuda_runtime.h>

#include "diffulex/ops/tensor_ref.h"

namespace diffulex::cuda::sm90 {
namespace {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

EncodeTiled find_encoder() {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult result{};
  constexpr unsigned kFirstVersion = 12000;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(
      "cuTensorMapEncodeTiled", &entry, kFirstVersion, cudaEnableDefault, &result);
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) {
    cudaGetLastError();  // the caller reports it
    return nullptr;
  }
  return reinterpret_cast<EncodeTiled>(entry);
}

CUtensorMapDataType data_type(DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case DType::kF16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case DType::kF8E4M3:
      return CU_TENSOR_MAP_DATA_TYPE_UINT8;
    default:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  }
}

}  // namespace

Status encode_tensor_map(const char* where, const TensorMapShape& shape, DType dtype,
                         CUtensorMap* map) {
  static const EncodeTiled encode = find_encoder();
  if (encode == nullptr) {
    return make_error(StatusCode::kCudaError, where,
                      ": expected a driver with cuTensorMapEncodeTiled (12.0), got none");
  }
  cuuint64_t sizes[TensorMapShape::kMaxRank];
  cuuint64_t strides[TensorMapShape::kMaxRank];
  cuuint32_t box[TensorMapShape::kMaxRank];
  cuuint32_t steps[TensorMapShape::kMaxRank];
  for (int dim = 0; dim < shape.rank; ++dim) {
    sizes[dim] = static_cast<cuuint64_t>(shape.size[dim]);
    box[dim] = static_cast<cuuint32_t>(shape.box[dim]);
    steps[dim] = 1;
    if (dim > 0) {
      strides[dim - 1] = static_cast<cuuint64_t>(shape.stride[dim] * dtype_bytes(dtype));
    }
  }
  constexpr int64_t kSwizzledBytes = 128;
  const bool is_swizzled = shape.box[0] * dtype_bytes(dtype) == kSwizzledBytes;
  const CUresult result = encode(
      map, data_type(dtype), static_cast<cuuint32_t>(shape.rank), const_cast<void*>(shape.data),
      sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      is_swizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return make_error(StatusCode::kCudaError, where,
                      ": expected a tensor the copy engine can address, got driver error ",
                      static_cast<int>(result));
  }
  return Status::ok_status();
}

}  // namespace diffulex::cuda::sm90
