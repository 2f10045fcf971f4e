# SPDX-License-Identifier: Apache-2.0
#
# Component dev: libraries, headers and the CMake package, relocatable. Component python: the two
# plugins; left out of a plain `cmake --install`, which must not scatter Python files in a prefix.

include(CMakePackageConfigHelpers)

# Fixed names: the Python package data and the documentation rely on them.
set(diffulex_lib_dir lib)
set(diffulex_config_dir lib/cmake/diffulex)

install(TARGETS diffulex_core diffulex_kernels diffulex_edge EXPORT diffulexTargets
  ARCHIVE DESTINATION ${diffulex_lib_dir} COMPONENT dev
  LIBRARY DESTINATION ${diffulex_lib_dir} COMPONENT dev)
install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/diffulex" DESTINATION include COMPONENT dev
  FILES_MATCHING PATTERN "*.h" PATTERN "*.def")
install(FILES "${PROJECT_BINARY_DIR}/include/diffulex/version.h"
  DESTINATION include/diffulex COMPONENT dev)
install(EXPORT diffulexTargets NAMESPACE diffulex:: DESTINATION ${diffulex_config_dir} COMPONENT dev)
configure_package_config_file(cmake/diffulexConfig.cmake.in
  "${PROJECT_BINARY_DIR}/diffulexConfig.cmake" INSTALL_DESTINATION ${diffulex_config_dir}
  NO_SET_AND_CHECK_MACRO NO_CHECK_REQUIRED_COMPONENTS_MACRO)
write_basic_package_version_file("${PROJECT_BINARY_DIR}/diffulexConfigVersion.cmake"
  COMPATIBILITY SameMinorVersion)
install(FILES
  "${PROJECT_BINARY_DIR}/diffulexConfig.cmake" "${PROJECT_BINARY_DIR}/diffulexConfigVersion.cmake"
  DESTINATION ${diffulex_config_dir} COMPONENT dev)

if(TARGET diffulex-edge-run)
  install(TARGETS diffulex-edge-run RUNTIME DESTINATION bin COMPONENT edge)
endif()

foreach(plugin _core diffulex_ops)
  if(TARGET ${plugin})
    install(TARGETS ${plugin}
      LIBRARY DESTINATION diffulex_ext COMPONENT python EXCLUDE_FROM_ALL)
  endif()
endforeach()
