# SPDX-License-Identifier: Apache-2.0
#
# What the two plugins export and depend on: no symbol of the static libraries, no OpenMP, no CUDA
# driver, no shared CUDA runtime, no run path (with SHARED: only the one to the shared libraries).
cmake_minimum_required(VERSION 3.25)

function(run result)
  execute_process(COMMAND ${ARGN} OUTPUT_VARIABLE output ERROR_VARIABLE error RESULT_VARIABLE code)
  if(NOT code EQUAL 0)
    message(FATAL_ERROR "${ARGN}: ${error}")
  endif()
  set(${result} "${output}" PARENT_SCOPE)
endfunction()

function(check_dynamic_section file)
  run(dynamic "${READELF}" -d "${file}")
  if(SHARED)
    string(REPLACE "runpath: [$ORIGIN/lib]" "" dynamic "${dynamic}")
    string(REPLACE "(RUNPATH)" "" dynamic "${dynamic}")
  endif()
  foreach(pattern "RPATH" "RUNPATH" "runpath" "NEEDED[^\n]*gomp" "NEEDED[^\n]*libcuda" "NEEDED[^\n]*cudart"
          "NEEDED[^\n]*c10_cuda" "NEEDED[^\n]*torch_cuda" "NEEDED[^\n]*torch_python")
    if(dynamic MATCHES "${pattern}")
      message(FATAL_ERROR "${file}: expected no dynamic entry ${pattern}, got\n${dynamic}")
    endif()
  endforeach()
endfunction()

if(DEFINED diffulex_ops)
  run(symbols "${NM}" -D --defined-only "${diffulex_ops}")
  if(symbols MATCHES "[^\n]*diffulex[^\n]*")
    message(FATAL_ERROR "${diffulex_ops}: expected no exported symbol of diffulex, got\n${symbols}")
  endif()
  check_dynamic_section("${diffulex_ops}")
endif()

if(DEFINED _core)
  run(symbols "${NM}" -D --defined-only "${_core}")
  string(REGEX MATCHALL "[^ \n]+\n" names "${symbols}")
  string(REPLACE "\n" "" names "${names}")
  if(NOT names STREQUAL "PyInit__core")
    message(FATAL_ERROR "${_core}: expected the one exported symbol PyInit__core, got ${names}")
  endif()
  check_dynamic_section("${_core}")
  run(dynamic "${READELF}" -d "${_core}")
  if(dynamic MATCHES "NEEDED[^\n]*torch")
    message(FATAL_ERROR "${_core}: expected no dependency on torch, got\n${dynamic}")
  endif()
endif()
