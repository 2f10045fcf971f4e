# SPDX-License-Identifier: Apache-2.0
#
# Layers point one way: core <- ops <- (edge, torch, pybind) <- diffulex_ext <- diffulex.
cmake_minimum_required(VERSION 3.25)

set(violations "")

# forbid(<what> <regular expression> <path or directory>...): no line of these files matches, but for
# the lines of the list EXCEPTIONS. The files are given by the list of name patterns NAMES.
set(EXCEPTIONS "")
function(forbid what pattern)
  foreach(path IN LISTS ARGN)
    set(files "")
    foreach(name IN LISTS NAMES)
      file(GLOB_RECURSE found "${SOURCE_DIR}/${path}/${name}")
      list(APPEND files ${found})
    endforeach()
    foreach(file IN LISTS files)
      file(STRINGS "${file}" lines REGEX "${pattern}")
      list(REMOVE_ITEM lines "" ${EXCEPTIONS})
      foreach(line IN LISTS lines)
        file(RELATIVE_PATH name "${SOURCE_DIR}" "${file}")
        message(NOTICE "${name}: ${what}: ${line}")
        set(violations ON PARENT_SCOPE)
      endforeach()
    endforeach()
  endforeach()
endfunction()

set(include_of "^[ \t]*#[ \t]*include[ \t]*[<\"]")
set(torch_headers "(torch|ATen|c10)/")
set(python_headers "(pybind11/|Python\\.h)")
set(cuda_headers "(cuda|cub/|cute/|cutlass/|nv/)")

set(NAMES *.h *.cpp *.cu *.cuh *.inl)
set(core include/diffulex/core csrc/core)
set(ops include/diffulex/ops csrc/ops)
forbid("core may not know ops" "${include_of}(diffulex/)?ops/" ${core})
forbid("core may not know CUDA" "${include_of}${cuda_headers}" ${core})
forbid("no torch below csrc/torch" "${include_of}${torch_headers}" ${core} ${ops} csrc/pybind)
forbid("no bindings below csrc/pybind" "${include_of}(${python_headers}|(torch|pybind)/)"
  ${core} ${ops})
forbid("ops may not know the private files of core" "${include_of}core/" csrc/ops)
forbid("public headers name no CUDA type" "${include_of}${cuda_headers}" include)
forbid("public headers include only public headers" "${include_of}(core|ops|torch|pybind)/" include)
forbid("the torch glue uses the stable ABI only"
  "${include_of}(ATen/|c10/|torch/(extension|library|torch|all)\\.h|pybind11/|Python\\.h)" csrc/torch)
forbid("no source file uses an unstable torch header" "${include_of}(ATen|c10)/"
  csrc include tests/cpp benchmarks/cpp examples)
forbid("the torch glue and the bindings do not know each other" "${include_of}pybind/" csrc/torch)

forbid("edge knows core and ops only"
  "${include_of}(${torch_headers}|${python_headers}|${cuda_headers}|executorch/|(core|ops|torch|pybind)/)"
  include/diffulex/edge csrc/edge)
forbid("nothing below the embedders knows edge" "${include_of}(diffulex/)?edge/"
  ${core} ${ops} csrc/torch csrc/pybind)

set(NAMES *_cpu.cpp *_cpu.h check.cpp check.h config.cpp config.h *_check.h *_check.cpp *_config.h *_config.cpp)
forbid("CPU kernels, checks and configurations may not know CUDA"
  "${include_of}(${cuda_headers}|[^\">]*(\\.cuh|/cuda/))" csrc/ops)

set(NAMES *.cu *.cuh)
forbid("a .cu file includes no torch header" "${include_of}${torch_headers}"
  csrc tests/cpp benchmarks/cpp)

set(NAMES *.py *.pyi)
# The fake kernels lie beside the wrappers of diffulex.ops and must come with the op library: without
# them torch.compile and torch.export refuse ops that work. This line is all diffulex_ext may know.
set(EXCEPTIONS "    import diffulex.ops as _ops  # noqa: F401")
forbid("diffulex_ext may not know diffulex" "^[ \t]*(import|from)[ \t]+diffulex([ .]|$)"
  python/diffulex_ext)
set(EXCEPTIONS "")
forbid("the op library is loaded by diffulex_ext only" "torch\\.ops\\.load_library" python/diffulex)

if(violations)
  message(FATAL_ERROR "layering violated, see above")
endif()
