# SPDX-License-Identifier: Apache-2.0
#
# diffulex_python_package_dir(<variable> <package>): directory of an installed Python package, or empty.
# The package is located, never imported. Tried in order:
#   1. the interpreter of the build in its current environment,
#   2. the same interpreter with -I: pip isolates a build through PYTHONPATH and a sitecustomize module,
#      which -I ignores, so the user's own site-packages become visible again,
#   3. the interpreter of an active virtual or conda environment, with -I.

function(_diffulex_probe_package result package)
  set(${result} "" PARENT_SCOPE)
  set(probe "import importlib.util as u
s = u.find_spec('${package}')
print((list(s.submodule_search_locations or ['']) or [''])[0] if s else '')")
  execute_process(
    COMMAND ${ARGN} -c "${probe}"
    # A source checkout of the package in the current directory must not be found.
    WORKING_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}"
    OUTPUT_VARIABLE output ERROR_QUIET RESULT_VARIABLE code OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(code EQUAL 0 AND output AND IS_DIRECTORY "${output}")
    file(TO_CMAKE_PATH "${output}" output)
    set(${result} "${output}" PARENT_SCOPE)
  endif()
endfunction()

function(diffulex_python_package_dir result package)
  set(interpreters "")
  if(Python_EXECUTABLE)
    list(APPEND interpreters "${Python_EXECUTABLE}" "${Python_EXECUTABLE}|-I")
  endif()
  foreach(prefix "$ENV{VIRTUAL_ENV}" "$ENV{CONDA_PREFIX}")
    if(prefix AND EXISTS "${prefix}/bin/python")
      list(APPEND interpreters "${prefix}/bin/python|-I")
    endif()
  endforeach()
  foreach(interpreter IN LISTS interpreters)
    string(REPLACE "|" ";" command "${interpreter}")
    _diffulex_probe_package(directory ${package} ${command})
    if(directory)
      break()
    endif()
  endforeach()
  set(${result} "${directory}" PARENT_SCOPE)
endfunction()
