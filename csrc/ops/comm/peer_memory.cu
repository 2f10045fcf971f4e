// SPDX-License-Identifier: Apache-2.0
//
// Device memory that the processes of one host share. Plain allocations of the runtime: no caching
// allocator, no virtual memory management, no multicast.
#include <cstring>

#include "ops/comm/peer.cuh"
#include "ops/shared/cuda/launch.cuh"

namespace diffulex {
namespace {

using cuda::cuda_status;

static_assert(sizeof(PeerHandle) == sizeof(cudaIpcMemHandle_t));

__global__ void fill_words(uint4* words, int64_t count, uint32_t pattern) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += step) {
    words[i] = {pattern, pattern, pattern, pattern};
  }
}

/// Makes a device current; the context of a call on it.
ExecContext on_device(int32_t device) {
  ExecContext context;
  context.device = Device::kCuda;
  context.device_index = device;
  return context;
}

cudaError_t fill(void* memory, int64_t epochs_bytes, int64_t gather_bytes) {
  constexpr int kThreads = 512;
  constexpr int kBlocks = 256;
  fill_words<<<kBlocks, kThreads>>>(static_cast<uint4*>(memory),
                                    epochs_bytes / static_cast<int64_t>(sizeof(uint4)),
                                    cuda::kUnwritten);
  cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) {
    error =
        cudaMemset(static_cast<char*>(memory) + epochs_bytes, 0, static_cast<size_t>(gather_bytes));
  }
  return error == cudaSuccess ? cudaDeviceSynchronize() : error;
}

}  // namespace

Status peer_alloc(int32_t device, int64_t epoch_bytes, int64_t gather_bytes, void** memory) {
  constexpr const char* kWhere = "diffulex::peer_alloc";
  if (epoch_bytes < 0 || epoch_bytes % 16 != 0 || gather_bytes < 0) {
    return make_error(StatusCode::kInvalidArgument, kWhere,
                      ": expected bytes in multiples of 16, got ", epoch_bytes);
  }
  const cuda::DeviceGuard guard(on_device(device));
  DIFFULEX_RETURN_IF_ERROR(guard.status(kWhere));
  const int64_t epochs_bytes = kNumEpochs * epoch_bytes;
  DIFFULEX_RETURN_IF_ERROR(
      cuda_status(kWhere, cudaMalloc(memory, static_cast<size_t>(epochs_bytes + gather_bytes))));
  const Status status = cuda_status(kWhere, fill(*memory, epochs_bytes, gather_bytes));
  if (!status.ok()) {
    cudaFree(*memory);
    *memory = nullptr;
  }
  return status;
}

Status peer_free(int32_t device, void* memory) {
  constexpr const char* kWhere = "diffulex::peer_free";
  const cuda::DeviceGuard guard(on_device(device));
  DIFFULEX_RETURN_IF_ERROR(guard.status(kWhere));
  return cuda_status(kWhere, cudaFree(memory));
}

Status peer_export(int32_t device, void* memory, PeerHandle* handle) {
  constexpr const char* kWhere = "diffulex::peer_export";
  const cuda::DeviceGuard guard(on_device(device));
  DIFFULEX_RETURN_IF_ERROR(guard.status(kWhere));
  cudaIpcMemHandle_t raw;
  DIFFULEX_RETURN_IF_ERROR(cuda_status(kWhere, cudaIpcGetMemHandle(&raw, memory)));
  std::memcpy(handle->bytes, &raw, sizeof(raw));
  return {};
}

Status peer_open(int32_t device, const PeerHandle& handle, void** memory) {
  constexpr const char* kWhere = "diffulex::peer_open";
  // On the own device: on the other one it would make a context there, of half a gigabyte.
  const cuda::DeviceGuard guard(on_device(device));
  DIFFULEX_RETURN_IF_ERROR(guard.status(kWhere));
  cudaIpcMemHandle_t raw;
  std::memcpy(&raw, handle.bytes, sizeof(raw));
  return cuda_status(kWhere, cudaIpcOpenMemHandle(memory, raw, cudaIpcMemLazyEnablePeerAccess));
}

Status peer_close(int32_t device, void* memory) {
  constexpr const char* kWhere = "diffulex::peer_close";
  const cuda::DeviceGuard guard(on_device(device));
  DIFFULEX_RETURN_IF_ERROR(guard.status(kWhere));
  return cuda_status(kWhere, cudaIpcCloseMemHandle(memory));
}

}  // namespace diffulex
