// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include <gtest/gtest.h>

#include "diffulex/ops/tensor_ref.h"

namespace diffulex::test {

/// Copy of a contiguous tensor whose last byte is the last of a mapped page.
class GuardedTensor final {
 public:
  explicit GuardedTensor(const TensorRef& source) : ref_(source) {
    int64_t elements = 1;
    for (int32_t dim = 0; dim < source.rank; ++dim) {
      elements += (source.size[dim] - 1) * source.stride[dim];
    }
    const auto bytes = static_cast<size_t>(elements * dtype_bytes(source.dtype));
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    mapped_ = (bytes + page - 1) / page * page + page;
    void* const memory =
        mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT_NE(memory, MAP_FAILED);
    memory_ = static_cast<char*>(memory);
    EXPECT_EQ(mprotect(memory_ + mapped_ - page, page, PROT_NONE), 0);
    ref_.data = memory_ + mapped_ - page - bytes;
    std::memcpy(ref_.data, source.data, bytes);
  }
  ~GuardedTensor() { munmap(memory_, mapped_); }
  GuardedTensor(const GuardedTensor&) = delete;
  GuardedTensor& operator=(const GuardedTensor&) = delete;

  [[nodiscard]] const TensorRef& ref() const { return ref_; }

 private:
  TensorRef ref_;
  char* memory_ = nullptr;  // owner: this
  size_t mapped_ = 0;
};

}  // namespace diffulex::test
