# The dependencies: libtorch from TESSERA_TORCH, and the others as system packages.
if(NOT TESSERA_TORCH)
  set(TESSERA_TORCH "$ENV{TESSERA_TORCH}")
endif()
set(TESSERA_TORCH "${TESSERA_TORCH}" CACHE PATH "Folder of libtorch, with include/, lib/ and share/cmake/Torch/")
if(NOT EXISTS "${TESSERA_TORCH}/share/cmake/Torch/TorchConfig.cmake")
  message(FATAL_ERROR "TESSERA_TORCH='${TESSERA_TORCH}' has no share/cmake/Torch/TorchConfig.cmake. "
                      "Run './dev setup', or set TESSERA_TORCH to a libtorch folder (torch 2.11 or newer).")
endif()
# The GPUs for which Tessera's CUDA kernels are compiled: 80 is A100, 90 H100, 100 B200. Newer GPUs run the PTX of the
# last one.
set(TESSERA_CUDA_ARCHITECTURES "80;90" CACHE STRING "Compute capabilities of the GPUs to compile for, without the dot")
if(NOT TORCH_CUDA_ARCH_LIST)  # libtorch's CMake configuration sets nvcc's flags from this variable
  list(JOIN TESSERA_CUDA_ARCHITECTURES " " TORCH_CUDA_ARCH_LIST)
  string(REGEX REPLACE "([0-9]+)([0-9])( |$)" "\\1.\\2\\3" TORCH_CUDA_ARCH_LIST "${TORCH_CUDA_ARCH_LIST}")
  string(APPEND TORCH_CUDA_ARCH_LIST "+PTX")
