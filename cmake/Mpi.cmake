# libmoekit_mpi.so: ranks over MPI, a plug-in that moekit opens on demand. Sets MOEKIT_WITH_MPI.
#   MOEKIT_MPI=OFF    no MPI
#   MOEKIT_MPI=AUTO   builds the plug-in when an MPI is found
#   MOEKIT_MPI=ON     needs an MPI
set(MOEKIT_MPI "AUTO" CACHE STRING "AUTO, ON or OFF")
set_property(CACHE MOEKIT_MPI PROPERTY STRINGS AUTO ON OFF)
set(MOEKIT_WITH_MPI OFF)
if(MOEKIT_MPI STREQUAL "OFF")
  message(STATUS "MPI: off (MOEKIT_MPI=OFF)")
  return()
endif()

find_package(MPI 3.1 COMPONENTS C)
if(NOT MPI_C_FOUND)
  if(MOEKIT_MPI STREQUAL "ON")
    message(FATAL_ERROR "MOEKIT_MPI=ON, but no MPI was found; install libopenmpi-dev or set MOEKIT_MPI=OFF")
  endif()
  message(STATUS "MPI: off, none was found")
  return()
endif()
set(MOEKIT_WITH_MPI ON)
message(STATUS "MPI: on, ${MPI_C_LIBRARIES}")

add_subdirectory(${PROJECT_SOURCE_DIR}/src/comm/mpi)
