// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace diffulex::test {

/// A parsed JSON value; enough for the golden files (no escapes but \n, \" and \\). Reading a value
/// as the wrong type, or a missing key, throws: a trace that is misread must not pass.
class Json {
 public:
  enum class Kind { kNull, kBool, kNumber, kString, kArray, kObject };

  [[nodiscard]] static Json load(const std::string& path) {
    std::ifstream file(path);
    if (!file) {
      throw std::runtime_error("cannot open " + path);
    }
    std::stringstream text;
    text << file.rdbuf();
    const std::string content = text.str();
    size_t at = 0;
    Json value = parse(content, at);
    skip_space(content, at);
    if (at != content.size()) {
      throw std::runtime_error("trailing text in " + path);
    }
    return value;
  }

  [[nodiscard]] bool is_null() const { return kind_ == Kind::kNull; }
  [[nodiscard]] bool is_string() const { return kind_ == Kind::kString; }
  [[nodiscard]] bool as_bool() const { return require(Kind::kBool).number_ != 0.0; }
  [[nodiscard]] double as_double() const { return require(Kind::kNumber).number_; }
  [[nodiscard]] int32_t as_int() const { return static_cast<int32_t>(as_double()); }
  [[nodiscard]] const std::string& as_string() const { return require(Kind::kString).text_; }
  [[nodiscard]] const std::vector<Json>& items() const { return require(Kind::kArray).items_; }
  [[nodiscard]] const std::vector<std::pair<std::string, Json>>& members() const {
    return require(Kind::kObject).members_;
  }
  [[nodiscard]] bool has(const std::string& key) const { return find(key) != nullptr; }
  [[nodiscard]] const Json& at(const std::string& key) const {
    const Json* found = find(key);
    if (found == nullptr) {
      throw std::runtime_error("missing key " + key);
    }
    return *found;
  }
  [[nodiscard]] std::vector<int32_t> as_ints() const {
    std::vector<int32_t> values;
    for (const Json& item : items()) {
      values.push_back(item.as_int());
    }
    return values;
  }

 private:
  [[nodiscard]] const Json& require(Kind kind) const {
    if (kind_ != kind) {
      throw std::runtime_error("JSON value of another type");
    }
    return *this;
  }
  [[nodiscard]] const Json* find(const std::string& key) const {
    for (const auto& member : require(Kind::kObject).members_) {
      if (member.first == key) {
        return &member.second;
      }
    }
    return nullptr;
  }
  static void skip_space(const std::string& text, size_t& at) {
    while (at < text.size() && std::string(" \n\r\t").find(text[at]) != std::string::npos) {
      ++at;
    }
  }
  static bool accept(const std::string& text, size_t& at, const std::string& word) {
    skip_space(text, at);
    if (text.compare(at, word.size(), word) != 0) {
      return false;
    }
    at += word.size();
    return true;
  }
  static void expect(const std::string& text, size_t& at, const std::string& word) {
    if (!accept(text, at, word)) {
      throw std::runtime_error("expected " + word + " at offset " + std::to_string(at));
    }
  }
  static std::string parse_string(const std::string& text, size_t& at) {
    expect(text, at, "\"");
    std::string value;
    for (; at < text.size() && text[at] != '"'; ++at) {
      const bool is_escape = text[at] == '\\' && at + 1 < text.size();
      const char letter = text[is_escape ? ++at : at];
      if (is_escape && std::string("n\"\\").find(letter) == std::string::npos) {
        throw std::runtime_error("unknown escape in a string");
      }
      value += is_escape && letter == 'n' ? '\n' : letter;
    }
    expect(text, at, "\"");
    return value;
  }
  static Json parse(const std::string& text, size_t& at) {
    Json value;
    skip_space(text, at);
    if (accept(text, at, "{")) {
      value.kind_ = Kind::kObject;
      while (!accept(text, at, "}")) {
        std::string key = parse_string(text, at);
        expect(text, at, ":");
        value.members_.emplace_back(std::move(key), parse(text, at));
        accept(text, at, ",");
      }
    } else if (accept(text, at, "[")) {
      value.kind_ = Kind::kArray;
      while (!accept(text, at, "]")) {
        value.items_.push_back(parse(text, at));
        accept(text, at, ",");
      }
    } else if (text[at] == '"') {
      value.kind_ = Kind::kString;
      value.text_ = parse_string(text, at);
    } else if (accept(text, at, "null")) {
      value.kind_ = Kind::kNull;
    } else if (accept(text, at, "true")) {
      value.kind_ = Kind::kBool;
      value.number_ = 1.0;
    } else if (accept(text, at, "false")) {
      value.kind_ = Kind::kBool;
    } else {
      value.kind_ = Kind::kNumber;
      char* end = nullptr;
      value.number_ = std::strtod(text.c_str() + at, &end);
      if (end == text.c_str() + at) {
        throw std::runtime_error("expected a value at offset " + std::to_string(at));
      }
      at = static_cast<size_t>(end - text.c_str());
    }
    return value;
  }

  Kind kind_ = Kind::kNull;
  double number_ = 0.0;
  std::string text_;
  std::vector<Json> items_;
  std::vector<std::pair<std::string, Json>> members_;
};

}  // namespace diffulex::test
