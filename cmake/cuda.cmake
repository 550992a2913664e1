# The CUDA backend: kernels for Hopper (sm_90a), compiled wherever nvcc is found.
set(DUALKV_CUDA "AUTO" CACHE STRING "Build the CUDA kernels: ON, OFF, or AUTO where nvcc is found")
set_property(CACHE DUALKV_CUDA PROPERTY STRINGS AUTO ON OFF)

set(DUALKV_HAS_CUDA OFF)
if(DUALKV_CUDA)
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(DUALKV_HAS_CUDA ON)
  elseif(NOT DUALKV_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "DUALKV_CUDA is ${DUALKV_CUDA} but nvcc was not found: set CUDACXX to its path, or DUALKV_CUDA to OFF")
  else()
    message(STATUS "nvcc was not found: dualkv is built without its CUDA kernels")
  endif()
endif()
if(NOT DUALKV_HAS_CUDA)
  target_sources(dualkv PRIVATE src/cuda/unavailable.cpp)
  return()
endif()

set(CMAKE_CUDA_ARCHITECTURES 90a-real)
enable_language(CUDA)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25.1 does not know yet that nvcc can do C++20
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
endif()
find_package(CUDAToolkit REQUIRED)

file(GLOB_RECURSE DUALKV_CUDA_SOURCES CONFIGURE_DEPENDS src/cuda/*.cu)
target_sources(dualkv PRIVATE ${DUALKV_CUDA_SOURCES})
set_target_properties(dualkv PROPERTIES CUDA_ARCHITECTURES "${CMAKE_CUDA_ARCHITECTURES}")
target_link_libraries(dualkv PRIVATE CUDA::cudart_static)
# A kernel that spills registers, or whose matrix products the compiler serialises (C7510 and its like), is a fault.
target_compile_options(dualkv PRIVATE
  "$<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>")
