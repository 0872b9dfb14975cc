# Everything that is not ours: libtorch from TESSERA_TORCH, the rest as system packages.
if(NOT TESSERA_TORCH)
  set(TESSERA_TORCH "$ENV{TESSERA_TORCH}")
endif()
set(TESSERA_TORCH "${TESSERA_TORCH}" CACHE PATH "Folder of libtorch (it holds include/, lib/, share/cmake/Torch)")
if(NOT EXISTS "${TESSERA_TORCH}/share/cmake/Torch/TorchConfig.cmake")
  message(FATAL_ERROR "TESSERA_TORCH='${TESSERA_TORCH}' holds no share/cmake/Torch/TorchConfig.cmake. "
                      "Run './dev setup', or set TESSERA_TORCH to a libtorch folder (torch 2.11 or newer).")
endif()
# For our own CUDA kernels: 80 is A100, 90 H100, 100 B200. The last one's PTX serves what comes after it.
set(TESSERA_CUDA_ARCHITECTURES "80;90" CACHE STRING "Compute capabilities of the GPUs to compile for, without the dot")
if(NOT TORCH_CUDA_ARCH_LIST)  # libtorch's configuration, which sets nvcc's flags, wants them with it
  list(JOIN TESSERA_CUDA_ARCHITECTURES " " TORCH_CUDA_ARCH_LIST)
  string(REGEX REPLACE "([0-9]+)([0-9])( |$)" "\\1.\\2\\3" TORCH_CUDA_ARCH_LIST "${TORCH_CUDA_ARCH_LIST}")
  string(APPEND TORCH_CUDA_ARCH_LIST "+PTX")