endif()
include("${CMAKE_CURRENT_LIST_DIR}/TesseraLibtorch.cmake")
find_package(Threads REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(yaml-cpp REQUIRED)
find_package(PkgConfig REQUIRED)
pkg_check_modules(ONIGURUMA REQUIRED oniguruma)  # only its header; the library is loaded with dlopen (text/tokenizer/regex.cc)
pkg_check_modules(UTF8PROC REQUIRED IMPORTED_TARGET libutf8proc)
pkg_check_modules(XXHASH REQUIRED IMPORTED_TARGET libxxhash)
pkg_check_modules(DEFLATE REQUIRED IMPORTED_TARGET libdeflate)  # for its CRC-32
pkg_check_modules(ZLIB REQUIRED IMPORTED_TARGET zlib)
pkg_check_modules(MICROHTTPD REQUIRED IMPORTED_TARGET libmicrohttpd)  # for `tessera serve` and train.page
find_path(CLI11_INCLUDE CLI/CLI.hpp REQUIRED)

# The fmt headers in libtorch. Another version of fmt in the same program would clash with them.
add_library(tessera_fmt INTERFACE)
target_include_directories(tessera_fmt SYSTEM INTERFACE $<BUILD_INTERFACE:${TESSERA_TORCH}/include>)
target_compile_definitions(tessera_fmt INTERFACE FMT_HEADER_ONLY=1)

# libtorch. With GCC, -fopenmp is only a compile option, because the program links the OpenMP run time in libtorch's
# folder. Code compiled by Clang needs Clang's run time, so there it is also a link option.
add_library(tessera_torch INTERFACE)
target_link_libraries(tessera_torch INTERFACE torch Threads::Threads)
# libtorch exports unversioned std::filesystem functions of the libstdc++ of its own compiler. A program that resolves
# them before those of the system's libstdc++ mixes both and crashes. So libstdc++ comes first on every link line
# (tested in tests/tree).
target_link_options(tessera_torch INTERFACE "SHELL:LINKER:--no-as-needed -lstdc++ LINKER:--as-needed")
target_compile_definitions(tessera_torch INTERFACE AT_PER_OPERATOR_HEADERS USE_C10D_GLOO USE_DISTRIBUTED)
# File names in assertions must not contain paths of the build machine. If several of these options match, the last one
# counts.
target_compile_options(tessera_torch INTERFACE $<BUILD_INTERFACE:-fmacro-prefix-map=${CMAKE_SOURCE_DIR}/=>
  $<BUILD_INTERFACE:-fmacro-prefix-map=${TESSERA_TORCH}/=torch/>)
if(NOT TESSERA_SANITIZE MATCHES thread)
  target_compile_options(tessera_torch INTERFACE -fopenmp)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    target_link_options(tessera_torch INTERFACE -fopenmp)
  endif()
endif()
# NCCL groups need the CUDA build of libtorch, NCCL's header, and headers of the CUDA libraries that c10d's NCCL header
# includes. pip installs these headers next to torch. A CUDA toolkit may have only the compiler.
if(TARGET torch_cuda AND EXISTS "${TESSERA_TORCH}/include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp")
  file(GLOB wheel_includes ${TESSERA_TORCH}/../nvidia/cu*/include ${TESSERA_TORCH}/../nvidia/cusparse/include)
  find_path(TESSERA_NCCL_INCLUDE nccl.h HINTS ${CUDA_INCLUDE_DIRS} ${TESSERA_TORCH}/../nvidia/nccl/include)
  find_path(TESSERA_CUDA_LIBRARIES_INCLUDE cusparse.h HINTS ${CUDA_INCLUDE_DIRS} ${wheel_includes})
  if(TESSERA_NCCL_INCLUDE AND TESSERA_CUDA_LIBRARIES_INCLUDE)
    set(TESSERA_WITH_NCCL ON)
    target_compile_definitions(tessera_torch INTERFACE USE_C10D_NCCL)
    target_include_directories(tessera_torch SYSTEM INTERFACE
      $<BUILD_INTERFACE:${TESSERA_NCCL_INCLUDE}> $<BUILD_INTERFACE:${TESSERA_CUDA_LIBRARIES_INCLUDE}>)
  endif()
endif()
# Tessera's CUDA kernels are compiled if libtorch has CUDA and its CMake configuration has found nvcc.
set(TESSERA_WITH_CUDA OFF)
if(TARGET torch_cuda AND CMAKE_CUDA_COMPILER)
  set(TESSERA_WITH_CUDA ON)
  set(CMAKE_CUDA_RUNTIME_LIBRARY Shared)  # use the run time that libtorch loads, instead of a static copy in each program
endif()
file(GLOB TESSERA_GOMP ${TESSERA_TORCH}/lib/libgomp*.so*)
if(TESSERA_GOMP)
  list(GET TESSERA_GOMP 0 TESSERA_GOMP)
  target_link_libraries(tessera_torch INTERFACE $<BUILD_INTERFACE:${TESSERA_GOMP}>)
endif()

# Parquet: libparquet and libarrow of pyarrow's wheel, from TESSERA_ARROW or from the folder next to torch. Programs
# load them from there, like libtorch.
file(GLOB found_arrow CONFIGURE_DEPENDS ${TESSERA_TORCH}/../pyarrow ${CMAKE_SOURCE_DIR}/.venv/lib/python3*/site-packages/pyarrow)
list(REMOVE_DUPLICATES found_arrow)
if(found_arrow)
  list(GET found_arrow 0 found_arrow)
endif()
set(TESSERA_ARROW "${found_arrow}" CACHE PATH "Folder of the pyarrow package, with libarrow.so.*, libparquet.so.* and include/")
if(NOT TESSERA_ARROW AND found_arrow)  # pyarrow was installed after the first configuration
  set(TESSERA_ARROW "${found_arrow}" CACHE PATH "" FORCE)
endif()
file(GLOB TESSERA_ARROW_LIBRARIES CONFIGURE_DEPENDS ${TESSERA_ARROW}/libparquet.so.[0-9]* ${TESSERA_ARROW}/libarrow.so.[0-9]*)
list(LENGTH TESSERA_ARROW_LIBRARIES found)
if(found EQUAL 2 AND EXISTS "${TESSERA_ARROW}/include/parquet/arrow/reader.h")
  set(TESSERA_WITH_PARQUET ON)
else()
  set(TESSERA_WITH_PARQUET OFF)
  message(STATUS "No libparquet: data in Parquet will not be read (install the pyarrow of scripts/arrow.lock)")
endif()

# The memory allocator of programs (docs/design/allocator.md). Sanitizers have their own.
add_library(tessera_allocator INTERFACE)
if(NOT TESSERA_SANITIZE AND NOT TESSERA_FUZZ)
  pkg_check_modules(TCMALLOC libtcmalloc_minimal)
  if(TCMALLOC_FOUND)
    target_link_options(tessera_allocator INTERFACE LINKER:--no-as-needed ${TCMALLOC_LINK_LIBRARIES} LINKER:--as-needed)
  else()
    message(WARNING "No tcmalloc (gperftools): programs use the C library's allocator, with which training is slower and needs more memory.")
  endif()
endif()

if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  find_program(TESSERA_MOLD mold)
  if(TESSERA_MOLD)
    # Compression halves the size of programs, which are mostly line tables.
    add_link_options(-fuse-ld=mold LINKER:--compress-debug-sections=zlib)
  endif()
endif()
find_program(TESSERA_CCACHE ccache)
if(TESSERA_CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${TESSERA_CCACHE})
endif()
