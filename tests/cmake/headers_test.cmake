# SPDX-License-Identifier: Apache-2.0
#
# Every public header compiles alone, twice included, without warnings, in the given standard.
cmake_minimum_required(VERSION 3.25)

file(REMOVE_RECURSE "${WORK_DIR}")
file(MAKE_DIRECTORY "${WORK_DIR}")
file(GLOB_RECURSE headers RELATIVE "${INCLUDE_DIR}" "${INCLUDE_DIR}/*.h")
file(GLOB_RECURSE generated RELATIVE "${GENERATED_DIR}" "${GENERATED_DIR}/*.h")
list(LENGTH headers count)
if(count LESS 3 OR NOT "diffulex/version.h" IN_LIST generated)
  message(FATAL_ERROR "expected public headers and diffulex/version.h, got ${headers};${generated}")
endif()

set(failed "")
foreach(header IN LISTS headers generated)
  file(WRITE "${WORK_DIR}/alone.cpp" "#include \"${header}\"\n#include \"${header}\"\n")
  execute_process(
    COMMAND "${COMPILER}" -std=c++${STANDARD} -fsyntax-only -Wall -Wextra -Wpedantic -Wshadow
            -Wconversion -Werror "-I${INCLUDE_DIR}" "-I${GENERATED_DIR}" "${WORK_DIR}/alone.cpp"
    RESULT_VARIABLE code ERROR_VARIABLE output)
  if(NOT code EQUAL 0)
    list(APPEND failed "${header}")
    message(NOTICE "${header}:\n${output}")
  endif()
endforeach()
if(failed)
  message(FATAL_ERROR "these headers do not compile alone as C++${STANDARD}: ${failed}")
endif()
