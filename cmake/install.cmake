# Two ways to install: for C++ (cmake --install, then find_package(dualkv)) and into the Python wheel.
include(CMakePackageConfigHelpers)

if(SKBUILD)
  # The wheel holds the library and the shared library of Highway that it needs, side by side.
  set_target_properties(dualkv PROPERTIES INSTALL_RPATH "$ORIGIN")
  install(TARGETS dualkv LIBRARY DESTINATION . COMPONENT python)
  get_target_property(DUALKV_HWY_TYPE hwy::hwy TYPE)
  if(DUALKV_HWY_TYPE STREQUAL "SHARED_LIBRARY")
    install(IMPORTED_RUNTIME_ARTIFACTS hwy::hwy LIBRARY DESTINATION . COMPONENT python)
  endif()
  return()
endif()

set_target_properties(dualkv PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION 0)
set(DUALKV_CMAKE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/dualkv)
install(TARGETS dualkv EXPORT dualkv-targets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/dualkv DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT dualkv-targets NAMESPACE dualkv:: DESTINATION ${DUALKV_CMAKE_DIR})
configure_package_config_file(cmake/dualkv-config.cmake.in dualkv-config.cmake INSTALL_DESTINATION ${DUALKV_CMAKE_DIR})
write_basic_package_version_file(dualkv-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/dualkv-config.cmake ${CMAKE_CURRENT_BINARY_DIR}/dualkv-config-version.cmake
        DESTINATION ${DUALKV_CMAKE_DIR})
