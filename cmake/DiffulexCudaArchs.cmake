# SPDX-License-Identifier: Apache-2.0
#
# Which CUDA architectures each source group is compiled for. Usable in script mode (the tests do).
#
#   requested                      portable and sm80 groups      sm90 group
#   9.0 (or 9.0a)                  90a-real                      90a-real
#   8.0, 8.6, 8.9, 10.0, 12.0 ...  that -real                    not built
#   8.0;9.0                        80-real;90a-real              90a-real
#   X+PTX                          adds X-virtual (never 90a)    never

# The oldest CUDA whose compiler and headers the sources were written for.
set(DIFFULEX_CUDA_LEAST 12.4)

# diffulex_check_nvcc(<version>): an error for an older compiler, which would stop in the middle of a build.
function(diffulex_check_nvcc version)
  if(version VERSION_LESS DIFFULEX_CUDA_LEAST)
    message(FATAL_ERROR
      "CUDA: expected nvcc ${DIFFULEX_CUDA_LEAST} or newer (CUDACXX names another one, "
      "-DDIFFULEX_WITH_CUDA=OFF builds without), got ${version}")
  endif()
endfunction()

# diffulex_parse_cuda_archs(<list>): sets DIFFULEX_CUDA_ARCHS_PORTABLE, _SM80 and _SM90 in the caller.
function(diffulex_parse_cuda_archs requested)
  string(REGEX REPLACE "[ ,;\t\n]+" ";" entries "${requested}")
  set(real "")
  set(virtual "")
  set(hopper "")
  foreach(entry IN LISTS entries)
    if(entry STREQUAL "")
      continue()
    endif()
    if(NOT entry MATCHES "^([0-9]+)\\.([0-9])a?(\\+PTX)?$")
      message(FATAL_ERROR
        "DIFFULEX_CUDA_ARCHS: expected entries like 8.0, 9.0 or 9.0+PTX, got \"${entry}\"")
    endif()
    set(number "${CMAKE_MATCH_1}${CMAKE_MATCH_2}")
    set(wants_ptx "${CMAKE_MATCH_3}")
    if(number LESS 80)
      message(FATAL_ERROR "DIFFULEX_CUDA_ARCHS: expected 8.0 or newer, got \"${entry}\"")
    endif()
    if(number EQUAL 90)
      list(APPEND real 90a-real)
      set(hopper 90a-real)
    else()
      list(APPEND real ${number}-real)
    endif()
    if(wants_ptx)
      list(APPEND virtual ${number}-virtual)
    endif()
  endforeach()
  if(NOT real)
    message(FATAL_ERROR "DIFFULEX_CUDA_ARCHS: expected at least one architecture, got none")
  endif()
  set(archs ${real} ${virtual})
  list(REMOVE_DUPLICATES archs)
  set(DIFFULEX_CUDA_ARCHS_PORTABLE "${archs}" PARENT_SCOPE)
  set(DIFFULEX_CUDA_ARCHS_SM80 "${archs}" PARENT_SCOPE)
  set(DIFFULEX_CUDA_ARCHS_SM90 "${hopper}" PARENT_SCOPE)
endfunction()

# diffulex_detect_cuda_archs(<variable>): compute capabilities of the visible devices, or empty.
function(diffulex_detect_cuda_archs result)
  set(${result} "" PARENT_SCOPE)
  find_program(DIFFULEX_NVIDIA_SMI nvidia-smi)
  mark_as_advanced(DIFFULEX_NVIDIA_SMI)
  if(NOT DIFFULEX_NVIDIA_SMI)
    return()
  endif()
  execute_process(
    COMMAND "${DIFFULEX_NVIDIA_SMI}" --query-gpu=compute_cap --format=csv,noheader
    OUTPUT_VARIABLE output ERROR_QUIET RESULT_VARIABLE code OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(NOT code EQUAL 0)
    return()
  endif()
  string(REGEX MATCHALL "[0-9]+\\.[0-9]" capabilities "${output}")
  list(REMOVE_DUPLICATES capabilities)
  set(usable "")
  foreach(capability IN LISTS capabilities)
    if(capability VERSION_LESS 8.0)
      message(WARNING "a device of compute capability ${capability} is left out: 8.0 is the minimum")
    else()
      list(APPEND usable ${capability})
    endif()
  endforeach()
  set(${result} "${usable}" PARENT_SCOPE)
endfunction()

# diffulex_select_cuda_archs(): option, environment, visible devices, default; prints the choice.
function(diffulex_select_cuda_archs)
  if(NOT "${DIFFULEX_CUDA_ARCHS}" STREQUAL "")
    set(requested "${DIFFULEX_CUDA_ARCHS}")
    set(origin "DIFFULEX_CUDA_ARCHS")
  elseif(NOT "$ENV{TORCH_CUDA_ARCH_LIST}" STREQUAL "")
    set(requested "$ENV{TORCH_CUDA_ARCH_LIST}")
    set(origin "environment TORCH_CUDA_ARCH_LIST")
  else()
    diffulex_detect_cuda_archs(requested)
    set(origin "visible devices")
    if(NOT requested)
      set(requested "8.0+PTX;9.0")
      set(origin "default")
    endif()
  endif()
  diffulex_parse_cuda_archs("${requested}")
  message(STATUS "CUDA architectures: ${DIFFULEX_CUDA_ARCHS_PORTABLE} (${origin}: ${requested})")
  foreach(group PORTABLE SM80 SM90)
    set(DIFFULEX_CUDA_ARCHS_${group} "${DIFFULEX_CUDA_ARCHS_${group}}" PARENT_SCOPE)
  endforeach()
endfunction()
