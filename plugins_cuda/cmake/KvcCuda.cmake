# Finds nvcc and enables the CUDA language: CMAKE_CUDA_COMPILER, then CUDACXX, then PATH and /usr/local/cuda, then the
# wheels that `pip install '.[cuda-build]'` puts into the current Python. Sets KVC_HAVE_CUDA, and KVC_CUDA_REASON where
# it is false.

set(KVC_HAVE_CUDA FALSE)
if(KVC_CUDA STREQUAL "OFF")
  set(KVC_CUDA_REASON "switched off by KVC_CUDA=OFF")
  return()
endif()

# nvcc of the wheels in the Python that is found first (in a virtual environment: its own), or an empty string.
function(kvc_find_wheel_nvcc result)
  set(${result} "" PARENT_SCOPE)
  set(Python_FIND_VIRTUALENV FIRST)
  find_package(Python COMPONENTS Interpreter QUIET)
  if(NOT Python_Interpreter_FOUND)
    return()
  endif()
  set(locate "import importlib.util as u
try: s = u.find_spec('nvidia.cu13')
except ModuleNotFoundError: s = None
print(next(iter(s.submodule_search_locations), '') if s else '')")
  execute_process(COMMAND "${Python_EXECUTABLE}" -c "${locate}" OUTPUT_VARIABLE toolkit OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(EXISTS "${toolkit}/bin/nvcc")
    set(${result} "${toolkit}/bin/nvcc" PARENT_SCOPE)
  endif()
endfunction()

set(nvcc "")
if(CMAKE_CUDA_COMPILER)
  set(nvcc "${CMAKE_CUDA_COMPILER}")
elseif(DEFINED ENV{CUDACXX})
  set(nvcc "$ENV{CUDACXX}")
else()
  find_program(KVC_NVCC nvcc PATHS /usr/local/cuda/bin)
  if(KVC_NVCC)
    set(nvcc "${KVC_NVCC}")
  else()
    kvc_find_wheel_nvcc(nvcc)
  endif()
endif()
if(NOT nvcc)
  set(KVC_CUDA_REASON "no nvcc: not in CUDACXX, on PATH, in /usr/local/cuda or in the current Python (pip install '.[cuda-build]')")
  if(KVC_CUDA STREQUAL "ON")
    message(FATAL_ERROR "KVC_CUDA=ON, but ${KVC_CUDA_REASON}")
  endif()
  return()
endif()

# The profile of the 13.0 wheels looks for lib64, and they have lib: without this no link finds libcudart_static.
get_filename_component(toolkit "${nvcc}" DIRECTORY)
get_filename_component(toolkit "${toolkit}" DIRECTORY)
if(EXISTS "${toolkit}/lib/libcudart_static.a" AND NOT EXISTS "${toolkit}/lib64")
  set(CMAKE_CUDA_FLAGS_INIT "-L${toolkit}/lib")
endif()

set(CMAKE_CUDA_COMPILER "${nvcc}")
set(CMAKE_CUDA_ARCHITECTURES "80-real;90a-real;100-real" CACHE STRING "GPU architectures: Ampere, Hopper, Blackwell")
enable_language(CUDA)
# CMake 3.25 does not know that nvcc has C++20 (12.0 and later do).
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(KVC_HAVE_CUDA TRUE)
