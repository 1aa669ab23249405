# libmoekit.so, and what `cmake --install` puts beside it: headers, CMake package, pkg-config file.
# The ABI promise covers c_api.h; its major number is the SONAME. The C++ API is exported too, for programs that are
# built against the same version by the same kind of compiler.
include(CMakePackageConfigHelpers)

file(STRINGS ${PROJECT_SOURCE_DIR}/include/moekit/c_api.h abi_major_line REGEX "^#define MOEKIT_ABI_MAJOR ")
string(REGEX REPLACE ".* ([0-9]+).*" "\\1" MOEKIT_ABI_MAJOR "${abi_major_line}")

file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/empty.cc CONTENT "// All objects come from moekit_core.\n")
add_library(moekit_shared SHARED ${PROJECT_BINARY_DIR}/empty.cc)
set(version_script ${PROJECT_SOURCE_DIR}/cmake/moekit.map)
target_link_libraries(moekit_shared
  PRIVATE $<BUILD_INTERFACE:moekit_settings> $<BUILD_INTERFACE:$<LINK_LIBRARY:WHOLE_ARCHIVE,moekit_core>> Threads::Threads)
target_link_options(moekit_shared PRIVATE LINKER:--version-script=${version_script})
if(NOT MOEKIT_SANITIZE)  # a list of sanitizers holds a comma, which a generator expression can't
  target_link_options(moekit_shared PRIVATE LINKER:--no-undefined)
endif()
set_target_properties(moekit_shared PROPERTIES
  OUTPUT_NAME moekit EXPORT_NAME moekit VERSION ${PROJECT_VERSION} SOVERSION ${MOEKIT_ABI_MAJOR}
  LINK_DEPENDS ${version_script} LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/lib)
target_include_directories(moekit_shared INTERFACE $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
target_compile_features(moekit_shared INTERFACE cxx_std_20)

# The headers alone. (The C view of the library, moekit::c, is made by moekit-config.cmake.)
add_library(moekit_headers INTERFACE)
set_target_properties(moekit_headers PROPERTIES EXPORT_NAME headers)
target_compile_features(moekit_headers INTERFACE cxx_std_20)
target_include_directories(moekit_headers INTERFACE $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)

install(TARGETS moekit_shared moekit_headers EXPORT moekit-targets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/moekit DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
install(FILES ${PROJECT_BINARY_DIR}/include/moekit/version.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/moekit)
install(EXPORT moekit-targets NAMESPACE moekit:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/moekit)
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/moekit-config.cmake.in ${PROJECT_BINARY_DIR}/moekit-config.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/moekit)
# Before 1.0 a minor version may change the C++ API.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/moekit-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/moekit-config.cmake ${PROJECT_BINARY_DIR}/moekit-config-version.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/moekit)
# Relative to the file itself, so that an installed tree may be moved.
file(RELATIVE_PATH MOEKIT_PC_PREFIX /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)
configure_file(${PROJECT_SOURCE_DIR}/cmake/moekit.pc.in ${PROJECT_BINARY_DIR}/moekit.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/moekit.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
