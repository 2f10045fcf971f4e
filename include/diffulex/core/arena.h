// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "diffulex/core/span.h"
#include "diffulex/export.h"

namespace diffulex {

/// Element type of an arena array.
enum class ArenaDtype : int32_t { kUint8 = 0, kInt32 = 1, kInt64 = 2, kFloat32 = 3, kFloat64 = 4 };

/// Name as numpy spells it, e.g. "int32". Total.
[[nodiscard]] constexpr const char* to_string(ArenaDtype dtype) noexcept {
  switch (dtype) {
    case ArenaDtype::kUint8:
      return "uint8";
    case ArenaDtype::kInt32:
      return "int32";
    case ArenaDtype::kInt64:
      return "int64";
    case ArenaDtype::kFloat32:
      return "float32";
    case ArenaDtype::kFloat64:
      return "float64";
  }
  return "unknown";
}

/// Bytes of one element.
[[nodiscard]] constexpr size_t element_bytes(ArenaDtype dtype) noexcept {
  switch (dtype) {
    case ArenaDtype::kUint8:
      return 1;
    case ArenaDtype::kInt32:
    case ArenaDtype::kFloat32:
      return 4;
    case ArenaDtype::kInt64:
    case ArenaDtype::kFloat64:
      return 8;
  }
  return 0;
}

/// Place of one array inside an arena; a mirror on a device uses the same offsets.
struct ArenaField {
  const char* name = "";
  ArenaDtype dtype = ArenaDtype::kInt32;
  size_t offset = 0;        // bytes from the start of the arena, a multiple of kArenaAlignment
  int64_t rows = 0;         // capacity of the first dimension
  int64_t cols = 1;         // second dimension; 1 for one-dimensional arrays
  bool is_matrix = false;   // two dimensions
  int64_t depth = 0;        // > 0: three dimensions, [rows, cols / depth, depth]
  const char* extent = "";  // name of the first dimension in the list of arrays

  /// Bytes at full capacity.
  [[nodiscard]] size_t bytes() const noexcept {
    return static_cast<size_t>(rows * cols) * element_bytes(dtype);
  }
};

/// Every array of an arena starts at a multiple of this.
inline constexpr size_t kArenaAlignment = 256;

/// One block of memory that several arrays share, owned or borrowed (pinned, for instance).
class DIFFULEX_API Arena final {
 public:
  /// Owns zeroed memory for `fields`.
  explicit Arena(std::vector<ArenaField> fields);
  /// Borrows `memory`, which outlives the arena, is aligned to kArenaAlignment and has at least
  /// arena_bytes(fields) bytes; zeroes it.
  Arena(std::vector<ArenaField> fields, void* memory, size_t bytes);

  /// Bytes needed by fields whose offsets were assigned by layout().
  [[nodiscard]] static size_t arena_bytes(const std::vector<ArenaField>& fields);
  /// Assigns offsets in order.
  static void layout(std::vector<ArenaField>& fields);

  [[nodiscard]] const std::vector<ArenaField>& fields() const noexcept { return fields_; }
  [[nodiscard]] void* data() noexcept { return base_; }
  [[nodiscard]] const void* data() const noexcept { return base_; }
  [[nodiscard]] size_t size() const noexcept { return bytes_; }
  /// First element of field `index`.
  template <typename T>
  [[nodiscard]] T* array(size_t index) noexcept {
    return reinterpret_cast<T*>(base_ + fields_[index].offset);
  }
  template <typename T>
  [[nodiscard]] const T* array(size_t index) const noexcept {
    return reinterpret_cast<const T*>(base_ + fields_[index].offset);
  }

 private:
  std::vector<ArenaField> fields_;
  std::unique_ptr<unsigned char[]> owned_;
  unsigned char* base_ = nullptr;  // owned_ aligned, or borrowed
  size_t bytes_ = 0;
};

}  // namespace diffulex
