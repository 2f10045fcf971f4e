# SPDX-License-Identifier: Apache-2.0
#
# Decides whether CUDA is built, enables the language, and declares the CUDA source groups.
# Sets DIFFULEX_CUDA_ENABLED (ON or OFF).

include("${CMAKE_CURRENT_LIST_DIR}/DiffulexCudaArchs.cmake")

function(_diffulex_find_nvcc)
  if(CMAKE_CUDA_COMPILER OR NOT "$ENV{CUDACXX}" STREQUAL "")
    return()
  endif()
  find_program(DIFFULEX_NVCC nvcc
    HINTS "$ENV{CUDA_HOME}/bin" "$ENV{CUDA_PATH}/bin" PATHS /usr/local/cuda/bin)
  mark_as_advanced(DIFFULEX_NVCC)
  if(DIFFULEX_NVCC)
    set(CMAKE_CUDA_COMPILER "${DIFFULEX_NVCC}" CACHE FILEPATH "CUDA compiler")
  endif()
endfunction()

# A macro: enable_language and its results belong to the caller's scope.
macro(_diffulex_enable_cuda)
  diffulex_select_cuda_archs()
  if(DEFINED CACHE{CMAKE_CUDA_ARCHITECTURES} AND NOT DIFFULEX_INTERNAL_CUDA_ARCHITECTURES)
    message(WARNING
      "CMAKE_CUDA_ARCHITECTURES is ignored (the source groups need different lists), "
      "use DIFFULEX_CUDA_ARCHS")
  endif()
  # Must exist before the language is checked: CMake would otherwise pick nvcc's default, which is
  # older than what is supported.
  set(CMAKE_CUDA_ARCHITECTURES "${DIFFULEX_CUDA_ARCHS_PORTABLE}")
  _diffulex_find_nvcc()
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    diffulex_check_nvcc("${CMAKE_CUDA_COMPILER_VERSION}")
    # enable_language writes the cache entry; remember that it is not the user's.
    set(DIFFULEX_INTERNAL_CUDA_ARCHITECTURES ON CACHE INTERNAL "")
    find_package(CUDAToolkit REQUIRED)
    set(DIFFULEX_CUDA_ENABLED ON)
  endif()
endmacro()

set(DIFFULEX_CUDA_ENABLED OFF)
if(DIFFULEX_WITH_CUDA STREQUAL "AUTO")
  if(DIFFULEX_BUILD_OPS AND NOT DIFFULEX_TORCH_CUDA_VERSION)
    message(STATUS "CUDA: off, the torch found is a CPU build (-DDIFFULEX_WITH_CUDA=ON forces it)")
  else()
    _diffulex_enable_cuda()
    if(NOT DIFFULEX_CUDA_ENABLED)
      message(STATUS "CUDA: off, no working nvcc found")
    endif()
  endif()
elseif(DIFFULEX_WITH_CUDA)
  _diffulex_enable_cuda()
  if(NOT DIFFULEX_CUDA_ENABLED)
    message(FATAL_ERROR
      "DIFFULEX_WITH_CUDA=ON: expected a working nvcc (environment CUDACXX, PATH or "
      "/usr/local/cuda/bin), got none")
  endif()
else()
  message(STATUS "CUDA: off (DIFFULEX_WITH_CUDA=${DIFFULEX_WITH_CUDA})")
endif()

if(DIFFULEX_CUDA_ENABLED)
  message(STATUS "CUDA: nvcc ${CMAKE_CUDA_COMPILER_VERSION}, profile ${DIFFULEX_CUDA_PROFILE}")
endif()

# diffulex_cuda_options(<target>): nvcc flags of every target that compiles .cu files.
function(diffulex_cuda_options target)
  set(flags --expt-relaxed-constexpr -Xptxas=-warn-spills -Xcompiler=-fPIC,-fvisibility=hidden)
  if(DIFFULEX_CUDA_LINE_INFO)
    list(APPEND flags -lineinfo)
  endif()
  if(DIFFULEX_CUDA_VERBOSE)
    list(APPEND flags -Xptxas=-v)
  endif()
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:${flags}>")
endfunction()

# diffulex_add_cuda_group(<name> <architectures> <sources>...): OBJECT library diffulex_cuda_<name>.
function(diffulex_add_cuda_group name archs)
  set(target diffulex_cuda_${name})
  add_library(${target} OBJECT ${ARGN})
  set_target_properties(${target} PROPERTIES CUDA_ARCHITECTURES "${archs}")
  diffulex_cuda_options(${target})
  diffulex_set_warnings(${target})
  target_link_libraries(${target} PRIVATE
    diffulex_core diffulex_private_headers diffulex_cuda_definitions CUDA::cudart_static)
endfunction()
