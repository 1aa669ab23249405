# Target check_headers: headers are compiled alone, twice in a row, so that they include what they use and guard
# themselves. c_api.h is compiled as C11 too. A header whose .cc stands beside it is left out: that file includes it first
# (tools/check_layers.py) and is compiled without precompiled headers by the presets debug, asan and clang. Part of no
# default build.
file(GLOB_RECURSE moekit_headers CONFIGURE_DEPENDS RELATIVE ${PROJECT_SOURCE_DIR}
  include/moekit/*.h src/*.h)
# Fragments that are compiled once per instruction set inside another file.
list(FILTER moekit_headers EXCLUDE REGEX "-inl\\.h$|_inl\\.h$")

# Headers of cuda/ folders need the toolkit.
if(NOT MOEKIT_WITH_CUDA)
  list(FILTER moekit_headers EXCLUDE REGEX "/cuda/")
endif()

set(check_headers_sources)
foreach(header ${moekit_headers})
  string(REGEX REPLACE "^(include|src)/" "" name ${header})
  string(REPLACE "/" "__" stem ${name})
  string(REGEX REPLACE "h$" "cc" own_source ${PROJECT_SOURCE_DIR}/${header})
  if(EXISTS ${own_source})
    continue()
  endif()
  set(source ${PROJECT_BINARY_DIR}/check_headers/${stem}.cc)
  file(CONFIGURE OUTPUT ${source} CONTENT "#include \"${name}\"\n#include \"${name}\"\n")
  list(APPEND check_headers_sources ${source})
endforeach()
if(EXISTS ${PROJECT_SOURCE_DIR}/include/moekit/c_api.h)
  set(source ${PROJECT_BINARY_DIR}/check_headers/moekit__c_api.c)
  file(CONFIGURE OUTPUT ${source} CONTENT "#include \"moekit/c_api.h\"\n#include \"moekit/c_api.h\"\n")
  list(APPEND check_headers_sources ${source})
endif()
add_library(check_headers OBJECT EXCLUDE_FROM_ALL ${check_headers_sources})
set_target_properties(check_headers PROPERTIES C_STANDARD 11 C_STANDARD_REQUIRED ON C_EXTENSIONS OFF)
target_link_libraries(check_headers PRIVATE moekit_core
  nlohmann_json::nlohmann_json)
if(MOEKIT_WITH_CUDA)
  target_include_directories(check_headers PRIVATE ${PROJECT_SOURCE_DIR})
  target_include_directories(check_headers SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
endif()
target_compile_options(check_headers PRIVATE $<$<COMPILE_LANGUAGE:C>:-pedantic-errors>)
