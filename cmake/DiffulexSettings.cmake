# SPDX-License-Identifier: Apache-2.0
#
# Language standard, visibility, optimisation, sanitizers and compiler cache of every target. Only
# ordinary variables are set: a project that includes this one with add_subdirectory keeps its own.

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()

set(CMAKE_CXX_STANDARD 17)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
# CMake 3.25 knows no newer dialect for nvcc.
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
# Line tables only: profilers see symbols, binaries stay small; wheels are stripped.
set(CMAKE_CXX_FLAGS_RELEASE "-O3 -DNDEBUG -g1")
set(CMAKE_CUDA_FLAGS_RELEASE "-O3 -DNDEBUG")

# Messages and line tables name files as seen from the source directory: where a package was built is
# nobody's business. Not in CMAKE_CXX_FLAGS, which build_info reports.
foreach(diffulex_map IN ITEMS "${CMAKE_SOURCE_DIR}/=" "${CMAKE_BINARY_DIR}=build")
  add_compile_options(
    "$<$<COMPILE_LANGUAGE:CXX>:-ffile-prefix-map=${diffulex_map}>"
    "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-ffile-prefix-map=${diffulex_map}>")
endforeach()

if(DIFFULEX_SANITIZE)
  string(APPEND CMAKE_CXX_FLAGS
    " -fsanitize=${DIFFULEX_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer")
endif()

if(DIFFULEX_LTO)
  include(CheckIPOSupported)
  check_ipo_supported(LANGUAGES CXX)
  set(CMAKE_INTERPROCEDURAL_OPTIMIZATION ON)
endif()

if(DIFFULEX_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  find_program(DIFFULEX_CCACHE_PROGRAM ccache)
  mark_as_advanced(DIFFULEX_CCACHE_PROGRAM)
  if(DIFFULEX_CCACHE_PROGRAM)
    # A ccache that is found but does not run would fail every compile.
    execute_process(COMMAND "${DIFFULEX_CCACHE_PROGRAM}" --version
      RESULT_VARIABLE diffulex_ccache_status OUTPUT_QUIET ERROR_QUIET)
    if(diffulex_ccache_status EQUAL 0)
      message(STATUS "ccache: ${DIFFULEX_CCACHE_PROGRAM}")
      set(CMAKE_CXX_COMPILER_LAUNCHER "${DIFFULEX_CCACHE_PROGRAM}")
      set(CMAKE_CUDA_COMPILER_LAUNCHER "${DIFFULEX_CCACHE_PROGRAM}")
    else()
      message(STATUS "ccache: off, ${DIFFULEX_CCACHE_PROGRAM} does not run")
    endif()
  endif()
endif()

string(STRIP "${CMAKE_CXX_FLAGS} ${CMAKE_CXX_FLAGS_RELEASE}" DIFFULEX_BUILD_CXX_FLAGS)
string(TOUPPER "${CMAKE_BUILD_TYPE}" diffulex_build_type)
if(DEFINED CMAKE_CXX_FLAGS_${diffulex_build_type})
  string(STRIP "${CMAKE_CXX_FLAGS} ${CMAKE_CXX_FLAGS_${diffulex_build_type}}"
    DIFFULEX_BUILD_CXX_FLAGS)
endif()
string(PREPEND DIFFULEX_BUILD_CXX_FLAGS "-std=c++17 ")
