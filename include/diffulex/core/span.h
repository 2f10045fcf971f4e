// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <type_traits>
#include <vector>

namespace diffulex {

/// Borrowed contiguous sequence; does not own. Valid as long as the memory it was made from.
template <typename T>
class Span final {
 public:
  constexpr Span() noexcept = default;
  constexpr Span(T* data, size_t size) noexcept : data_(data), size_(size) {}
  // NOLINTNEXTLINE(google-explicit-constructor): a vector reads as a span of its elements
  Span(std::vector<std::remove_const_t<T>>& values) noexcept
      : data_(values.data()), size_(values.size()) {}
  template <typename U = T, typename = std::enable_if_t<std::is_const_v<U>>>
  // NOLINTNEXTLINE(google-explicit-constructor): a const vector reads as a span of const elements
  Span(const std::vector<std::remove_const_t<T>>& values) noexcept
      : data_(values.data()), size_(values.size()) {}
  template <typename U, typename = std::enable_if_t<std::is_same_v<const U, T>>>
  // NOLINTNEXTLINE(google-explicit-constructor): adding const is safe
  constexpr Span(Span<U> other) noexcept : data_(other.data()), size_(other.size()) {}

  [[nodiscard]] constexpr T* data() const noexcept { return data_; }
  [[nodiscard]] constexpr size_t size() const noexcept { return size_; }
  [[nodiscard]] constexpr bool empty() const noexcept { return size_ == 0; }
  [[nodiscard]] constexpr T& operator[](size_t index) const noexcept { return data_[index]; }
  [[nodiscard]] constexpr T* begin() const noexcept { return data_; }
  [[nodiscard]] constexpr T* end() const noexcept { return data_ + size_; }
  /// Elements [offset, offset + count); the caller guarantees the range lies inside.
  [[nodiscard]] constexpr Span subspan(size_t offset, size_t count) const noexcept {
    return Span(data_ + offset, count);
  }

 private:
  T* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace diffulex