endif()
include("${CMAKE_CURRENT_LIST_DIR}/TesseraLibtorch.cmake")
find_package(Threads REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(yaml-cpp REQUIRED)
find_package(PkgConfig REQUIRED)
pkg_check_modules(ONIGURUMA REQUIRED oniguruma)  # its header; the library is loaded (text/tokenizer/regex.cc)
pkg_check_modules(UTF8PROC REQUIRED IMPORTED_TARGET libutf8proc)
pkg_check_modules(XXHASH REQUIRED IMPORTED_TARGET libxxhash)
pkg_check_modules(DEFLATE REQUIRED IMPORTED_TARGET libdeflate)  # its CRC-32
pkg_check_modules(ZLIB REQUIRED IMPORTED_TARGET zlib)
pkg_check_modules(MICROHTTPD REQUIRED IMPORTED_TARGET libmicrohttpd)  # of `tessera serve` and train.page
find_path(CLI11_INCLUDE CLI/CLI.hpp REQUIRED)

# fmt as libtorch ships it: another fmt in the same program would clash with it.
add_library(tessera_fmt INTERFACE)
target_include_directories(tessera_fmt SYSTEM INTERFACE $<BUILD_INTERFACE:${TESSERA_TORCH}/include>)
target_compile_definitions(tessera_fmt INTERFACE FMT_HEADER_ONLY=1)

# libtorch. -fopenmp is a compile option only: the OpenMP run time is the one beside libtorch. Clang's calls need its own.
add_library(tessera_torch INTERFACE)
target_link_libraries(tessera_torch INTERFACE torch Threads::Threads)
# libtorch exports functions of std::filesystem without a version, of its own compiler's libstdc++. A program that finds
# them before those of libstdc++ mixes the two and crashes, so libstdc++ comes first on every link line (tests/tree).
target_link_options(tessera_torch INTERFACE "SHELL:LINKER:--no-as-needed -lstdc++ LINKER:--as-needed")
target_compile_definitions(tessera_torch INTERFACE AT_PER_OPERATOR_HEADERS USE_C10D_GLOO USE_DISTRIBUTED)
# Its assertions name their files: by no path of the machine that compiles. (The last option that fits counts.)
target_compile_options(tessera_torch INTERFACE $<BUILD_INTERFACE:-fmacro-prefix-map=${CMAKE_SOURCE_DIR}/=>
  $<BUILD_INTERFACE:-fmacro-prefix-map=${TESSERA_TORCH}/=torch/>)
if(NOT TESSERA_SANITIZE MATCHES thread)
  target_compile_options(tessera_torch INTERFACE -fopenmp)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    target_link_options(tessera_torch INTERFACE -fopenmp)
  endif()
endif()
# NCCL groups need a libtorch for CUDA, NCCL's header and those of the CUDA libraries that c10d's header includes. The wheels
# keep them beside torch; a toolkit of one's own may hold only the compiler.
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
# Our own CUDA kernels: where libtorch has CUDA, its configuration has found nvcc.
set(TESSERA_WITH_CUDA OFF)
if(TARGET torch_cuda AND CMAKE_CUDA_COMPILER)
  set(TESSERA_WITH_CUDA ON)
  set(CMAKE_CUDA_RUNTIME_LIBRARY Shared)  # the one that libtorch loads, not one more in each program
endif()
file(GLOB TESSERA_GOMP ${TESSERA_TORCH}/lib/libgomp*.so*)
if(TESSERA_GOMP)
  list(GET TESSERA_GOMP 0 TESSERA_GOMP)
  target_link_libraries(tessera_torch INTERFACE $<BUILD_INTERFACE:${TESSERA_GOMP}>)
endif()

# Parquet: libparquet and libarrow as pyarrow's wheel ships them, from TESSERA_ARROW, else from beside torch. They stay where
# they are, as libtorch does.
file(GLOB found_arrow CONFIGURE_DEPENDS ${TESSERA_TORCH}/../pyarrow ${CMAKE_SOURCE_DIR}/.venv/lib/python3*/site-packages/pyarrow)
list(REMOVE_DUPLICATES found_arrow)
if(found_arrow)
  list(GET found_arrow 0 found_arrow)
endif()
set(TESSERA_ARROW "${found_arrow}" CACHE PATH "Folder pyarrow of its wheel: libarrow.so.*, libparquet.so.*, include/")
if(NOT TESSERA_ARROW AND found_arrow)  # it came after the first configuration
  set(TESSERA_ARROW "${found_arrow}" CACHE PATH "" FORCE)
endif()
file(GLOB TESSERA_ARROW_LIBRARIES CONFIGURE_DEPENDS ${TESSERA_ARROW}/libparquet.so.[0-9]* ${TESSERA_ARROW}/libarrow.so.[0-9]*)
list(LENGTH TESSERA_ARROW_LIBRARIES found)
if(found EQUAL 2 AND EXISTS "${TESSERA_ARROW}/include/parquet/arrow/reader.h")
  set(TESSERA_WITH_PARQUET ON)
else()
  set(TESSERA_WITH_PARQUET OFF)
  message(STATUS "No libparquet: data in Parquet will not be read (scripts/arrow.lock lists what has it)")
endif()

# The allocator of programs (docs/design/allocator.md). Sanitizers bring their own.
add_library(tessera_allocator INTERFACE)
if(NOT TESSERA_SANITIZE AND NOT TESSERA_FUZZ)
  pkg_check_modules(TCMALLOC libtcmalloc_minimal)
  if(TCMALLOC_FOUND)
    target_link_options(tessera_allocator INTERFACE LINKER:--no-as-needed ${TCMALLOC_LINK_LIBRARIES} LINKER:--as-needed)
  else()
    message(WARNING "No tcmalloc (gperftools): programs take the C library's allocator, with which training is slower and its memory grows.")
  endif()
endif()

if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  find_program(TESSERA_MOLD mold)
  if(TESSERA_MOLD)
    # Halves every program: most of it is line tables.
    add_link_options(-fuse-ld=mold LINKER:--compress-debug-sections=zlib)
  endif()
endif()
find_program(TESSERA_CCACHE ccache)
if(TESSERA_CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${TESSERA_CCACHE})
endif()
