# Sourced by ./dev. Builds against libtorch for CUDA. libtorch, compiler, headers and libraries come from the Python
# package index. Only files in build-cuda-VERSION/ are changed. The build needs no GPU.

# cuda [TORCH_VERSION]: builds the program and the tests with the label cuda, and runs the tests; without a GPU they are
# skipped.
cuda() {
  local began=$SECONDS version fetched configured built
  version=${1:-$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' scripts/libtorch-cuda.lock)}
  local folder=$PWD/build-cuda-$version
  # shellcheck disable=SC2086
  need_packages $PACKAGES
  need_commands cmake ninja c++ git python3
  mkdir -p "$folder"
  fetch_cuda "$version" "$folder"
  fetched=$SECONDS
  local packages toolkit
  packages=$(echo "$folder"/venv/lib/python3*/site-packages)
  toolkit=$(echo "$packages"/nvidia/cu[0-9]*)
  cmake --preset release -B "$folder" -DTESSERA_TORCH="$packages/torch" -DCMAKE_CUDA_COMPILER="$toolkit/bin/nvcc" -DCUDA_TOOLKIT_ROOT_DIR="$toolkit" \
    -DCUDAToolkit_ROOT="$toolkit" -DTESSERA_WERROR=ON -DTESSERA_BENCH=OFF >"$folder/configure.log" 2>&1 ||
    { cat "$folder/configure.log" >&2; die "cmake failed"; }
  configured=$SECONDS
  cmake --build "$folder" --target tessera cuda_tests
  built=$SECONDS
  echo "./dev: torch $version for CUDA: packages $((fetched - began)) s, configuration $((configured - fetched)) s, build $((built - configured)) s; the program is $folder/tessera"
  ctest --test-dir "$folder" -L '^cuda$' --output-on-failure --no-tests=error
}

fetch_cuda() {  # fetch_cuda TORCH_VERSION FOLDER
  local version=$1 folder=$2 lock=scripts/cuda-$1.lock python=$2/venv/bin/python
  if [ ! -f "$lock" ]; then
    lock=$folder/packages.lock
    [ -f "$lock" ] || echo "./dev: no lock file for torch $version: installing the versions of the package index and writing their hashes to $lock" >&2
  fi
  if [ -f "$lock" ] && cmp -s "$lock" "$folder/venv/installed.lock"; then return 0; fi
  echo "./dev: fetching torch $version for CUDA and the CUDA toolkit: 3 GB of downloads, 5 GB on disk" >&2
  [ -x "$python" ] || python3 -m venv "$folder/venv" || die "python3 -m venv failed (is python3-venv installed?)"
  if [ ! -f "$lock" ]; then  # '===' excludes CPU builds of this version
    "$python" -m pip --disable-pip-version-check install -q --dry-run --ignore-installed --report "$folder/report.json" "torch===$version" \
      'cuda-toolkit[nvcc,cccl,crt,nvvm]' || die "pip found no torch $version for CUDA for $(python3 --version) on $(uname -m)"
    "$python" scripts/cuda_lock.py "$folder/report.json" >"$lock.new" && mv "$lock.new" "$lock"
  fi
  "$python" -m pip --disable-pip-version-check install -q --no-deps --require-hashes -r "$lock" || die "pip could not install $lock"
  # The packages lack two parts of a CUDA toolkit, which are made as links: the folder lib64, and library names without
  # a version.
  local toolkit library
  toolkit=$(echo "$folder"/venv/lib/python3*/site-packages/nvidia/cu[0-9]*)
  [ -x "$toolkit/bin/nvcc" ] || die "$toolkit has no bin/nvcc"
  ln -sfn lib "$toolkit/lib64"
  for library in "$toolkit"/lib/lib*.so.*; do ln -sf "$(basename "$library")" "${library%%.so.*}.so"; done
  cp "$lock" "$folder/venv/installed.lock"
}
