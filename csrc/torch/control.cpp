// SPDX-License-Identifier: Apache-2.0
//
// Controls that are not ops: how the ops of this thread run, and the preparation of a device.
#include <cstring>

#include <torch/csrc/stable/library.h>

#include "diffulex/ops/comm.h"
#include "diffulex/ops/warmup.h"
#include "torch/checks.h"
#include "torch/stream.h"

namespace diffulex::torch_ops {
namespace {

/// Sets whether ops of this thread may read weights ahead and returns what was set before.
bool settle_weights(bool settled) {
  return exchange_weights_settled(settled);
}

/// Sets whether results of ops of this thread may not depend on other requests, and returns what
/// was set before.
bool make_batch_invariant(bool invariant) {
  return exchange_batch_invariant(invariant);
}

/// Loads every kernel on a CUDA device.
void warm_kernels(int64_t device_index) {
  const OpDevice device{Device::kCuda, static_cast<int32_t>(device_index)};
  const DeviceScope scope("warm_kernels", device);
  raise_if_error(warmup(scope.context()));
}

// Memory that the ranks of a host share. Addresses are integers: the memory is no tensor.

int64_t peer_alloc(int64_t device, int64_t epoch_bytes, int64_t gather_bytes) {
  void* memory = nullptr;
  raise_if_error(
      diffulex::peer_alloc(static_cast<int32_t>(device), epoch_bytes, gather_bytes, &memory));
  return reinterpret_cast<int64_t>(memory);
}

void peer_free(int64_t device, int64_t address) {
  raise_if_error(
      diffulex::peer_free(static_cast<int32_t>(device), reinterpret_cast<void*>(address)));
}

/// The bytes of a handle in a CPU tensor.
unsigned char* handle_bytes(const char* function, const Tensor& handle) {
  if (!handle.is_cpu() || !handle.is_contiguous() || handle.numel() != sizeof(PeerHandle) ||
      handle.element_size() != 1) {
    raise_error(detail::concat("diffulex::", function, ": handle: expected 64 bytes on cpu"));
  }
  return static_cast<unsigned char*>(handle.data_ptr());
}

void peer_export(int64_t device, int64_t address, const Tensor& handle) {
  unsigned char* bytes = handle_bytes("peer_export", handle);
  PeerHandle exported;
  raise_if_error(diffulex::peer_export(static_cast<int32_t>(device),
                                       reinterpret_cast<void*>(address), &exported));
  std::memcpy(bytes, exported.bytes, sizeof(exported.bytes));
}

int64_t peer_open(int64_t device, const Tensor& handle) {
  PeerHandle other;
  std::memcpy(other.bytes, handle_bytes("peer_open", handle), sizeof(other.bytes));
  void* memory = nullptr;
  raise_if_error(diffulex::peer_open(static_cast<int32_t>(device), other, &memory));
  return reinterpret_cast<int64_t>(memory);
}

void peer_close(int64_t device, int64_t address) {
  raise_if_error(
      diffulex::peer_close(static_cast<int32_t>(device), reinterpret_cast<void*>(address)));
}

}  // namespace
}  // namespace diffulex::torch_ops

STABLE_TORCH_LIBRARY(diffulex_control, library) {
  library.def("make_batch_invariant(bool invariant) -> bool");
  library.def("peer_alloc(int device, int epoch_bytes, int gather_bytes) -> int");
  library.def("peer_close(int device, int address) -> ()");
  library.def("peer_export(int device, int address, Tensor(a!) handle) -> ()");
  library.def("peer_free(int device, int address) -> ()");
  library.def("peer_open(int device, Tensor handle) -> int");
  library.def("settle_weights(bool settled) -> bool");
  library.def("warm_kernels(int device_index) -> ()");
}

// No tensor decides where they run: none of them has one on a device.
STABLE_TORCH_LIBRARY_IMPL(diffulex_control, CompositeExplicitAutograd, library) {
  library.impl("make_batch_invariant", TORCH_BOX(&diffulex::torch_ops::make_batch_invariant));
  library.impl("peer_alloc", TORCH_BOX(&diffulex::torch_ops::peer_alloc));
  library.impl("peer_close", TORCH_BOX(&diffulex::torch_ops::peer_close));
  library.impl("peer_export", TORCH_BOX(&diffulex::torch_ops::peer_export));
  library.impl("peer_free", TORCH_BOX(&diffulex::torch_ops::peer_free));
  library.impl("peer_open", TORCH_BOX(&diffulex::torch_ops::peer_open));
  library.impl("settle_weights", TORCH_BOX(&diffulex::torch_ops::settle_weights));
  library.impl("warm_kernels", TORCH_BOX(&diffulex::torch_ops::warm_kernels));
}
