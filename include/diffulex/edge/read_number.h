// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <charconv>
#include <cmath>
#include <locale>
#include <sstream>
#include <string>
#include <system_error>
#include <type_traits>

namespace diffulex {

/// Whether the whole text is a number of the type, finite and in its range; with a point, whatever
/// the locale of the process.
template <typename T>
[[nodiscard]] bool read_number(const std::string& text, T& value) {
  if constexpr (std::is_floating_point_v<T>) {
    std::istringstream stream(text);
    stream.imbue(std::locale::classic());
    double number = 0.0;
    const bool is_number = static_cast<bool>(stream >> number);
    value = static_cast<T>(number);
    return is_number && stream.peek() == std::istringstream::traits_type::eof() &&
           std::isfinite(value);
  } else {
    const char* last = text.data() + text.size();
    const auto [end, error] = std::from_chars(text.data(), last, value);
    return error == std::errc() && end == last;
  }
}

}  // namespace diffulex
