// SPDX-License-Identifier: Apache-2.0
#include "executorch_model.h"

#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>

#include <array>
#include <cstring>
#include <fstream>
#include <utility>

#if __has_include(<executorch/extension/threadpool/threadpool.h>)
#include <executorch/extension/threadpool/cpuinfo_utils.h>
#include <executorch/extension/threadpool/threadpool.h>
#else
// The SDK of the Python package has these functions, but not their headers.
namespace executorch::extension {
namespace threadpool {
class ThreadPool {
 public:
  size_t get_thread_count() const;
  bool _unsafe_reset_threadpool(uint32_t new_thread_count);  // NOLINT: a name of the library
};
ThreadPool* get_threadpool();
}  // namespace threadpool
namespace cpuinfo {
uint32_t get_num_performant_cores();
}  // namespace cpuinfo
}  // namespace executorch::extension
#endif

namespace diffulex {
namespace {

using executorch::aten::ScalarType;
using executorch::extension::from_blob;
using executorch::extension::Module;
using executorch::extension::TensorPtr;
using executorch::runtime::Error;

constexpr const char* kMethod = "forward";
constexpr int64_t kFormat = 2;  // newest meaning of the constants that is known here

/// What the runtime's error numbers mean to a user.
std::string describe(Error error) {
  const auto text = [error]() -> const char* {
    switch (error) {
      case Error::NotSupported:
        return "an input of a shape that the program does not take";
      case Error::InvalidArgument:
        return "an input of another type, or a value outside its range";
      case Error::OperatorMissing:
        return "an operator that this runtime lacks";
      case Error::NotFound:
        return "a backend that this machine lacks";
      case Error::AccessFailed:
        return "no access to the file";
      case Error::InvalidProgram:
        return "a file that is no program";
      default:
        return "a failure of the runtime";
    }
  }();
  std::array<char, 32> number{};
  std::snprintf(number.data(), number.size(), " (error 0x%02x)", static_cast<unsigned>(error));
  return text + std::string(number.data());
}

/// Refuses foreign files and those that are cut short, which the runtime would map all the same.
Status check_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) {
    return make_error(StatusCode::kNotFound, path, ": expected a readable program, got none");
  }
  const auto size = static_cast<uint64_t>(file.tellg());
  std::array<char, 40> head{};
  file.seekg(0);
  file.read(head.data(), head.size());
  if (!file || std::memcmp(head.data() + 4, "ET12", 4) != 0) {
    return make_error(StatusCode::kInvalidArgument, path,
                      ": expected an ExecuTorch program, got another file");
  }
  if (std::memcmp(head.data() + 8, "eh00", 4) == 0) {
    std::array<uint64_t, 3> extent{};  // program size, segment base, segment size
    std::memcpy(extent.data(), head.data() + 16, sizeof(extent));
    const uint64_t needed = extent[1] > 0 ? extent[1] + extent[2] : extent[0];
    if (size < needed) {
      return make_error(StatusCode::kInvalidArgument, path, ": expected at least ", needed,
                        " bytes, got ", size, ": the file is cut short");
    }
  }
  return {};
}

class ExecuTorchModel final : public EdgeModel {
 public:
  explicit ExecuTorchModel(const std::string& path)
      // Methods share their arenas: the cache is one of them.
      : path_(path), module_(path, Module::LoadMode::Mmap, nullptr, nullptr, nullptr, true) {}

