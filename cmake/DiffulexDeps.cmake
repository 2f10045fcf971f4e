# SPDX-License-Identifier: Apache-2.0
#
# GoogleTest, google-benchmark and pybind11, each with its fallbacks. The network is used only with
# DIFFULEX_FETCH_DEPS=ON.

set(DIFFULEX_DEPS_DIR "${PROJECT_SOURCE_DIR}/.deps" CACHE PATH
  "Directory with unpacked third-party sources")

# Defines GTest::gtest, GTest::gmock and GTest::gtest_main, or stops.
macro(diffulex_find_gtest)
  find_package(GTest QUIET)
  if(NOT TARGET GTest::gmock OR NOT TARGET GTest::gtest_main)
    _diffulex_add_gtest_source()
  endif()
endmacro()

function(_diffulex_add_gtest_source)
  set(INSTALL_GTEST OFF)
  set(BUILD_GMOCK ON)
  set(CMAKE_POLICY_VERSION_MINIMUM 3.5)
  set(CMAKE_POLICY_DEFAULT_CMP0077 NEW)
  foreach(directory "${DIFFULEX_DEPS_DIR}/googletest" "${PROJECT_SOURCE_DIR}/.deps/googletest"
          /usr/src/googletest)
    if(EXISTS "${directory}/CMakeLists.txt")
      message(STATUS "GoogleTest: sources in ${directory}")
      add_subdirectory("${directory}" "${PROJECT_BINARY_DIR}/googletest" EXCLUDE_FROM_ALL)
      _diffulex_alias_gtest()
      return()
    endif()
  endforeach()
  if(NOT DIFFULEX_FETCH_DEPS)
    message(FATAL_ERROR
      "DIFFULEX_BUILD_TESTS=ON: expected GoogleTest, got none\n"
      "Remedies: apt-get install libgtest-dev libgmock-dev; or sources in "
      "${DIFFULEX_DEPS_DIR}/googletest; or -DDIFFULEX_FETCH_DEPS=ON")
  endif()
  include(FetchContent)
  FetchContent_Declare(googletest
    URL https://github.com/google/googletest/archive/refs/tags/v1.14.0.tar.gz)
  FetchContent_MakeAvailable(googletest)
  _diffulex_alias_gtest()
endfunction()

function(_diffulex_alias_gtest)
  foreach(name gtest gtest_main gmock)
    if(NOT TARGET GTest::${name})
      add_library(GTest::${name} ALIAS ${name})
    endif()
  endforeach()
endfunction()

# Defines benchmark::benchmark_main, or stops.
macro(diffulex_find_benchmark)
  find_package(benchmark CONFIG QUIET)
  if(NOT TARGET benchmark::benchmark_main)
    if(NOT DIFFULEX_FETCH_DEPS)
      message(FATAL_ERROR
        "DIFFULEX_BUILD_BENCHMARKS=ON: expected google-benchmark, got none\n"
        "Remedies: apt-get install libbenchmark-dev; or -DDIFFULEX_FETCH_DEPS=ON")
    endif()
    include(FetchContent)
    set(BENCHMARK_ENABLE_TESTING OFF)
    set(BENCHMARK_ENABLE_INSTALL OFF)
    set(CMAKE_POLICY_DEFAULT_CMP0077 NEW)
    FetchContent_Declare(benchmark
      URL https://github.com/google/benchmark/archive/refs/tags/v1.8.3.tar.gz)
    FetchContent_MakeAvailable(benchmark)
  endif()
endmacro()

# diffulex_add_pybind_module(<target> <sources>...): a Python module, from pybind11's own package if it
# is new enough, else with the headers that torch bundles.
function(diffulex_add_pybind_module target)
  if(NOT pybind11_DIR AND Python_EXECUTABLE)
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -m pybind11 --cmakedir
      OUTPUT_VARIABLE hint ERROR_QUIET RESULT_VARIABLE code OUTPUT_STRIP_TRAILING_WHITESPACE)
    if(NOT code EQUAL 0)
      set(hint "")
    endif()
  endif()
  set(PYBIND11_FINDPYTHON ON)
  find_package(pybind11 2.13 CONFIG QUIET HINTS ${hint})
  if(pybind11_FOUND)
    message(STATUS "pybind11 ${pybind11_VERSION}: ${pybind11_DIR}")
    pybind11_add_module(${target} MODULE NO_EXTRAS ${ARGN})
  elseif(EXISTS "${DIFFULEX_TORCH_PACKAGE_DIR}/include/pybind11/pybind11.h")
    message(STATUS "pybind11: headers bundled with torch")
    Python_add_library(${target} MODULE WITH_SOABI ${ARGN})
    # Only pybind11 may be seen of torch's headers: the module is torch-free.
    file(MAKE_DIRECTORY "${PROJECT_BINARY_DIR}/pybind11_headers")
    file(CREATE_LINK "${DIFFULEX_TORCH_PACKAGE_DIR}/include/pybind11"
      "${PROJECT_BINARY_DIR}/pybind11_headers/pybind11" SYMBOLIC)
    target_include_directories(${target} SYSTEM PRIVATE "${PROJECT_BINARY_DIR}/pybind11_headers")
  else()
    message(FATAL_ERROR
      "DIFFULEX_BUILD_PYTHON=ON: expected pybind11 >= 2.13, got none\n"
      "Remedies: pip install pybind11; or -DDIFFULEX_BUILD_PYTHON=OFF")
  endif()
endfunction()
