// SPDX-License-Identifier: Apache-2.0
//
// Index validation for DIFFULEX_CHECK=1: one CTA scans a small tensor and keeps the first fault.
#include <cstdint>

#include "ops/shared/cuda/check_data.h"
#include "ops/shared/cuda/launch.cuh"
#include "ops/shared/cuda/vec.cuh"

namespace diffulex::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int64_t kNoFault = INT64_MAX;

struct Fault {
  int64_t index;  // kNoFault = none
  int64_t value;
};

struct CheckArgs {
  const void* data;
  bool is_int64;
  int64_t num_rows;
  int64_t num_cols;
  int64_t row_stride;
  int64_t col_stride;
  int64_t low;   // range: inclusive; offsets: unused
  int64_t high;  // range: exclusive; offsets: inclusive end
  bool is_offsets;
  Fault* fault;
};

__device__ bool is_faulty(const CheckArgs& args, int64_t index, int64_t value) {
  if (!args.is_offsets) {
    return value < args.low || value >= args.high;
  }
  const int64_t previous =
      index == 0 ? 0 : load_index(args.data, args.is_int64, (index - 1) * args.col_stride);
  return value < previous || (index == 0 && value != 0) || value > args.high;
}

__global__ void __launch_bounds__(kThreads) check_kernel(const __grid_constant__ CheckArgs args) {
  __shared__ unsigned long long first;
  if (threadIdx.x == 0) {
    first = static_cast<unsigned long long>(kNoFault);
  }
  __syncthreads();
  const int64_t count = args.num_rows * args.num_cols;
  for (int64_t index = threadIdx.x; index < count; index += kThreads) {
    const int64_t offset =
        index / args.num_cols * args.row_stride + index % args.num_cols * args.col_stride;
    if (is_faulty(args, index, load_index(args.data, args.is_int64, offset))) {
      atomicMin(&first, static_cast<unsigned long long>(index));
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    const int64_t index = static_cast<int64_t>(first);
    args.fault->index = index;
    args.fault->value = 0;
    if (index != kNoFault) {
      args.fault->value = load_index(
          args.data, args.is_int64,
          index / args.num_cols * args.row_stride + index % args.num_cols * args.col_stride);
    }
  }
}

Status scan(const char* where, const CheckArgs& args, Fault& fault, cudaStream_t stream) {
  check_kernel<<<1, kThreads, 0, stream>>>(args);
  DIFFULEX_RETURN_IF_ERROR(check_launch(where));
  DIFFULEX_RETURN_IF_ERROR(cuda_status(
      where, cudaMemcpyAsync(&fault, args.fault, sizeof(Fault), cudaMemcpyDeviceToHost, stream)));
  return cuda_status(where, cudaStreamSynchronize(stream));
}

/// The one place of this library that allocates and synchronises; see the header.
Status run_check(const char* where, CheckArgs args, Fault& fault, const ExecContext& context) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  DIFFULEX_RETURN_IF_ERROR(cuda_status(where, cudaStreamIsCapturing(stream_of(context), &capture)));
  if (capture != cudaStreamCaptureStatusNone) {
    return make_error(
        StatusCode::kUnsupported, where,
        ": stream: expected none under capture with DIFFULEX_CHECK=1, which waits for "
        "the device (turn CUDA graphs off: enforce_eager=True), got a capturing one");
  }
  void* device_fault = nullptr;
  DIFFULEX_RETURN_IF_ERROR(cuda_status(where, cudaMalloc(&device_fault, sizeof(Fault))));
  args.fault = static_cast<Fault*>(device_fault);
  const Status scanned = scan(where, args, fault, stream_of(context));
  const Status freed = cuda_status(where, cudaFree(device_fault));
  return scanned.ok() ? freed : scanned;
}

CheckArgs args_of(const TensorRef& tensor) {
  CheckArgs args{};
  args.data = tensor.data;
  args.is_int64 = tensor.dtype == DType::kI64;
  args.num_rows = tensor.rank == 2 ? tensor.size[0] : 1;
  args.num_cols = tensor.last();
  args.row_stride = tensor.rank == 2 ? tensor.stride[0] : 0;
  args.col_stride = tensor.rank > 0 ? tensor.stride[tensor.rank - 1] : 1;
  return args;
}

}  // namespace

Status check_range(const char* where, const char* argument, const TensorRef& tensor, int64_t low,
                   int64_t high, const ExecContext& context) {
  if (!context.check_data || !tensor.present() || tensor.numel() == 0) {
    return Status::ok_status();
  }
  CheckArgs args = args_of(tensor);
  args.low = low;
  args.high = high;
  Fault fault{};
  DIFFULEX_RETURN_IF_ERROR(run_check(where, args, fault, context));
  if (fault.index == kNoFault) {
    return Status::ok_status();
  }
  if (low == INT64_MIN) {
    return make_error(StatusCode::kOutOfRange, where, ": ", argument, ": expected values below ",
                      high, ", got ", fault.value, " at index ", fault.index);
  }
  return make_error(StatusCode::kOutOfRange, where, ": ", argument, ": expected values in [", low,
                    ", ", high, "), got ", fault.value, " at index ", fault.index);
}

Status check_offsets(const char* where, const char* argument, const TensorRef& tensor,
                     int64_t limit, const ExecContext& context) {
  if (!context.check_data || !tensor.present() || tensor.numel() == 0) {
    return Status::ok_status();
  }
  CheckArgs args = args_of(tensor);
  args.is_offsets = true;
  args.high = limit;
  Fault fault{};
  DIFFULEX_RETURN_IF_ERROR(run_check(where, args, fault, context));
  if (fault.index == kNoFault) {
    return Status::ok_status();
  }
  return make_error(StatusCode::kOutOfRange, where, ": ", argument,
                    ": expected non-decreasing offsets from 0 to at most ", limit, ", got ",
                    fault.value, " at index ", fault.index);
}

}  // namespace diffulex::cuda
