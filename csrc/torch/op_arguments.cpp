// SPDX-License-Identifier: Apache-2.0
#include "torch/op_arguments.h"

namespace diffulex::torch_ops {

void SchemaText::separate() {
  if (!is_first_) {
    text_ += ", ";
  }
  is_first_ = false;
}

void SchemaText::add_tensor(const char* name, bool is_optional, Access access) {
  separate();
  text_ += "Tensor";
  if (access == Access::kWrite) {
    // Every written tensor is an alias set with a name of its own: a to z, then a1, b1 and so on.
    constexpr int kLetters = 26;
    text_ += '(';
    text_ += static_cast<char>('a' + num_written_ % kLetters);
    text_ += num_written_ < kLetters ? "!)" : std::to_string(num_written_ / kLetters) + "!)";
    ++num_written_;
  }
  text_ += is_optional ? "? " : " ";
  text_ += name;
}

void SchemaText::scalar(const char* name, const char* type, const char* default_value) {
  separate();
  if (!has_scalars_) {
    text_ += "*, ";
    has_scalars_ = true;
  }
  text_ += std::string(type) + " " + name;
  if (default_value != nullptr) {
    text_ += std::string("=") + default_value;
  }
}

}  // namespace diffulex::torch_ops
