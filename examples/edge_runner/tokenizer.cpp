// SPDX-License-Identifier: Apache-2.0
#include "tokenizer.h"

#ifdef DIFFULEX_EDGE_TOKENIZERS
#include <pytorch/tokenizers/hf_tokenizer.h>
#endif

namespace diffulex {

#ifdef DIFFULEX_EDGE_TOKENIZERS
namespace {

class JsonTokenizer final : public EdgeTokenizer {
 public:
  [[nodiscard]] Status load(const std::string& path) {
    return tokenizer_.load(path) == tokenizers::Error::Ok
               ? Status()
               : make_error(StatusCode::kInvalidArgument, path,
                            ": expected a byte-pair tokenizer, got another file");
  }

  [[nodiscard]] Result<std::vector<int32_t>> encode(const std::string& text) const override {
    if (text.empty()) {
      return std::vector<int32_t>();
    }
    const auto ids = tokenizer_.encode(text, 0, 0);
    if (!ids.ok()) {
      return make_error(StatusCode::kInvalidArgument,
                        "prompt: expected a text that the tokenizer takes, got another one");
    }
    return std::vector<int32_t>(ids.get().begin(), ids.get().end());
  }

  [[nodiscard]] std::string decode(int32_t token_id) const override {
    const auto id = static_cast<uint64_t>(token_id);
    const auto text = tokenizer_.decode(id, id);
    return text.ok() ? text.get() : std::string();
  }

 private:
  tokenizers::HFTokenizer tokenizer_;
};

}  // namespace

bool has_tokenizer_library() {
  return true;
}

Result<std::unique_ptr<EdgeTokenizer>> make_tokenizer(const std::string& path) {
  auto tokenizer = std::make_unique<JsonTokenizer>();
  DIFFULEX_RETURN_IF_ERROR(tokenizer->load(path));
  return std::unique_ptr<EdgeTokenizer>(std::move(tokenizer));
}

#else

bool has_tokenizer_library() {
  return false;
}

Result<std::unique_ptr<EdgeTokenizer>> make_tokenizer(const std::string& /*path*/) {
  return make_error(StatusCode::kUnsupported,
                    "prompt: expected a build with the tokenizers library, got one without (use "
                    "--ids)");
}

#endif

}  // namespace diffulex
