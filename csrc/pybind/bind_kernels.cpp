// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <string>
#include <vector>

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include "diffulex/ops/attention.h"
#include "diffulex/ops/comm.h"
#include "diffulex/ops/merge.h"
#include "diffulex/ops/moe.h"
#include "diffulex/ops/sampling.h"
#include "diffulex/ops/visible_ends.h"
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

[[nodiscard]] DType parse_float_dtype(const std::string& name) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    if (name == to_string(dtype)) {
      return dtype;
    }
  }
  throw py::value_error("dtype: expected float32, float16 or bfloat16, got " + name);
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
  info["cpu_isa_variants"] = split(kBuildCpuIsaVariants);
  info["torch_version"] = optional_text(kBuildTorchVersion);
  info["torch_target_version"] = optional_text(kBuildTorchTargetVersion);
  return info;
}

void def_attention(py::module_& module) {
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
      "attention_splits",
      [](int32_t num_reqs, int32_t num_q_heads, int32_t num_kv_heads, int32_t head_dim,
         int32_t max_seqlen_q, int32_t max_context_len, bool is_hopper) {
        const AttentionSplits splits = attention_splits(
            {num_reqs, num_q_heads, num_kv_heads, head_dim, max_seqlen_q, max_context_len, 0},
            is_hopper);
        return py::make_tuple(splits.num_splits, splits.cluster_size, splits.rows_per_tile);
      },
      py::arg("num_reqs"), py::arg("num_q_heads"), py::arg("num_kv_heads"), py::arg("head_dim"),
      py::arg("max_seqlen_q"), py::arg("max_context_len"), py::arg("is_hopper"),
      "(splits, CTAs of a cluster, rows of a tile) that the op block_attention chooses by itself "
      "on a device of 132 multiprocessors; elsewhere it may choose others, within the scratch of "
      "attention_workspace_bytes.");
  module.def(
      "visible_ends",
      [](StepPlan& plan) {
        std::vector<int64_t> ends;
        raise_if_error(visible_ends(plan, &ends));
        return py::array_t<int64_t>(static_cast<py::ssize_t>(ends.size()), ends.data());
      },
      py::arg("plan"),
      "Int64 array [n]: row i of the plan's only request, of its n real rows, attends to the cache "
      "rows before element i, the rows of the call included. ValueError unless the plan has one "
      "request.");
}

void def_comm(py::module_& module) {
  module.attr("MAX_RANKS") = kMaxRanks;
  module.attr("MAX_RECORD_BYTES") = kMaxRecordBytes;
  module.attr("COLLECTIVE_STATE_WORDS") = kCollectiveStateWords;
  module.def(
      "collective_plan",
      [](int32_t world, int64_t num_bytes) {
        if (world < 2 || world > kMaxRanks || num_bytes < 0) {
          throw py::value_error("collective_plan: expected 2 to 8 ranks and bytes >= 0, got " +
                                std::to_string(world) + " and " + std::to_string(num_bytes));
        }
        return static_cast<int32_t>(collective_plan(world, num_bytes));
      },
      py::arg("world"), py::arg("num_bytes"),
      "How a sum of `num_bytes` of each of `world` ranks of a host is formed: 0 one-shot, 1 "
      "two-shot, "
      "2 not by the op all_reduce.");
  module.def("collective_epoch_bytes", &collective_epoch_bytes, py::arg("world"),
             "The argument epoch_bytes of the ops of exchange for sums of collective_plan.");
  module.def("collective_gather_bytes", &collective_gather_bytes, py::arg("world"),
             "Bytes behind the three epochs in the buffer of a rank.");
}

void def_experts(py::module_& module) {
  module.def("moe_max_tiles", &moe_max_tiles, py::arg("num_slots"), py::arg("num_local_experts"),
             py::arg("tile"), "Entries of the tile list of the op moe_permute.");
  module.def(
      "fused_moe_workspace_bytes",
      [](int64_t num_tokens, int32_t top_k, int32_t num_local_experts, int64_t hidden_size,
         int64_t intermediate_size, const std::string& dtype, const std::string& device,
         bool is_scaled) {
        return fused_moe_workspace_bytes({num_tokens, top_k, num_local_experts, hidden_size,
                                          intermediate_size, parse_float_dtype(dtype), is_scaled},
                                         parse_device(device));
      },
      py::arg("num_tokens"), py::arg("top_k"), py::arg("num_local_experts"), py::arg("hidden_size"),
      py::arg("intermediate_size"), py::arg("dtype"), py::arg("device") = "cuda",
      py::arg("is_scaled") = false,
      "Bytes of scratch the op fused_moe needs for activations of `dtype`.");
  module.def(
      "fused_experts_packed_workspace_bytes",
      [](int64_t num_rows, int32_t num_local_experts, int64_t intermediate_size,
         const std::string& dtype, const std::string& device) {
        return fused_experts_packed_workspace_bytes(num_rows, num_local_experts, intermediate_size,
                                                    parse_float_dtype(dtype), parse_device(device));
      },
      py::arg("num_rows"), py::arg("num_local_experts"), py::arg("intermediate_size"),
      py::arg("dtype"), py::arg("device") = "cuda",
      "Bytes of scratch the op fused_experts_packed needs for activations of `dtype`.");
}

void def_sampling(py::module_& module) {
  module.def(
      "token_stats_workspace_bytes",
      [](int64_t num_rows, int64_t vocab_size, int32_t top_k, const std::string& device) {
        return token_stats_workspace_bytes(num_rows, vocab_size, top_k, parse_device(device));
      },
      py::arg("num_rows"), py::arg("vocab_size"), py::arg("top_k") = 0, py::arg("device") = "cuda",
      "Bytes of scratch the op token_stats needs.");
  module.def(
      "soft_embedding_workspace_bytes",
      [](int64_t num_rows, int64_t vocab_size, int64_t hidden_size, const std::string& dtype,
         const std::string& device) {
        return soft_embedding_workspace_bytes(num_rows, vocab_size, hidden_size,
                                              parse_float_dtype(dtype), parse_device(device));
      },
      py::arg("num_rows"), py::arg("vocab_size"), py::arg("hidden_size"), py::arg("dtype"),
      py::arg("device") = "cuda",
      "Bytes of scratch the op soft_embedding needs for a table of `dtype`.");
}

}  // namespace

void bind_kernels(py::module_& module) {
  module.def("build_info", &make_build_info,
             "What this build was made of: version, commit, compiler, flags, CUDA, torch.");
  def_attention(module);
  def_comm(module);
  def_experts(module);
  def_sampling(module);
}

}  // namespace diffulex::bindings
