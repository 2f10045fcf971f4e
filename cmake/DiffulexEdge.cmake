# SPDX-License-Identifier: Apache-2.0
#
# diffulex_edge: sessions over a model that the embedder supplies.

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
