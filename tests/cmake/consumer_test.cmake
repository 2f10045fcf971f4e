# SPDX-License-Identifier: Apache-2.0
#
# Installs the build tree, moves the prefix, and uses it from other projects: tests/cmake/consumer
# (once with diffulex::core only, once with diffulex::kernels), examples/cpp_embed
# and examples/edge_embed (diffulex::edge).
cmake_minimum_required(VERSION 3.25)

function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE code OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT code EQUAL 0)
    string(REPLACE ";" " " command "${ARGN}")
    message(FATAL_ERROR "${command}: exit status ${code}\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

# build_with(<project directory> <name> <cache entries>...)
function(build_with project name)
  run("${CMAKE_COMMAND}" -S "${project}" -B "${WORK_DIR}/${name}" -G "${GENERATOR}"
    "-DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM}" "-DCMAKE_CXX_COMPILER=${COMPILER}"
    "-DCMAKE_BUILD_TYPE=${BUILD_TYPE}" "-DCMAKE_PREFIX_PATH=${WORK_DIR}/moved"
    -DCMAKE_FIND_USE_PACKAGE_REGISTRY=OFF ${ARGN})
  run("${CMAKE_COMMAND}" --build "${WORK_DIR}/${name}")
endfunction()

file(REMOVE_RECURSE "${WORK_DIR}")
# A plain install: it must not contain the Python component.
run("${CMAKE_COMMAND}" --install "${BUILD_DIR}" --prefix "${WORK_DIR}/installed")
file(RENAME "${WORK_DIR}/installed" "${WORK_DIR}/moved")
if(EXISTS "${WORK_DIR}/moved/diffulex_ext")
  message(FATAL_ERROR "expected no Python file in a plain install, got diffulex_ext")
endif()
file(GLOB_RECURSE configs "${WORK_DIR}/moved/lib/cmake/*.cmake")
foreach(config IN LISTS configs)
  file(READ "${config}" text)
  foreach(path "${BUILD_DIR}" "${SOURCE_DIR}")
    string(FIND "${text}" "${path}" position)
    if(NOT position EQUAL -1)
      message(FATAL_ERROR "${config}: expected a relocatable package, got a path of ${path}")
    endif()
  endforeach()
endforeach()

foreach(component core kernels)
  build_with("${SOURCE_DIR}/tests/cmake/consumer" consumer_${component}
    -DCONSUMER_COMPONENT=${component} "-DCONSUMER_VERSION=${VERSION}")
  run("${WORK_DIR}/consumer_${component}/consumer")
  if(NOT output MATCHES "diffulex ${VERSION} ${component}")
    message(FATAL_ERROR "consumer: expected \"diffulex ${VERSION} ${component}\", got ${output}")
  endif()
endforeach()

foreach(example cpp_embed edge_embed)
  build_with("${SOURCE_DIR}/examples/${example}" ${example})
  run("${WORK_DIR}/${example}/${example}")
  message(STATUS "${output}")
endforeach()
