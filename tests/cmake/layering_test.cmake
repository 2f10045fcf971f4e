# SPDX-License-Identifier: Apache-2.0
#
# Layers point one way: core <- kernels <- (edge, torch, pybind) <- diffulex_ext <- diffulex.
cmake_minimum_required(VERSION 3.25)

set(violations "")

# forbid(<what> <regular expression> <path or directory>...): no line of these files matches. The
# file kinds are given by the extension list EXTENSIONS.
function(forbid what pattern)
  foreach(path IN LISTS ARGN)
    set(files "")
    foreach(extension IN LISTS EXTENSIONS)
      file(GLOB_RECURSE found "${SOURCE_DIR}/${path}/*.${extension}")
      list(APPEND files ${found})
    endforeach()
    foreach(file IN LISTS files)
      file(STRINGS "${file}" lines REGEX "${pattern}")
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

set(EXTENSIONS h cpp cu cuh inl)
set(core include/diffulex/core csrc/core)
set(kernels include/diffulex/kernels csrc/kernels)
forbid("core may not know kernels" "${include_of}(diffulex/)?kernels/" ${core})
forbid("core may not know CUDA" "${include_of}${cuda_headers}" ${core})
forbid("no torch below csrc/torch" "${include_of}${torch_headers}" ${core} ${kernels} csrc/pybind)
forbid("no bindings below csrc/pybind" "${include_of}(${python_headers}|(torch|pybind)/)"
  ${core} ${kernels})
forbid("kernels may not know the private files of core" "${include_of}core/" csrc/kernels)
forbid("public headers name no CUDA type" "${include_of}${cuda_headers}" include)
forbid("public headers include only public headers" "${include_of}(core|kernels|torch|pybind)/" include)
forbid("CPU kernels may not know CUDA" "${include_of}(${cuda_headers}|kernels/cuda/)"
  csrc/kernels/cpu csrc/kernels/common)
forbid("the torch glue uses the stable ABI only"
  "${include_of}(ATen/|c10/|torch/(extension|library|torch|all)\\.h|pybind11/|Python\\.h)" csrc/torch)
forbid("no source file uses an unstable torch header" "${include_of}(ATen|c10)/"
  csrc include tests/cpp benchmarks/cpp examples)
forbid("the torch glue and the bindings do not know each other" "${include_of}pybind/" csrc/torch)

forbid("edge knows core and kernels only"
  "${include_of}(${torch_headers}|${python_headers}|${cuda_headers}|executorch/|(core|kernels|torch|pybind)/)"
  include/diffulex/edge csrc/edge)
forbid("nothing below the embedders knows edge" "${include_of}(diffulex/)?edge/"
  ${core} ${kernels} csrc/torch csrc/pybind)

set(EXTENSIONS cu cuh)
forbid("a .cu file includes no torch header" "${include_of}${torch_headers}"
  csrc tests/cpp benchmarks/cpp)

set(EXTENSIONS py pyi)
forbid("diffulex_ext may not know diffulex" "^[ \t]*(import|from)[ \t]+diffulex([ .]|$)"
  python/diffulex_ext)
forbid("the op library is loaded by diffulex_ext only" "torch\\.ops\\.load_library" python/diffulex)

if(violations)
  message(FATAL_ERROR "layering violated, see above")
endif()
