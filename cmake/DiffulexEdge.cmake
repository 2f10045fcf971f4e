# SPDX-License-Identifier: Apache-2.0
#
# diffulex_edge: sessions over a model that the embedder supplies. The program diffulex-edge-run, a model
# over ExecuTorch, is built where its C++ SDK is: in the directory or prefix EXECUTORCH_ROOT (a cache
# entry or an environment variable), or in the Python package executorch of the environment.

include("${CMAKE_CURRENT_LIST_DIR}/DiffulexPythonPackage.cmake")

add_library(diffulex_edge ${DIFFULEX_EDGE_SOURCES})
add_library(diffulex::edge ALIAS diffulex_edge)
set_target_properties(diffulex_edge PROPERTIES EXPORT_NAME edge)
target_link_libraries(diffulex_edge
  PUBLIC diffulex_kernels
  PRIVATE "$<BUILD_INTERFACE:diffulex_private_headers>")
diffulex_set_warnings(diffulex_edge)
if(BUILD_SHARED_LIBS)
  set_target_properties(diffulex_edge PROPERTIES INSTALL_RPATH "$ORIGIN")
endif()

if(NOT DIFFULEX_BUILD_EDGE MATCHES "^(AUTO|OFF)$")
  message(FATAL_ERROR "DIFFULEX_BUILD_EDGE: expected AUTO or OFF, got \"${DIFFULEX_BUILD_EDGE}\"")
endif()
# EXECUTORCH_ROOT is a hint of find_package as well.
if(POLICY CMP0144)
  cmake_policy(SET CMP0144 NEW)
endif()
if(DIFFULEX_BUILD_EDGE STREQUAL "AUTO")
  if(NOT EXECUTORCH_ROOT AND DEFINED ENV{EXECUTORCH_ROOT})
    set(EXECUTORCH_ROOT "$ENV{EXECUTORCH_ROOT}")
  endif()
  if(NOT EXECUTORCH_ROOT)
    if(NOT Python_EXECUTABLE)
      find_package(Python 3.10 QUIET COMPONENTS Interpreter)
    endif()
    diffulex_python_package_dir(EXECUTORCH_ROOT executorch)
  endif()
  find_package(executorch 1.5 CONFIG QUIET
    HINTS "${EXECUTORCH_ROOT}" "${EXECUTORCH_ROOT}/share/cmake" "${EXECUTORCH_ROOT}/lib/cmake")
  if(executorch_FOUND)
    message(STATUS "ExecuTorch ${executorch_VERSION}: ${executorch_DIR}")
    add_subdirectory(examples/edge_runner)
    foreach(target edge_executorch diffulex-edge-run)
      diffulex_set_warnings(${target})
    endforeach()
  elseif(EXECUTORCH_ROOT)
    message(FATAL_ERROR
      "EXECUTORCH_ROOT: expected the C++ SDK of ExecuTorch >= 1.5, got ${EXECUTORCH_ROOT}")
  else()
    message(STATUS "ExecuTorch: not found, diffulex-edge-run is not built")
  endif()
endif()
