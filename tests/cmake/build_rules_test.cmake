# SPDX-License-Identifier: Apache-2.0
#
# What no build script may do.
cmake_minimum_required(VERSION 3.25)

set(build_files
  "${SOURCE_DIR}/CMakeLists.txt" "${SOURCE_DIR}/setup.py"
  "${SOURCE_DIR}/tests/CMakeLists.txt" "${SOURCE_DIR}/benchmarks/CMakeLists.txt")
file(GLOB_RECURSE modules "${SOURCE_DIR}/cmake/*.cmake" "${SOURCE_DIR}/cmake/*.in")
list(APPEND build_files ${modules})
list(LENGTH modules count)
if(count LESS 10)
  message(FATAL_ERROR "expected the CMake modules of ${SOURCE_DIR}/cmake, got ${modules}")
endif()

set(violations "")

function(forbid what pattern)
  foreach(file IN LISTS build_files)
    file(RELATIVE_PATH name "${SOURCE_DIR}" "${file}")
    if(name IN_LIST ARGN)
      continue()
    endif()
    file(STRINGS "${file}" lines REGEX "${pattern}")
    foreach(line IN LISTS lines)
      string(STRIP "${line}" line)
      if(NOT line MATCHES "^#")
        message(NOTICE "${name}: ${what}: ${line}")
        set(violations ON PARENT_SCOPE)
      endif()
    endforeach()
  endforeach()
endfunction()

forbid("torch's CMake package is not used" "find_package *\\( *Torch")
forbid("OpenMP is not linked" "find_package *\\( *OpenMP|-fopenmp|gomp")
forbid("source lists are explicit" "file *\\( *GLOB|aux_source_directory")
forbid("no build step calls git" "COMMAND +\"?git|find_package *\\( *Git|find_program *\\([^)]*[ \"]git[ )\"]|['\"]git['\"]")
forbid("no build step uses the network" "file *\\( *DOWNLOAD|ExternalProject|urllib|requests\\.|http\\.client|curl|wget|pip install [^;.]*--upgrade")
forbid("sources are fetched in one guarded place only" "FetchContent_Declare" cmake/DiffulexDeps.cmake)
forbid("the kernels use no CUTLASS" "[Cc]utlass|CUTLASS")
forbid("no flag of the build host's CPU, no global fast-math" "-march=native|-mtune=native|-ffast-math|use_fast_math")
forbid("the C++ ABI macro is never set" "_GLIBCXX_USE_CXX11_ABI")
forbid("neither the CUDA driver nor torch's CUDA libraries are linked"
  "CUDA::cuda_driver|-lcuda([^r]|$)|c10_cuda|libtorch_cuda\\.so\"|CUDA::cudart([^_]|$)")
forbid("the build neither imports torch nor numpy" "^ *(import|from) +(torch|numpy)|import +torch *[;'\"]")

# Every fetch stands behind the option.
foreach(file cmake/DiffulexDeps.cmake)
  file(READ "${SOURCE_DIR}/${file}" text)
  string(REGEX MATCHALL "FetchContent_Declare" fetches "${text}")
  string(REGEX MATCHALL "if\\([^\n]*DIFFULEX_FETCH_DEPS\\)" guards "${text}")
  list(LENGTH fetches num_fetches)
  list(LENGTH guards num_guards)
  if(num_guards LESS num_fetches)
    message(NOTICE "${file}: ${num_fetches} fetches behind ${num_guards} checks of DIFFULEX_FETCH_DEPS")
    set(violations ON)
  endif()
endforeach()

if(violations)
  message(FATAL_ERROR "build rules violated, see above")
endif()
