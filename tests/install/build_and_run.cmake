# Configures the project SOURCE against the package in PREFIX, builds it in BUILD and runs each of
# PROGRAMS (a list with commas) with ARGUMENT, behind LAUNCHER (words with commas) where that is given.
file(REMOVE_RECURSE ${BUILD})
execute_process(COMMAND ${CMAKE_COMMAND} -S ${SOURCE} -B ${BUILD} -G Ninja -DCMAKE_PREFIX_PATH=${PREFIX}
  -DCMAKE_FIND_USE_PACKAGE_REGISTRY=OFF -DCMAKE_C_COMPILER=${C_COMPILER} -DCMAKE_CXX_COMPILER=${CXX_COMPILER}
  COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${CMAKE_COMMAND} --build ${BUILD} COMMAND_ERROR_IS_FATAL ANY)
string(REPLACE "," ";" programs ${PROGRAMS})
string(REPLACE "," ";" launcher "${LAUNCHER}")
foreach(program ${programs})
  execute_process(COMMAND ${launcher} ${BUILD}/${program} ${ARGUMENT} COMMAND_ERROR_IS_FATAL ANY)
endforeach()
