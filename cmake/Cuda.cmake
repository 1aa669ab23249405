# CUDA back-ends: library moekit_cuda, beside moekit_core, which does not need it. Sets MOEKIT_WITH_CUDA.
#   MOEKIT_CUDA=OFF    no CUDA
#   MOEKIT_CUDA=AUTO   looks for nvcc >= 13.0; compiles CUDA code only where MOEKIT_CUDA_AUTO_BUILDS is on (preset
#                      `cuda`), so that a CPU developer with a toolkit does not pay for it
#   MOEKIT_CUDA=ON     needs nvcc >= 13.0
set(MOEKIT_CUDA "AUTO" CACHE STRING "AUTO, ON or OFF")
set_property(CACHE MOEKIT_CUDA PROPERTY STRINGS AUTO ON OFF)
option(MOEKIT_CUDA_AUTO_BUILDS "MOEKIT_CUDA=AUTO compiles the CUDA code when a toolkit is there" OFF)
set(MOEKIT_CUDA_ARCHITECTURES "80;90a;100a;120a" CACHE STRING "Targets of the arch-neutral kernels")
set(moekit_cuda_minimum 13.0)
set(MOEKIT_WITH_CUDA OFF)

function(moekit_find_nvcc version)
  find_program(MOEKIT_NVCC nvcc HINTS ENV CUDACXX ENV CUDA_HOME ENV CUDA_PATH PATH_SUFFIXES bin)
  set(found "")
  if(MOEKIT_NVCC)
    execute_process(COMMAND ${MOEKIT_NVCC} --version OUTPUT_VARIABLE text ERROR_QUIET)
    if(text MATCHES "V([0-9]+\\.[0-9]+\\.[0-9]+)")
      set(found ${CMAKE_MATCH_1})
    endif()
  endif()
  set(${version} "${found}" PARENT_SCOPE)
endfunction()

if(MOEKIT_CUDA STREQUAL "OFF")
  message(STATUS "CUDA: off (MOEKIT_CUDA=OFF)")
  return()
endif()
moekit_find_nvcc(nvcc_version)
if(nvcc_version STREQUAL "" OR nvcc_version VERSION_LESS moekit_cuda_minimum)
  set(reason "nvcc >= ${moekit_cuda_minimum} was not found (found: '${nvcc_version}')")
  if(MOEKIT_CUDA STREQUAL "ON")
    message(FATAL_ERROR "MOEKIT_CUDA=ON, but ${reason}; put nvcc on the PATH or set MOEKIT_CUDA=OFF")
  endif()
  message(STATUS "CUDA: off, ${reason}")
  return()
endif()
if(MOEKIT_CUDA STREQUAL "AUTO" AND NOT MOEKIT_CUDA_AUTO_BUILDS)
  message(STATUS "CUDA: off; nvcc ${nvcc_version} is here, preset `cuda` or MOEKIT_CUDA=ON compiles the CUDA back-ends")
  return()
endif()

if(NOT CMAKE_CUDA_COMPILER)
  set(CMAKE_CUDA_COMPILER ${MOEKIT_NVCC})
endif()
# CMake asks for a default; every target below names its own.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 80)
endif()
if(CCACHE_PROGRAM)
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
endif()
enable_language(CUDA)
# CMake 3.25 does not know how nvcc 13 is asked for C++20.
if(NOT "cuda_std_20" IN_LIST CMAKE_CUDA_COMPILE_FEATURES)
  list(APPEND CMAKE_CUDA_COMPILE_FEATURES cuda_std_20)
  set(CMAKE_CUDA20_COMPILE_FEATURES cuda_std_20)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
endif()
set(CMAKE_CUDA_STANDARD 20)
find_package(CUDAToolkit ${moekit_cuda_minimum} REQUIRED)
set(MOEKIT_WITH_CUDA ON)
message(STATUS "CUDA: on, nvcc ${nvcc_version}, arch-neutral kernels for ${MOEKIT_CUDA_ARCHITECTURES}")

# Everything that CUDA objects share. The host side keeps the project's warnings.
add_library(moekit_cuda_settings INTERFACE)
target_include_directories(moekit_cuda_settings INTERFACE
  ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
target_compile_options(moekit_cuda_settings INTERFACE
  $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr -lineinfo -Xcompiler=-Wall -Xptxas=-warn-spills>
  # Reference and router arithmetic is defined without fused multiply-add (DESIGN section 3); kernels that may fuse
  # write fmaf themselves.
  $<$<COMPILE_LANGUAGE:CUDA>:-fmad=false>)
target_link_libraries(moekit_cuda_settings INTERFACE CUDA::cudart_static)

# Everything that needs CUDA, for tests and benches; moekit itself opens the plug-in
# moekit_cuda_plugin (src/experts/cuda).
add_library(moekit_cuda STATIC)
target_link_libraries(moekit_cuda PUBLIC moekit_cuda_settings moekit_core)

# moekit_cuda_library(NAME ARCHITECTURES... -- SOURCES...): objects compiled for a list of targets. nvcc does not
# take fmt, so that a .cu may include no header that does (base/check.h among them).
function(moekit_cuda_library name)
  list(FIND ARGN "--" dashes)
  list(SUBLIST ARGN 0 ${dashes} architectures)
  math(EXPR first "${dashes} + 1")
  list(SUBLIST ARGN ${first} -1 sources)
  list(TRANSFORM architectures APPEND "-real")
  add_library(${name} OBJECT ${sources})
  set_target_properties(${name} PROPERTIES CUDA_ARCHITECTURES "${architectures}")
  target_link_libraries(${name} PRIVATE moekit_cuda_settings)
endfunction()

# The same as a part of moekit_cuda.
function(moekit_cuda_objects name)
  moekit_cuda_library(${name} ${ARGN})
  target_sources(moekit_cuda PRIVATE $<TARGET_OBJECTS:${name}>)
endfunction()

add_subdirectory(${PROJECT_SOURCE_DIR}/src/device/cuda)
add_subdirectory(${PROJECT_SOURCE_DIR}/src/router/cuda)
add_subdirectory(${PROJECT_SOURCE_DIR}/src/experts/cuda)
add_subdirectory(${PROJECT_SOURCE_DIR}/kernels)
