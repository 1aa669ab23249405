# What a wheel holds (MOEKIT_PYTHON=ON, set by pyproject.toml): the shared library beside the Python package, and the
# program among the environment's scripts. Component `python`, so that a wheel takes nothing else. With
# MOEKIT_PREBUILT both come from a finished build folder.
# Component `cu13`: the CUDA plug-in alone, for the wheel moekit-cu13 (python/cu13), into the folder of the other wheel's
# library, which looks for it there.
if(TARGET moekit_cuda_plugin)
  install(TARGETS moekit_cuda_plugin LIBRARY DESTINATION moekit/lib COMPONENT cu13)
elseif(MOEKIT_PREBUILT AND EXISTS ${MOEKIT_PREBUILT}/lib/libmoekit_cuda.so)
  install(PROGRAMS ${MOEKIT_PREBUILT}/lib/libmoekit_cuda.so DESTINATION moekit/lib COMPONENT cu13)
endif()
if(MOEKIT_WHEEL STREQUAL "cu13")
  return()
endif()

if(MOEKIT_PREBUILT)
  file(STRINGS ${CMAKE_CURRENT_SOURCE_DIR}/include/moekit/c_api.h abi_major_line REGEX "^#define MOEKIT_ABI_MAJOR ")
  string(REGEX REPLACE ".* ([0-9]+).*" "\\1" abi_major "${abi_major_line}")
  set(moekit_soname libmoekit.so.${abi_major})
  set(moekit_library ${MOEKIT_PREBUILT}/lib/${moekit_soname})
  set(moekit_program ${MOEKIT_PREBUILT}/moekit)
  foreach(file ${moekit_library} ${moekit_program})
    if(NOT EXISTS ${file})
      message(FATAL_ERROR "MOEKIT_PREBUILT=${MOEKIT_PREBUILT}: ${file} is not there; build it first")
    endif()
  endforeach()
  file(REAL_PATH ${moekit_library} moekit_library)  # a link would be copied as one
else()
  set(moekit_soname $<TARGET_SONAME_FILE_NAME:moekit_shared>)
  set(moekit_library $<TARGET_FILE:moekit_shared>)
  set(moekit_program $<TARGET_FILE:moekit_cli>)
endif()
install(PROGRAMS ${moekit_library} DESTINATION moekit/lib RENAME ${moekit_soname} COMPONENT python)
install(PROGRAMS ${moekit_program} DESTINATION ${SKBUILD_SCRIPTS_DIR} COMPONENT python)

# Transport "mpi", where this build has it. Wheels for other machines leave it out: MOEKIT_MPI=OFF.
if(TARGET moekit_mpi)
  install(TARGETS moekit_mpi LIBRARY DESTINATION moekit/lib COMPONENT python)
elseif(MOEKIT_PREBUILT AND EXISTS ${MOEKIT_PREBUILT}/lib/libmoekit_mpi.so AND NOT MOEKIT_MPI STREQUAL "OFF")
  install(PROGRAMS ${MOEKIT_PREBUILT}/lib/libmoekit_mpi.so DESTINATION moekit/lib COMPONENT python)
endif()
