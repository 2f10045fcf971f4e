# SPDX-License-Identifier: Apache-2.0
#
# Finds the CUTLASS headers (>= 4.0) and defines diffulex::cutlass (INTERFACE).
# Input: DIFFULEX_WITH_CUTLASS (AUTO, ON, OFF), DIFFULEX_CUTLASS_DIR, environment CUTLASS_PATH and
# CUTLASS_DIR (repository root or its include directory), DIFFULEX_DEPS_DIR, DIFFULEX_FETCH_DEPS.
# Output: DIFFULEX_CUTLASS_VERSION, empty when not used.

include("${CMAKE_CURRENT_LIST_DIR}/DiffulexPythonPackage.cmake")

set(DIFFULEX_CUTLASS_VERSION "")

# Appends <directory> or <directory>/include to candidates in the caller, whichever has the headers.
macro(_diffulex_cutlass_candidate directory)
  foreach(_include "${directory}/include" "${directory}")
    if(NOT "${directory}" STREQUAL "" AND EXISTS "${_include}/cutlass/cutlass.h")
      list(APPEND candidates "${_include}")
      break()
    endif()
  endforeach()
endmacro()

function(_diffulex_find_cutlass_include result)
  set(candidates "")
  if(DIFFULEX_CUTLASS_DIR)
    _diffulex_cutlass_candidate("${DIFFULEX_CUTLASS_DIR}")
    if(NOT candidates)
      message(FATAL_ERROR
        "DIFFULEX_CUTLASS_DIR: expected a directory with cutlass/cutlass.h or "
        "include/cutlass/cutlass.h, got \"${DIFFULEX_CUTLASS_DIR}\"")
    endif()
  endif()
  _diffulex_cutlass_candidate("$ENV{CUTLASS_PATH}")
  _diffulex_cutlass_candidate("$ENV{CUTLASS_DIR}")
  _diffulex_cutlass_candidate("${DIFFULEX_DEPS_DIR}/cutlass")
  if(NOT candidates)
    find_path(_cutlass_path cutlass/cutlass.h NO_CACHE)
    if(_cutlass_path)
      list(APPEND candidates "${_cutlass_path}")
    endif()
  endif()
  if(NOT candidates)
    diffulex_python_package_dir(package cutlass_library)
    if(package)
      _diffulex_cutlass_candidate("${package}/source")
    endif()
  endif()
  if(NOT candidates)
    diffulex_python_package_dir(package flashinfer)
    if(package)
      _diffulex_cutlass_candidate("${package}/data/cutlass")
    endif()
  endif()
  if(NOT candidates AND DIFFULEX_FETCH_DEPS)
    include(FetchContent)
    # SOURCE_SUBDIR without a CMakeLists.txt: only the headers are wanted, not CUTLASS's own build.
    FetchContent_Declare(cutlass SOURCE_SUBDIR include
      URL https://github.com/NVIDIA/cutlass/archive/refs/tags/v4.2.1.tar.gz)
    FetchContent_MakeAvailable(cutlass)
    _diffulex_cutlass_candidate("${cutlass_SOURCE_DIR}")
  endif()
  set(first "")
  if(candidates)
    list(GET candidates 0 first)
  endif()
  set(${result} "${first}" PARENT_SCOPE)
endfunction()

function(_diffulex_cutlass_version result include_dir)
  file(READ "${include_dir}/cutlass/version.h" text)
  set(parts "")
  foreach(part MAJOR MINOR PATCH)
    if(NOT text MATCHES "#define +CUTLASS_${part} +([0-9]+)")
      message(FATAL_ERROR
        "FindCutlass: expected CUTLASS_${part} in ${include_dir}/cutlass/version.h, got none")
    endif()
    list(APPEND parts "${CMAKE_MATCH_1}")
  endforeach()
  string(JOIN "." version ${parts})
  set(${result} "${version}" PARENT_SCOPE)
endfunction()

if(NOT DIFFULEX_WITH_CUTLASS STREQUAL "AUTO" AND NOT DIFFULEX_WITH_CUTLASS)
  message(STATUS "CUTLASS: off (DIFFULEX_WITH_CUTLASS=${DIFFULEX_WITH_CUTLASS})")
else()
  _diffulex_find_cutlass_include(_cutlass_include)
  set(_cutlass_found_version "none")
  if(_cutlass_include)
    _diffulex_cutlass_version(_cutlass_found_version "${_cutlass_include}")
  endif()
  if(_cutlass_include AND NOT _cutlass_found_version VERSION_LESS 4.0)
    set(DIFFULEX_CUTLASS_VERSION "${_cutlass_found_version}")
    message(STATUS "CUTLASS ${DIFFULEX_CUTLASS_VERSION}: ${_cutlass_include}")
    add_library(diffulex_cutlass INTERFACE)
    add_library(diffulex::cutlass ALIAS diffulex_cutlass)
    target_include_directories(diffulex_cutlass SYSTEM INTERFACE "${_cutlass_include}")
  elseif(DIFFULEX_WITH_CUTLASS STREQUAL "AUTO")
    message(STATUS "CUTLASS: off, expected version 4.0 or newer, got ${_cutlass_found_version}")
  else()
    message(FATAL_ERROR
      "DIFFULEX_WITH_CUTLASS=ON: expected the headers of CUTLASS 4.0 or newer, got "
      "${_cutlass_found_version}\n"
      "Remedies: pip install --no-deps nvidia-cutlass==4.2.0.0; or scripts/fetch_deps.sh; or "
      "-DDIFFULEX_CUTLASS_DIR=<directory>")
  endif()
endif()
