# Headers that most files include are parsed once a target instead of once a file, and the program's files share what
# they instantiate. MOEKIT_PRECOMPILE=OFF (presets debug and clang) compiles each file alone, and TESTS (preset asan)
# each file of the product, so that it still has to include what it uses.
set(MOEKIT_PRECOMPILE ON CACHE STRING "Precompile the headers that most files include: ON, OFF or TESTS")

# Files with flags of their own could not read what was compiled without them.
function(moekit_precompile target)
  if(NOT MOEKIT_PRECOMPILE OR (MOEKIT_PRECOMPILE STREQUAL TESTS AND NOT target MATCHES "^test_"))
    return()
  endif()
  get_target_property(sources ${target} SOURCES)
  foreach(source ${sources})
    foreach(property COMPILE_OPTIONS COMPILE_DEFINITIONS)
      get_source_file_property(own ${source} TARGET_DIRECTORY ${target} ${property})
      if(own)
        set_source_files_properties(${source} TARGET_DIRECTORY ${target} PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
      endif()
    endforeach()
  endforeach()
  target_precompile_headers(${target} PRIVATE ${ARGN})
endfunction()
