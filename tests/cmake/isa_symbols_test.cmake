# SPDX-License-Identifier: Apache-2.0
#
# An ISA variant shares no function with baseline code. The linker keeps one copy of an inline function
# or template instance (a weak symbol) for the whole program; if it took the one compiled for a wide
# instruction set, baseline code would stop on an older CPU.
cmake_minimum_required(VERSION 3.25)

execute_process(COMMAND "${NM}" -A -C --defined-only "${ARCHIVE}"
  OUTPUT_VARIABLE symbols ERROR_VARIABLE error RESULT_VARIABLE code)
if(NOT code EQUAL 0)
  message(FATAL_ERROR "${NM} ${ARCHIVE}: ${error}")
endif()

string(REPLACE "," ";" sources "${SOURCES}")
foreach(source IN LISTS sources)
  get_filename_component(name "${source}" NAME)
  string(REPLACE "." "\\." name "${name}")
  string(REPLACE ";" "," symbols "${symbols}")
  string(REGEX MATCHALL "[^\n]*:${name}\\.o:[^\n]*" members "${symbols}")
  if(NOT members)
    message(SEND_ERROR "${ARCHIVE}: expected the object of ${source}, got none")
  endif()
  foreach(line IN LISTS members)
    if(line MATCHES " [WVu] ")
      message(SEND_ERROR "${source}: expected no symbol shared with other objects, got ${line}")
    endif()
  endforeach()
endforeach()
