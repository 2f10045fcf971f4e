// SPDX-License-Identifier: Apache-2.0
#include "diffulex/ops/comm.h"

namespace diffulex {
namespace {

Status absent(const char* function) {
  return make_error(StatusCode::kNoKernel, "diffulex::", function,
                    ": device: expected a build with CUDA, got a library built without CUDA");
}

}  // namespace

Status peer_alloc(int32_t /*device*/, int64_t /*epoch_bytes*/, int64_t /*gather_bytes*/,
                  void** /*memory*/) {
  return absent("peer_alloc");
}

Status peer_free(int32_t /*device*/, void* /*memory*/) {
  return absent("peer_free");
}

Status peer_export(int32_t /*device*/, void* /*memory*/, PeerHandle* /*handle*/) {
  return absent("peer_export");
}

Status peer_open(int32_t /*device*/, const PeerHandle& /*handle*/, void** /*memory*/) {
  return absent("peer_open");
}

Status peer_close(int32_t /*device*/, void* /*memory*/) {
  return absent("peer_close");
}

}  // namespace diffulex
