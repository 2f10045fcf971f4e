// SPDX-License-Identifier: Apache-2.0
// Text as a JSON string; the bytes of a model's answer need not be UTF-8.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>

namespace diffulex {

/// Bytes of the well-formed UTF-8 sequence at `begin`, 0 for none.
inline size_t utf8_length(const std::string& text, size_t begin) {
  const auto byte = [&](size_t i) {
    return begin + i < text.size() ? static_cast<uint8_t>(text[begin + i]) : uint8_t{0};
  };
  const uint8_t first = byte(0);
  if (first < 0x80) {
    return 1;
  }
  const size_t length = first < 0xC2   ? 0
                        : first < 0xE0 ? 2
                        : first < 0xF0 ? 3
                        : first < 0xF5 ? 4
                                       : 0;
  // Overlong forms, surrogates and what lies past U+10FFFF differ in the second byte.
  const uint8_t low = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
  const uint8_t high = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
  if (length == 0 || byte(1) < low || byte(1) > high) {
    return 0;
  }
  for (size_t i = 2; i < length; ++i) {
    if ((byte(i) & 0xC0) != 0x80) {
      return 0;
    }
  }
  return length;
}

/// The text in quotation marks; every byte outside a well-formed UTF-8 sequence becomes U+FFFD.
inline std::string json_string(const std::string& text) {
  std::string quoted = "\"";
  for (size_t i = 0; i < text.size();) {
    const char c = text[i];
    const size_t length = utf8_length(text, i);
    if (length == 0) {
      quoted += "\xEF\xBF\xBD";
    } else if (length == 1 && static_cast<uint8_t>(c) < 0x20) {
      std::array<char, 8> escape{};
      std::snprintf(escape.data(), escape.size(), "\\u%04x", static_cast<unsigned>(c));
      quoted += escape.data();
    } else {
      quoted += (c == '"' || c == '\\') ? "\\" : "";
      quoted += text.substr(i, length);
    }
    i += length == 0 ? 1 : length;
  }
  return quoted + "\"";
}

}  // namespace diffulex
