# Finds nvcc and enables the CUDA language. Asked in this order: CMAKE_CUDA_COMPILER, CUDACXX, PATH and /usr/local/cuda,
# the wheels that `pip install '.[cuda-build]'` puts into the current Python. Sets KVC_HAVE_CUDA, and KVC_CUDA_REASON
# where it is false.

set(KVC_HAVE_CUDA FALSE)
set(KVC_OLDEST_NVCC 12.8)  # the first that compiles for sm_100

if(KVC_CUDA STREQUAL "OFF")
  set(KVC_CUDA_REASON "switched off by KVC_CUDA=OFF")
  return()
endif()

# The version of an nvcc, empty where it cannot be run.
function(kvc_nvcc_version nvcc result)
  execute_process(COMMAND "${nvcc}" --version OUTPUT_VARIABLE output ERROR_QUIET RESULT_VARIABLE failed)
  if(NOT failed AND output MATCHES "V([0-9]+\\.[0-9]+\\.[0-9]+)")
    set(${result} "${CMAKE_MATCH_1}" PARENT_SCOPE)
  else()
    set(${result} "" PARENT_SCOPE)
  endif()
endfunction()

# nvcc of the wheels in the current Python (of a virtual environment where one is active), or an empty string.
function(kvc_find_wheel_nvcc result)
  set(${result} "" PARENT_SCOPE)
  set(Python_FIND_VIRTUALENV FIRST)
  set(Python_FIND_STRATEGY LOCATION)
  find_package(Python COMPONENTS Interpreter QUIET)
  if(NOT Python_Interpreter_FOUND)
    return()
  endif()
  set(locate "
import importlib.util as u
try: s = u.find_spec('nvidia.cu13')
except ModuleNotFoundError: s = None
print(next(iter(s.submodule_search_locations), '') if s else '')")
  execute_process(COMMAND "${Python_EXECUTABLE}" -c "${locate}" OUTPUT_VARIABLE toolkit OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(EXISTS "${toolkit}/bin/nvcc")
    set(${result} "${toolkit}/bin/nvcc" PARENT_SCOPE)
  endif()
endfunction()

set(candidates "")
if(CMAKE_CUDA_COMPILER)
  set(candidates "${CMAKE_CUDA_COMPILER}")
elseif(DEFINED ENV{CUDACXX})
  set(candidates "$ENV{CUDACXX}")
else()
  find_program(KVC_NVCC nvcc PATHS /usr/local/cuda/bin)
  kvc_find_wheel_nvcc(wheel_nvcc)
  foreach(candidate IN ITEMS "${KVC_NVCC}" "${wheel_nvcc}")
    if(candidate)
      list(APPEND candidates "${candidate}")
    endif()
  endforeach()
endif()

set(KVC_CUDA_REASON "no nvcc in CUDACXX, on PATH, in /usr/local/cuda or in this Python: pip install '.[cuda-build]'")
set(nvcc "")
foreach(candidate IN LISTS candidates)
  kvc_nvcc_version("${candidate}" version)
  if(version VERSION_GREATER_EQUAL KVC_OLDEST_NVCC)
    set(nvcc "${candidate}")
    break()
  endif()
  set(KVC_CUDA_REASON
      "${candidate} is nvcc '${version}', older than ${KVC_OLDEST_NVCC}: pip install '.[cuda-build]', or set CUDACXX")
endforeach()
if(NOT nvcc)
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
# CMake 3.25 does not know that nvcc has C++20.
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(KVC_HAVE_CUDA TRUE)
