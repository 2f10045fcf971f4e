// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace diffulex {

/// Element types a kernel can meet.
enum class DType : int32_t { kF32, kF16, kBF16, kF8E4M3, kI8, kU8, kI32, kI64, kF64 };

/// Where a tensor lives.
enum class Device : int32_t { kCpu, kCuda };

/// Bytes per element.
[[nodiscard]] constexpr int64_t dtype_bytes(DType dtype) noexcept {
  switch (dtype) {
    case DType::kF64:
    case DType::kI64:
      return 8;
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kF16:
    case DType::kBF16:
      return 2;
    case DType::kF8E4M3:
    case DType::kI8:
    case DType::kU8:
      return 1;
  }
  return 0;
}

/// Name as torch writes it, e.g. "bfloat16".
[[nodiscard]] constexpr const char* to_string(DType dtype) noexcept {
  switch (dtype) {
    case DType::kF32:
      return "float32";
    case DType::kF16:
      return "float16";
    case DType::kBF16:
      return "bfloat16";
    case DType::kF8E4M3:
      return "float8_e4m3fn";
    case DType::kI8:
      return "int8";
    case DType::kU8:
      return "uint8";
    case DType::kI32:
      return "int32";
    case DType::kI64:
      return "int64";
    case DType::kF64:
      return "float64";
  }
  return "unknown";
}

}  // namespace diffulex
