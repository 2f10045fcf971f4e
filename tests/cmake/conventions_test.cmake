# SPDX-License-Identifier: Apache-2.0
#
# Every source file starts with its licence line (after an interpreter line, if any) and stays within
# the budget of 600 lines (900 for a CUDA main loop and for the stub of the extension module, which is
# one module and cannot be split).
cmake_minimum_required(VERSION 3.25)

set(files "")
foreach(directory include csrc python cmake tests benchmarks examples scripts)
  foreach(extension h cpp cu cuh py pyi cmake sh)
    file(GLOB_RECURSE found "${SOURCE_DIR}/${directory}/*.${extension}")
    list(APPEND files ${found})
  endforeach()
endforeach()
# What an installation in place put beside the Python files.
list(FILTER files EXCLUDE REGEX "/python/diffulex_ext/(include|lib)/")
list(APPEND files "${SOURCE_DIR}/CMakeLists.txt" "${SOURCE_DIR}/setup.py")

foreach(file IN LISTS files)
  file(RELATIVE_PATH name "${SOURCE_DIR}" "${file}")
  file(READ "${file}" text)
  if(NOT text MATCHES "^(#![^\n]*\n)?(//|#) SPDX-License-Identifier: Apache-2\\.0\n")
    message(SEND_ERROR "${name}: expected the licence line first")
  endif()
  string(REGEX REPLACE "[^\n]" "" newlines "${text}")
  string(LENGTH "${newlines}" num_lines)
  set(budget 600)
  if(name MATCHES "/(mainloop\\.cuh|_core\\.pyi)$")
    set(budget 900)
  endif()
  if(num_lines GREATER budget)
    message(SEND_ERROR "${name}: expected at most ${budget} lines, got ${num_lines}")
  endif()
endforeach()
