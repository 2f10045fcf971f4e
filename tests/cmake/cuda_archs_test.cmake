# SPDX-License-Identifier: Apache-2.0
#
# The mapping of requested CUDA architectures to source groups, and the oldest compiler. The rejected requests are tried in a
# child process, because an error ends the script.
cmake_minimum_required(VERSION 3.25)

include("${SOURCE_DIR}/cmake/DiffulexCudaArchs.cmake")

if(DEFINED REQUEST)
  if(REQUEST MATCHES "^nvcc (.*)$")
    diffulex_check_nvcc("${CMAKE_MATCH_1}")
  else()
    diffulex_parse_cuda_archs("${REQUEST}")
  endif()
  return()
endif()

function(expect_archs requested portable sm90)
  diffulex_parse_cuda_archs("${requested}")
  if(NOT "${DIFFULEX_CUDA_ARCHS_PORTABLE}" STREQUAL "${portable}"
     OR NOT "${DIFFULEX_CUDA_ARCHS_SM80}" STREQUAL "${portable}"
     OR NOT "${DIFFULEX_CUDA_ARCHS_SM90}" STREQUAL "${sm90}")
    message(SEND_ERROR
      "\"${requested}\": expected \"${portable}\" and \"${sm90}\", got "
      "\"${DIFFULEX_CUDA_ARCHS_PORTABLE}\", \"${DIFFULEX_CUDA_ARCHS_SM80}\" and "
      "\"${DIFFULEX_CUDA_ARCHS_SM90}\"")
  endif()
endfunction()

function(expect_rejected requested message)
  execute_process(
    COMMAND "${CMAKE_COMMAND}" "-DSOURCE_DIR=${SOURCE_DIR}" "-DREQUEST=${requested}"
            -P "${CMAKE_CURRENT_FUNCTION_LIST_FILE}"
    RESULT_VARIABLE code ERROR_VARIABLE error OUTPUT_QUIET)
  string(REGEX REPLACE "[ \n]+" " " error "${error}")
  string(FIND "${error}" "${message}" position)
  if(code EQUAL 0 OR position EQUAL -1)
    message(SEND_ERROR "\"${requested}\": expected the error \"${message}\", got ${code}: ${error}")
  endif()
endfunction()

expect_archs("9.0" "90a-real" "90a-real")
expect_archs("9.0a" "90a-real" "90a-real")
expect_archs("8.0" "80-real" "")
expect_archs("8.6" "86-real" "")
expect_archs("8.9" "89-real" "")
expect_archs("10.0" "100-real" "")
expect_archs("12.0" "120-real" "")
expect_archs("8.0;9.0" "80-real;90a-real" "90a-real")
expect_archs("8.0 9.0" "80-real;90a-real" "90a-real")
expect_archs("8.0,9.0, 9.0a" "80-real;90a-real" "90a-real")
expect_archs("8.0+PTX" "80-real;80-virtual" "")
expect_archs("9.0+PTX" "90a-real;90-virtual" "90a-real")
expect_archs("8.0;9.0;9.0+PTX" "80-real;90a-real;90-virtual" "90a-real")
expect_archs("8.0+PTX;9.0" "80-real;90a-real;80-virtual" "90a-real")
diffulex_check_nvcc("12.4.99")
diffulex_check_nvcc("13.0.48")
expect_rejected("nvcc 12.3.107" "expected nvcc 12.4 or newer")
expect_rejected("nvcc 12.3.107" "DIFFULEX_WITH_CUDA=OFF builds without), got 12.3.107")
expect_rejected("7.5" "expected 8.0 or newer, got \"7.5\"")
expect_rejected("7.5 8.0+PTX" "expected 8.0 or newer, got \"7.5\"")
expect_rejected("80" "expected entries like 8.0, 9.0 or 9.0+PTX, got \"80\"")
expect_rejected("Hopper" "got \"Hopper\"")
expect_rejected(" ," "expected at least one architecture, got none")
