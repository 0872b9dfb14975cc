# Defines the target `torch` for the libtorch in TESSERA_TORCH. If libtorch was built for CUDA and this machine has no
# complete CUDA toolkit, libtorch's CMake configuration fails. Then the target has only the CPU libraries. This file is
# also installed.
set(tessera_torch_configures ON)
if(EXISTS "${TESSERA_TORCH}/lib/libtorch_cuda.so")  # errors of find_package() cannot be caught, so a small project tries it
  set(trial "${CMAKE_BINARY_DIR}/libtorch-trial")
  file(WRITE "${trial}/CMakeLists.txt"
    "cmake_minimum_required(VERSION 3.25)\nproject(trial CXX)\nfind_package(Torch REQUIRED PATHS \"${TESSERA_TORCH}\" NO_DEFAULT_PATH)\n")
  set(definitions "")
  foreach(name CMAKE_CUDA_COMPILER CUDA_TOOLKIT_ROOT_DIR CUDAToolkit_ROOT TORCH_CUDA_ARCH_LIST)  # none of them is a list
    if(DEFINED ${name})
      list(APPEND definitions "-D${name}=${${name}}")
    endif()
  endforeach()
  execute_process(COMMAND ${CMAKE_COMMAND} -S "${trial}" -B "${trial}/build" -G "${CMAKE_GENERATOR}"
    -DCMAKE_CXX_COMPILER=${CMAKE_CXX_COMPILER} ${definitions} RESULT_VARIABLE failed OUTPUT_FILE "${trial}/log" ERROR_FILE "${trial}/log")
  if(failed)
    set(tessera_torch_configures OFF)
  endif()
endif()
if(tessera_torch_configures)
  find_package(Torch REQUIRED PATHS "${TESSERA_TORCH}" NO_DEFAULT_PATH)
else()
  message(STATUS "No CUDA toolkit that libtorch accepts (${trial}/log): building against its CPU parts")
  add_library(torch INTERFACE IMPORTED)
  target_link_libraries(torch INTERFACE "${TESSERA_TORCH}/lib/libtorch_cpu.so" "${TESSERA_TORCH}/lib/libc10.so")
  target_include_directories(torch SYSTEM INTERFACE "${TESSERA_TORCH}/include" "${TESSERA_TORCH}/include/torch/csrc/api/include")
endif()
