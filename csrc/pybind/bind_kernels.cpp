// SPDX-License-Identifier: Apache-2.0
#include <string>

#include <pybind11/pybind11.h>

#include "diffulex/kernels/attention.h"
#include "diffulex/kernels/sampling.h"
#include "diffulex_build_info.h"
#include "pybind/bind.h"

namespace diffulex::bindings {
namespace {

[[nodiscard]] Device parse_device(const std::string& name) {
  if (name == "cpu") {
    return Device::kCpu;
  }
  if (name == "cuda") {
    return Device::kCuda;
  }
  throw py::value_error("device: expected cpu or cuda, got " + name);
}

/// "a;b" as a list; an empty string as an empty list.
[[nodiscard]] py::list split(const std::string& text) {
  py::list parts;
  size_t begin = 0;
  while (begin < text.size()) {
    size_t end = text.find(';', begin);
    end = end == std::string::npos ? text.size() : end;
    if (end > begin) {
      parts.append(text.substr(begin, end - begin));
    }
    begin = end + 1;
  }
  return parts;
}

/// `text`, or None when the build has no such part.
[[nodiscard]] py::object optional_text(const char* text) {
  return *text == '\0' ? py::object(py::none()) : py::object(py::str(text));
}

[[nodiscard]] py::dict make_build_info() {
  using namespace build_info;  // NOLINT(google-build-using-namespace): constants of one header
  py::dict info;
  info["version"] = kBuildVersion;
  info["git_commit"] = kBuildGitCommit;
  info["compiler"] = kBuildCompiler;
  info["build_type"] = kBuildType;
  info["cxx_flags"] = kBuildCxxFlags;
  info["glibcxx_use_cxx11_abi"] = _GLIBCXX_USE_CXX11_ABI;
  info["cuda_version"] = optional_text(kBuildCudaVersion);
  info["cuda_archs"] = split(kBuildCudaArchs);
  info["cuda_profile"] = optional_text(kBuildCudaProfile);
  info["cutlass_version"] = optional_text(kBuildCutlassVersion);
  info["cpu_isa_variants"] = split(kBuildCpuIsaVariants);
  info["torch_version"] = optional_text(kBuildTorchVersion);
  info["torch_target_version"] = optional_text(kBuildTorchTargetVersion);
  return info;
}

}  // namespace

void bind_kernels(py::module_& module) {
  module.def("build_info", &make_build_info,
             "What this build was made of: version, commit, compiler, flags, CUDA, torch.");
  module.def(
      "attention_workspace_bytes",
      [](int32_t num_reqs, int32_t num_q_heads, int32_t num_kv_heads, int32_t head_dim,
         int32_t max_seqlen_q, int32_t max_context_len, int32_t num_splits,
         const std::string& device) {
        return attention_workspace_bytes({num_reqs, num_q_heads, num_kv_heads, head_dim,
                                          max_seqlen_q, max_context_len, num_splits},
                                         parse_device(device));
      },
      py::arg("num_reqs"), py::arg("num_q_heads"), py::arg("num_kv_heads"), py::arg("head_dim"),
      py::arg("max_seqlen_q"), py::arg("max_context_len"), py::arg("num_splits") = 0,
      py::arg("device") = "cuda", "Bytes of scratch the op block_attention needs.");
  module.def(
      "attention_plan_elems",
      [](int32_t num_reqs, int32_t num_q_heads, int32_t num_kv_heads, int32_t head_dim,
         int32_t max_seqlen_q, int32_t max_context_len, int32_t num_splits) {
        return attention_plan_elems({num_reqs, num_q_heads, num_kv_heads, head_dim, max_seqlen_q,
                                     max_context_len, num_splits});
      },
      py::arg("num_reqs"), py::arg("num_q_heads"), py::arg("num_kv_heads"), py::arg("head_dim"),
      py::arg("max_seqlen_q"), py::arg("max_context_len"), py::arg("num_splits") = 0,
      "int32 elements of the plan buffer of the op attention_plan.");
  module.def(
      "token_stats_workspace_bytes",
      [](int64_t num_rows, int64_t vocab_size, int32_t top_k, const std::string& device) {
        return token_stats_workspace_bytes(num_rows, vocab_size, top_k, parse_device(device));
      },
      py::arg("num_rows"), py::arg("vocab_size"), py::arg("top_k") = 0, py::arg("device") = "cuda",
      "Bytes of scratch the op token_stats needs.");
}

}  // namespace diffulex::bindings
