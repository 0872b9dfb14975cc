# Functions for the targets. Each layer is a static library of all sources in its folder, so a new file needs no edit
# here.
set(TESSERA_LAYERS "" CACHE INTERNAL "")

function(tessera_options target)
  target_compile_options(${target} PRIVATE -Wall -Wextra)
  if(TESSERA_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # GCC 12 wrongly warns that the inline storage of a moved or copied c10::SmallVector is uninitialized.
    target_compile_options(${target} PRIVATE -Wno-maybe-uninitialized)
  endif()
  if(TESSERA_FUZZ)
    target_compile_options(${target} PRIVATE -fsanitize=fuzzer-no-link -fno-sanitize-recover=all)
    target_link_options(${target} PRIVATE -fsanitize=fuzzer-no-link)
  endif()
  if(TESSERA_SANITIZE STREQUAL "thread" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # Warnings about fences in libtorch's headers, which TSan does not support, and about OpenMP pragmas, which are off
    # under TSan.
    target_compile_options(${target} PRIVATE -Wno-tsan -Wno-unknown-pragmas)
  endif()
  if(TESSERA_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${TESSERA_SANITIZE} -fno-omit-frame-pointer)
    # The data of the checks contains many addresses. With PIE, their relocations would be a third of every program.
    target_link_options(${target} PUBLIC -fsanitize=${TESSERA_SANITIZE} -no-pie)
  endif()
endfunction()

# Compiles the sources of TARGET in groups of about six files, because each compilation first spends 3 s on templates of
# libtorch's headers. A file's group is a hash of its name, so that a new file moves no other file. Groups include their
# files by paths relative to the root of the tree, so that ccache shares them among checkouts.
function(tessera_unity target)
  if(NOT TESSERA_UNITY)
    return()
  endif()
  get_target_property(sources ${target} SOURCES)
  list(LENGTH sources count)
  set(groups 1)
  while(groups LESS_EQUAL 128 AND count GREATER 0)
    math(EXPR wanted "${groups} * 8")
    if(count LESS_EQUAL wanted)
      break()
    endif()
    math(EXPR groups "${groups} * 2")
  endwhile()
  foreach(source ${sources})
    file(RELATIVE_PATH path ${CMAKE_SOURCE_DIR} ${source})
    string(MD5 digest ${path})
    string(SUBSTRING ${digest} 0 4 digest)
    math(EXPR group "0x${digest} % ${groups}")
    string(APPEND group_${group} "#include \"${path}\"\n")
    set_source_files_properties(${source} PROPERTIES HEADER_FILE_ONLY ON)
  endforeach()
  math(EXPR last "${groups} - 1")
  foreach(group RANGE ${last})
    if(DEFINED group_${group})
      set(file ${CMAKE_BINARY_DIR}/groups/${target}/group_${group}.cc)
      file(CONFIGURE OUTPUT ${file} CONTENT "${group_${group}}" @ONLY)
      target_sources(${target} PRIVATE ${file})
    endif()
  endforeach()
  target_include_directories(${target} PRIVATE ${CMAKE_SOURCE_DIR})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    target_compile_options(${target} PRIVATE -Wno-subobject-linkage)  # GCC treats the included sources as headers
  endif()
endfunction()

# Uses the precompiled header of libtorch, which is built once and shared by all targets that include libtorch. A folder
# with other compile options sets TESSERA_PCH to the name of its own target for the precompiled header.
function(tessera_torch_pch target)
  set(header tessera_pch)
  if(TESSERA_PCH)
    set(header ${TESSERA_PCH})
  endif()
  if(NOT TARGET ${header})
    add_library(${header} STATIC ${CMAKE_SOURCE_DIR}/cmake/pch.cc)
    target_link_libraries(${header} PUBLIC tessera_torch tessera_fmt)
    tessera_options(${header})
    target_include_directories(${header} PRIVATE ${CMAKE_SOURCE_DIR})
    # In angle brackets, so that the name has no path of this checkout, and ccache shares the results among checkouts.
    target_precompile_headers(${header} PRIVATE <cmake/pch.h>)
  endif()
  target_link_libraries(${target} PRIVATE $<BUILD_INTERFACE:tessera_torch>)
  target_precompile_headers(${target} REUSE_FROM ${header})
  get_target_property(type ${target} TYPE)
  if(type STREQUAL "EXECUTABLE")  # CMake would use -fPIE, which does not match a precompiled header with -fPIC
    set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
    target_compile_options(${target} PRIVATE -fPIC)
  endif()
endfunction()

# tessera_layer(NAME [PLAIN] [USES LAYERS...] [LIBRARIES TARGETS...]): the library of tessera/NAME. It links the layers
# of USES publicly and LIBRARIES privately. PLAIN layers are compiled without libtorch.
function(tessera_layer name)
  cmake_parse_arguments(ARG "PLAIN" "" "USES;LIBRARIES" ${ARGN})
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/tessera/${name}/*.cc)
  list(FILTER sources EXCLUDE REGEX "/main\\.cc$")
  foreach(optional NCCL CUDA PARQUET)  # without the library, no_LIBRARY_*.cc replaces LIBRARY_*.cc
    string(TOLOWER ${optional} prefix)
    if(TESSERA_WITH_${optional})
      set(prefix no_${prefix})
    endif()
    list(FILTER sources EXCLUDE REGEX "/${prefix}_[a-z_]*\\.cc$")
  endforeach()
  add_library(tessera_${name} STATIC ${sources})
  set_target_properties(tessera_${name} PROPERTIES EXPORT_NAME layer_${name})
  target_include_directories(tessera_${name} PUBLIC $<BUILD_INTERFACE:${CMAKE_SOURCE_DIR}> $<INSTALL_INTERFACE:include>)
  tessera_options(tessera_${name})
  tessera_unity(tessera_${name})
  list(TRANSFORM ARG_USES PREPEND tessera_)
  target_link_libraries(tessera_${name} PUBLIC ${ARG_USES} tessera_fmt
    PRIVATE $<BUILD_INTERFACE:nlohmann_json::nlohmann_json> PkgConfig::XXHASH ${ARG_LIBRARIES})
  if(ARG_PLAIN)
    target_link_libraries(tessera_${name} PRIVATE ${CMAKE_DL_LIBS} PkgConfig::UTF8PROC Threads::Threads)
  else()
    target_link_libraries(tessera_${name} PUBLIC tessera_torch PRIVATE yaml-cpp)
    tessera_torch_pch(tessera_${name})
  endif()
  set(TESSERA_LAYERS ${TESSERA_LAYERS} ${name} CACHE INTERNAL "")
endfunction()

# Compiles tessera/kernels/cuda/*.cu with nvcc. They take raw pointers and include no header of libtorch. C++17 is the
# newest standard that CMake 3.25 supports for nvcc.
function(tessera_cuda_kernels)
  file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/tessera/kernels/cuda/*.cu)
  add_library(tessera_kernels_cuda STATIC ${sources})
  set_target_properties(tessera_kernels_cuda PROPERTIES CUDA_STANDARD 17 CUDA_STANDARD_REQUIRED ON CUDA_EXTENSIONS OFF)
  target_include_directories(tessera_kernels_cuda PRIVATE ${CMAKE_SOURCE_DIR})
  target_compile_options(tessera_kernels_cuda PRIVATE -Xcompiler=-Wall,-Wextra)
  if(TESSERA_WERROR)
    target_compile_options(tessera_kernels_cuda PRIVATE --Werror=all-warnings)
  endif()
endfunction()

function(tessera_program)
  if(EXISTS ${CMAKE_SOURCE_DIR}/tessera/cli/main.cc)
    add_executable(tessera ${CMAKE_SOURCE_DIR}/tessera/cli/main.cc)
    tessera_options(tessera)
    target_link_libraries(tessera PRIVATE tessera_cli tessera_allocator)
    # The run path: the libtorch of the build, and for packages (scripts/package.py) folders relative to the program:
    # next to it, and the site-packages of the Python whose pip installed it (lib64: Fedora; dist-packages: Debian's own
    # Python).
    set(run_path $ORIGIN/../lib/tessera $ORIGIN/../torch/lib $ORIGIN/../pyarrow)
    foreach(minor RANGE 10 14)
      foreach(packages lib/python3.${minor}/site-packages lib64/python3.${minor}/site-packages
          lib/python3.${minor}/dist-packages)
        list(APPEND run_path $ORIGIN/../${packages}/torch/lib $ORIGIN/../${packages}/pyarrow)
      endforeach()
    endforeach()
    list(PREPEND run_path ${TESSERA_TORCH}/lib ${TESSERA_ARROW})
    if(TESSERA_WITH_CUDA)
      list(APPEND run_path ${CUDAToolkit_LIBRARY_DIR})
    endif()
    # The program in the build folder has the same run path. Otherwise CMake would pad its run path with empty entries,
    # which mean the current directory.
    set_target_properties(tessera PROPERTIES INSTALL_RPATH "${run_path}" BUILD_WITH_INSTALL_RPATH ON)
    # DT_RPATH instead of DT_RUNPATH, because it also applies to the dependencies of the libraries.
    target_link_options(tessera PRIVATE LINKER:--disable-new-dtags)
    install(TARGETS tessera RUNTIME DESTINATION bin COMPONENT program)
  endif()
endfunction()

# tessera_component(NAME LAYERS...): a component of find_package(tessera COMPONENTS NAME). It has the public header
# tessera/NAME.h and the target tessera::NAME, which links the layers that the header includes.
set(TESSERA_COMPONENTS "" CACHE INTERNAL "")
function(tessera_component name)
  add_library(tessera_component_${name} INTERFACE)
  set_target_properties(tessera_component_${name} PROPERTIES EXPORT_NAME ${name})
  list(TRANSFORM ARGN PREPEND tessera_)
  target_link_libraries(tessera_component_${name} INTERFACE ${ARGN})
  set(TESSERA_COMPONENTS ${TESSERA_COMPONENTS} ${name} CACHE INTERNAL "")
endfunction()

function(tessera_install)
  include(GNUInstallDirs)
  include(CMakePackageConfigHelpers)
  set(targets tessera_fmt tessera_torch)
  foreach(layer ${TESSERA_LAYERS})
    list(APPEND targets tessera_${layer})
  endforeach()
  foreach(component ${TESSERA_COMPONENTS})
    list(APPEND targets tessera_component_${component})
  endforeach()
  if(TESSERA_WITH_CUDA)
    list(APPEND targets tessera_kernels_cuda)
  endif()
  install(TARGETS ${targets} EXPORT tesseraTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
  install(CODE "set(TESSERA_SOURCE \"${CMAKE_SOURCE_DIR}\")\nset(TESSERA_COMPONENTS \"${TESSERA_COMPONENTS}\")")
  install(SCRIPT ${CMAKE_SOURCE_DIR}/cmake/install_headers.cmake)
  install(EXPORT tesseraTargets NAMESPACE tessera:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/tessera)
  configure_package_config_file(${CMAKE_SOURCE_DIR}/cmake/tesseraConfig.cmake.in ${CMAKE_BINARY_DIR}/tesseraConfig.cmake
    INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/tessera)
  write_basic_package_version_file(${CMAKE_BINARY_DIR}/tesseraConfigVersion.cmake COMPATIBILITY SameMinorVersion)
  install(FILES ${CMAKE_BINARY_DIR}/tesseraConfig.cmake ${CMAKE_BINARY_DIR}/tesseraConfigVersion.cmake
    ${CMAKE_SOURCE_DIR}/cmake/TesseraLibtorch.cmake
    DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/tessera)
endfunction()
