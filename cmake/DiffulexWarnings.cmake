# SPDX-License-Identifier: Apache-2.0
#
# diffulex_set_warnings(<target>...): warnings of the project's own C++ files. CUDA files are left out:
# nvcc hands the host compiler generated code that these options complain about.

function(diffulex_set_warnings)
  set(flags -Wall -Wextra -Wpedantic -Wshadow -Wconversion)
  if(DIFFULEX_WERROR)
    list(APPEND flags -Werror)
  endif()
  foreach(target IN LISTS ARGN)
    target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:${flags}>")
  endforeach()
endfunction()