  [[nodiscard]] Status load() {
    // What a damaged file points at is not followed.
    const Error opened =
        module_.load(executorch::runtime::Program::Verification::InternalConsistency);
    if (opened != Error::Ok) {
      return make_error(StatusCode::kInvalidArgument, path_,
                        ": expected an undamaged program, got ", describe(opened));
    }
    const auto names = module_.method_names();
    if (!names.ok()) {
      return make_error(StatusCode::kInvalidArgument, path_, ": expected a program, got ",
                        describe(names.error()));
    }
    if (names->count(kMethod) == 0 || names->count("dlx_format") == 0) {
      return make_error(StatusCode::kInvalidArgument, path_,
                        ": expected a program of diffulex edge export, got another one");
    }
    int64_t format = 0;
    int64_t is_dynamic = 0;
    DIFFULEX_RETURN_IF_ERROR(read("dlx_format", &format));
    DIFFULEX_RETURN_IF_ERROR(read("enable_dynamic_shape", &is_dynamic));
    if (format > kFormat) {
      return make_error(StatusCode::kUnsupported, path_, ": expected format ", kFormat,
                        " or older, got ", format, ": it needs a newer diffulex");
    }
    if (is_dynamic == 0) {
      return make_error(StatusCode::kUnsupported, path_,
                        ": expected a program for any number of rows, got one of fixed shapes");
    }
    DIFFULEX_RETURN_IF_ERROR(read("get_vocab_size", &limits_.vocab_size));
    DIFFULEX_RETURN_IF_ERROR(read("get_max_seq_len", &limits_.max_model_len));
    DIFFULEX_RETURN_IF_ERROR(read("dlx_max_rows", &limits_.max_rows));
    DIFFULEX_RETURN_IF_ERROR(read("dlx_max_logits", &limits_.max_logits));
    const Error error = module_.load_method(kMethod);
    return error == Error::Ok
               ? Status()
               : make_error(StatusCode::kUnsupported, path_,
                            ": expected a program that runs here, got ", describe(error));
  }

  [[nodiscard]] EdgeLimits limits() const override { return limits_; }

  [[nodiscard]] Result<const float*> run(const EdgeCall& call) override {
    const auto outputs = module_.execute(
        kMethod, {input(call.tokens, {1, static_cast<int32_t>(call.tokens.size())}),
                  input(call.positions, {static_cast<int32_t>(call.positions.size())}),
                  input(call.visible_end, {static_cast<int32_t>(call.visible_end.size())}),
                  input(call.logits_rows, {static_cast<int32_t>(call.logits_rows.size())})});
    if (!outputs.ok()) {
      return make_error(StatusCode::kInternal, path_, ": expected logits, got ",
                        describe(outputs.error()));
    }
    const auto& values = outputs.get();
    const size_t expected = call.logits_rows.size() * static_cast<size_t>(limits_.vocab_size);
    if (values.empty() || !values[0].isTensor() ||
        values[0].toTensor().scalar_type() != ScalarType::Float ||
        static_cast<size_t>(values[0].toTensor().numel()) != expected) {
      return make_error(StatusCode::kInternal, path_, ": expected ", expected,
                        " logits of type float32, got another output");
    }
    return values[0].toTensor().const_data_ptr<float>();
  }

 private:
  static TensorPtr input(Span<const int64_t> values, std::vector<int32_t> sizes) {
    // The runtime takes inputs by pointer and does not write to them.
    return from_blob(const_cast<int64_t*>(values.data()), std::move(sizes), ScalarType::Long);
  }

  template <typename T>
  [[nodiscard]] Status read(const char* name, T* value) {
    const auto outputs = module_.execute(name);
    const bool is_number =
        outputs.ok() && !outputs->empty() && (outputs->at(0).isInt() || outputs->at(0).isBool());
    if (!is_number) {
      return make_error(StatusCode::kInvalidArgument, path_, ": expected an integer ", name,
                        ", got none");
    }
    const auto& output = outputs->at(0);
    *value = static_cast<T>(output.isInt() ? output.toInt() : int64_t{output.toBool()});
    return {};
  }

  std::string path_;
  Module module_;
  EdgeLimits limits_;
};

}  // namespace

Result<std::unique_ptr<EdgeModel>> load_executorch_model(const std::string& path, int32_t threads) {
  namespace extension = executorch::extension;
  DIFFULEX_RETURN_IF_ERROR(check_file(path));
  const uint32_t count =
      threads > 0 ? static_cast<uint32_t>(threads) : extension::cpuinfo::get_num_performant_cores();
  if (count != static_cast<uint32_t>(executorch_threads()) &&
      !extension::threadpool::get_threadpool()->_unsafe_reset_threadpool(count)) {
    return make_error(StatusCode::kInternal, "threads: expected a pool of ", count, ", got none");
  }
  auto model = std::make_unique<ExecuTorchModel>(path);
  DIFFULEX_RETURN_IF_ERROR(model->load());
  return std::unique_ptr<EdgeModel>(std::move(model));
}

int32_t executorch_threads() {
  return static_cast<int32_t>(
      executorch::extension::threadpool::get_threadpool()->get_thread_count());
}

}  // namespace diffulex
