# Headers that most files include are parsed once a target instead of once a file, and the program's files share what
# they instantiate. What MOEKIT_PRECOMPILE=OFF builds (presets debug and clang) compiles each file alone, so that a
# file still has to include what it uses.
option(MOEKIT_PRECOMPILE "Precompile the headers that most files include" ON)

# Files with flags of their own could not read what was compiled without them.
function(moekit_precompile target)
  if(NOT MOEKIT_PRECOMPILE)
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
