# SPDX-License-Identifier: Apache-2.0
#
# Finds torch without importing it and defines diffulex_torch_stable: its stable binary interface, the
# only part of torch this project compiles against. torch's own CMake package is not used: it ignores
# CMAKE_CUDA_ARCHITECTURES, changes the C++ standard by version and drags in the full CUDA toolkit.
#
# Sets DIFFULEX_TORCH_PACKAGE_DIR, DIFFULEX_TORCH_VERSION, DIFFULEX_TORCH_CUDA_VERSION (empty for a CPU
# build), all of them ordinary variables: a build tree used again after torch changed must see the
# new one.

include("${CMAKE_CURRENT_LIST_DIR}/DiffulexPythonPackage.cmake")

set(DIFFULEX_TORCH_TARGET_VERSION 2.11)

function(_diffulex_torch_missing)
  message(FATAL_ERROR
    "DiffulexTorch: expected an installed torch >= ${DIFFULEX_TORCH_TARGET_VERSION}, got none\n"
    "Remedies:\n"
    "  1. install torch first, then repeat the build:\n"
    "       CPU:  pip install torch --index-url https://download.pytorch.org/whl/cpu\n"
    "       CUDA: pip install torch --index-url https://download.pytorch.org/whl/cu130\n"
    "  2. name an existing one: -DDIFFULEX_TORCH_DIR=<directory of the package torch>, or the\n"
    "     environment variable DIFFULEX_TORCH_DIR\n"
    "  3. build only the torch-free core: -DDIFFULEX_BUILD_OPS=OFF -DDIFFULEX_WITH_CUDA=OFF")
endfunction()

# Reads version.py as text.
function(_diffulex_torch_read_version directory)
  if(NOT EXISTS "${directory}/version.py")
    message(FATAL_ERROR
      "DiffulexTorch: expected the directory of the Python package torch, got \"${directory}\" "
      "(no version.py)")
  endif()
  file(READ "${directory}/version.py" text)
  if(NOT text MATCHES "__version__[^=\n]*= *['\"]([^'\"]+)['\"]")
    message(FATAL_ERROR "DiffulexTorch: expected __version__ in ${directory}/version.py, got none")
  endif()
  set(version "${CMAKE_MATCH_1}")
  set(cuda "")
  if(text MATCHES "(^|\n)cuda[^=\n]*= *['\"]([^'\"]+)['\"]")
    set(cuda "${CMAKE_MATCH_2}")
  endif()
  set(DIFFULEX_TORCH_VERSION "${version}" PARENT_SCOPE)
  set(DIFFULEX_TORCH_CUDA_VERSION "${cuda}" PARENT_SCOPE)
endfunction()

if(DIFFULEX_TORCH_DIR)
  set(DIFFULEX_TORCH_PACKAGE_DIR "${DIFFULEX_TORCH_DIR}")
elseif(DEFINED ENV{DIFFULEX_TORCH_DIR} AND NOT "$ENV{DIFFULEX_TORCH_DIR}" STREQUAL "")
  set(DIFFULEX_TORCH_PACKAGE_DIR "$ENV{DIFFULEX_TORCH_DIR}")
else()
  diffulex_python_package_dir(DIFFULEX_TORCH_PACKAGE_DIR torch)
endif()
if(NOT DIFFULEX_TORCH_PACKAGE_DIR)
  _diffulex_torch_missing()
endif()
file(TO_CMAKE_PATH "${DIFFULEX_TORCH_PACKAGE_DIR}" DIFFULEX_TORCH_PACKAGE_DIR)

_diffulex_torch_read_version("${DIFFULEX_TORCH_PACKAGE_DIR}")
string(REGEX MATCH "^[0-9]+\\.[0-9]+" _torch_release "${DIFFULEX_TORCH_VERSION}")
if(_torch_release VERSION_LESS DIFFULEX_TORCH_TARGET_VERSION
   OR NOT EXISTS "${DIFFULEX_TORCH_PACKAGE_DIR}/include/torch/csrc/stable/library.h")
  message(FATAL_ERROR
    "DiffulexTorch: expected torch >= ${DIFFULEX_TORCH_TARGET_VERSION} with the headers "
    "torch/csrc/stable, got ${DIFFULEX_TORCH_VERSION} in ${DIFFULEX_TORCH_PACKAGE_DIR}")
endif()
set(_torch_libraries
  "libtorch${CMAKE_SHARED_LIBRARY_SUFFIX}" "libtorch_cpu${CMAKE_SHARED_LIBRARY_SUFFIX}")
foreach(_library IN LISTS _torch_libraries)
  if(NOT EXISTS "${DIFFULEX_TORCH_PACKAGE_DIR}/lib/${_library}")
    message(FATAL_ERROR
      "DiffulexTorch: expected lib/${_library} in ${DIFFULEX_TORCH_PACKAGE_DIR}, got none")
  endif()
endforeach()

if(DIFFULEX_TORCH_CUDA_VERSION)
  set(_torch_flavour "CUDA ${DIFFULEX_TORCH_CUDA_VERSION}")
else()
  set(_torch_flavour "CPU")
endif()
message(STATUS
  "torch ${DIFFULEX_TORCH_VERSION} (${_torch_flavour}): ${DIFFULEX_TORCH_PACKAGE_DIR}")

add_library(diffulex_torch_stable INTERFACE)
target_include_directories(diffulex_torch_stable SYSTEM INTERFACE
  "${DIFFULEX_TORCH_PACKAGE_DIR}/include")
# Messages of torch's headers name their files.
target_compile_options(diffulex_torch_stable INTERFACE
  "$<$<COMPILE_LANGUAGE:CXX>:-ffile-prefix-map=${DIFFULEX_TORCH_PACKAGE_DIR}/include/=>")
target_compile_definitions(diffulex_torch_stable INTERFACE
  TORCH_STABLE_ONLY
  TORCH_TARGET_VERSION=0x020b000000000000)
list(TRANSFORM _torch_libraries PREPEND "${DIFFULEX_TORCH_PACKAGE_DIR}/lib/")
# Without --no-as-needed the linker drops libtorch.so, and with it the way to libtorch_cuda.so that the
# weak stream shim is resolved through on CUDA builds of torch. The linker of macOS drops none.
if(NOT APPLE)
  list(PREPEND _torch_libraries -Wl,--no-as-needed)
  list(APPEND _torch_libraries -Wl,--as-needed)
endif()
target_link_libraries(diffulex_torch_stable INTERFACE ${_torch_libraries})
