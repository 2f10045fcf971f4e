# SPDX-License-Identifier: Apache-2.0
#
# Every source file stands in exactly one list of cmake/sources, and every listed file exists: a file
# that nobody compiles, or a test that nobody runs, is noticed.
cmake_minimum_required(VERSION 3.25)

file(GLOB lists "${SOURCE_DIR}/cmake/sources/*.cmake")
set(listed "")
foreach(file IN LISTS lists)
  file(STRINGS "${file}" lines REGEX "^[^#]*\\.(cpp|cu)")
  foreach(line IN LISTS lines)
    string(REGEX MATCHALL "[A-Za-z0-9_/.]+\\.(cpp|cu)" entries "${line}")
    list(APPEND listed ${entries})
  endforeach()
endforeach()

include("${SOURCE_DIR}/cmake/sources/core.cmake")
list(APPEND listed ${DIFFULEX_STRATEGY_SOURCES})

set(present "")
foreach(directory csrc tests/cpp benchmarks/cpp)
  foreach(extension cpp cu)
    file(GLOB_RECURSE files RELATIVE "${SOURCE_DIR}" "${SOURCE_DIR}/${directory}/*.${extension}")
    list(APPEND present ${files})
  endforeach()
endforeach()

set(unlisted ${present})
list(REMOVE_ITEM unlisted ${listed})
set(missing ${listed})
list(REMOVE_ITEM missing ${present})
set(unique ${listed})
list(REMOVE_DUPLICATES unique)
if(unlisted)
  message(SEND_ERROR "in the tree but in no list of cmake/sources: ${unlisted}")
endif()
if(missing)
  message(SEND_ERROR "listed in cmake/sources but not in the tree: ${missing}")
endif()
if(NOT unique STREQUAL listed)
  message(SEND_ERROR "a file is listed twice in cmake/sources: ${listed}")
endif()
