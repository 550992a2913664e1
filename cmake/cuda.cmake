# The CUDA backend: kernels for Hopper (sm_90a), compiled wherever nvcc is found.
set(DUALKV_CUDA "AUTO" CACHE STRING "Build the CUDA kernels: ON, OFF, or AUTO where nvcc is found")
set_property(CACHE DUALKV_CUDA PROPERTY STRINGS AUTO ON OFF)

set(DUALKV_HAS_CUDA OFF)
if(DUALKV_CUDA)
  include(CheckLanguage)
  check_language(CUDA)
  set(DUALKV_NVCC_FAULT "nvcc was not found")
  if(CMAKE_CUDA_COMPILER)
    execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --version OUTPUT_VARIABLE DUALKV_NVCC_VERSION)
    string(REGEX REPLACE ".*release ([0-9.]+).*" "\\1" DUALKV_NVCC_VERSION "${DUALKV_NVCC_VERSION}")
    set(DUALKV_NVCC_FAULT "nvcc is of CUDA ${DUALKV_NVCC_VERSION}, not 12.5 or later")
    if(DUALKV_NVCC_VERSION VERSION_GREATER_EQUAL 12.5)
      set(DUALKV_HAS_CUDA ON)
    endif()
  endif()
  if(NOT DUALKV_HAS_CUDA AND NOT DUALKV_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "DUALKV_CUDA is ${DUALKV_CUDA} but ${DUALKV_NVCC_FAULT}: set CUDACXX to its path, or DUALKV_CUDA to OFF")
  elseif(NOT DUALKV_HAS_CUDA)
    message(STATUS "${DUALKV_NVCC_FAULT}: dualkv is built without its CUDA kernels")
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
set_target_properties(dualkv PROPERTIES
  CUDA_ARCHITECTURES "${CMAKE_CUDA_ARCHITECTURES}" CUDA_VISIBILITY_PRESET hidden)
target_link_libraries(dualkv PRIVATE CUDA::cudart_static)
# As on the CPU, products and sums are fused where the code says so and nowhere else: a row's bits must not depend on
# the path that its warp takes.
target_compile_options(dualkv PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr;--fmad=false;-Xcompiler=-Wall,-Wextra>")
# A kernel that spills registers is a fault. tools/check_kernels.py, a test, finds matrix products that are serialised.
target_compile_options(dualkv PRIVATE "$<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${DUALKV_WERROR}>>:\
-Xcompiler=-Werror;-Xptxas=--warn-on-spills,--warn-on-local-memory-usage,--warning-as-error>")
