# SPDX-License-Identifier: Apache-2.0
#
# diffulex_kernels: CPU kernels with their ISA variants, and the CUDA groups when CUDA is built.
# Sets DIFFULEX_BUILD_CPU_ISA_VARIANTS, DIFFULEX_BUILD_CUDA_{VERSION,ARCHS,PROFILE}.

add_library(diffulex_kernels
  ${DIFFULEX_KERNELS_COMMON_SOURCES}
  ${DIFFULEX_KERNELS_CPU_SOURCES})
add_library(diffulex::kernels ALIAS diffulex_kernels)
set_target_properties(diffulex_kernels PROPERTIES EXPORT_NAME kernels)
target_link_libraries(diffulex_kernels
  PUBLIC diffulex_core
  PRIVATE "$<BUILD_INTERFACE:diffulex_private_headers>")
diffulex_set_warnings(diffulex_kernels)
if(BUILD_SHARED_LIBS)
  set_target_properties(diffulex_core diffulex_kernels PROPERTIES INSTALL_RPATH
    "$<IF:$<PLATFORM_ID:Darwin>,@loader_path,$ORIGIN>")
endif()

# --- CPU -----------------------------------------------------------------------------------------

# The variants are the same loops for other instruction sets: one is enough to find races.
set(architecture OTHER_ARCH)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$" AND NOT DIFFULEX_SANITIZE MATCHES "thread")
  set(architecture X86_64)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$" AND NOT DIFFULEX_SANITIZE MATCHES "thread")
  set(architecture AARCH64)
endif()
target_sources(diffulex_kernels PRIVATE ${DIFFULEX_KERNELS_CPU_${architecture}_SOURCES})
set(DIFFULEX_BUILD_CPU_ISA_VARIANTS ${DIFFULEX_KERNELS_CPU_${architecture}_VARIANTS})
foreach(variant IN LISTS DIFFULEX_BUILD_CPU_ISA_VARIANTS)
  target_sources(diffulex_kernels PRIVATE ${DIFFULEX_KERNELS_CPU_ISA_${variant}_SOURCES})
  set_source_files_properties(${DIFFULEX_KERNELS_CPU_ISA_${variant}_SOURCES} PROPERTIES
    COMPILE_OPTIONS "${DIFFULEX_KERNELS_CPU_ISA_${variant}_FLAGS}")
endforeach()

# The scale of 4-bit weights is chosen by a sum of squares: the same one on every architecture.
set_source_files_properties(csrc/ops/quant/quantize_cpu.cpp PROPERTIES
  COMPILE_OPTIONS -ffp-contract=off)

# --- CUDA ----------------------------------------------------------------------------------------

set(DIFFULEX_BUILD_CUDA_VERSION "")
set(DIFFULEX_BUILD_CUDA_ARCHS "")
set(DIFFULEX_BUILD_CUDA_PROFILE "")

if(DIFFULEX_CUDA_ENABLED)
  set(DIFFULEX_BUILD_CUDA_VERSION "${CMAKE_CUDA_COMPILER_VERSION}")
  set(DIFFULEX_BUILD_CUDA_ARCHS "${DIFFULEX_CUDA_ARCHS_PORTABLE}")
  set(DIFFULEX_BUILD_CUDA_PROFILE "${DIFFULEX_CUDA_PROFILE}")
  string(TOUPPER "${DIFFULEX_CUDA_PROFILE}" profile)

  target_link_libraries(diffulex_kernels PRIVATE "$<LINK_ONLY:CUDA::cudart_static>")
  # The archive contains no unresolved device symbol; a plain C++ linker may link it.
  set_target_properties(diffulex_kernels PROPERTIES
    LINKER_LANGUAGE CXX CUDA_RESOLVE_DEVICE_SYMBOLS OFF)

  set(host_sources ${DIFFULEX_CUDA_HOST_SOURCES})
  if(DIFFULEX_CUDA_ARCHS_SM90)
    list(APPEND host_sources ${DIFFULEX_CUDA_SM90_HOST_SOURCES})
  else()
    target_sources(diffulex_kernels PRIVATE ${DIFFULEX_CUDA_SM90_ABSENT_SOURCES})
  endif()
  if(host_sources)
    diffulex_add_cuda_group(host "${DIFFULEX_CUDA_ARCHS_PORTABLE}" ${host_sources})
    target_sources(diffulex_kernels PRIVATE "$<TARGET_OBJECTS:diffulex_cuda_host>")
  endif()

  foreach(group portable sm80 sm90)
    string(TOUPPER "${group}" upper)
    set(archs "${DIFFULEX_CUDA_ARCHS_${upper}}")
    set(sources ${DIFFULEX_CUDA_${upper}_SOURCES} ${DIFFULEX_CUDA_${upper}_${profile}_SOURCES})
    if(archs AND NOT group STREQUAL "portable")
      diffulex_attention_units(units ${group} "${DIFFULEX_CUDA_PROFILE}")
      list(APPEND sources ${units})
    endif()
    if(archs AND sources)
      diffulex_add_cuda_group(${group} "${archs}" ${sources})
      target_sources(diffulex_kernels PRIVATE "$<TARGET_OBJECTS:diffulex_cuda_${group}>")
    endif()
  endforeach()
else()
  target_sources(diffulex_kernels PRIVATE
    ${DIFFULEX_CUDA_ABSENT_SOURCES} ${DIFFULEX_CUDA_SM90_ABSENT_SOURCES})
endif()
