# Sourced by ./dev. Installs Debian packages, libtorch, and the Python packages that oracle tests compare with.
# Installed parts are skipped, so a second run takes no time.
#
# The lock files are made by pip-compile --generate-hashes --allow-unsafe --no-header --no-annotate --no-emit-options.
# oracle-packages.lock is made from oracle-packages.txt. libtorch.lock has torch's CPU build, and libtorch-cuda.lock the
# CUDA build, each for several Python versions. arrow.lock has pyarrow, which contains libparquet.

PACKAGES="build-essential cmake ninja-build ccache mold pkg-config git python3 python3-venv ca-certificates
  nlohmann-json3-dev libyaml-cpp-dev libcli11-dev libonig-dev libutf8proc-dev libxxhash-dev libdeflate-dev zlib1g-dev libgoogle-perftools-dev libmicrohttpd-dev
  libgtest-dev libgmock-dev libbenchmark-dev librapidcheck-dev iproute2"

die() { echo "./dev: $*" >&2; exit 1; }

# as_root CMD...: runs CMD as root, or with a sudo that asks for no password; the proxy variables are kept. Fails if
# neither is possible.
as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; return; fi
  command -v sudo >/dev/null && sudo -n true 2>/dev/null || return 1
  sudo -n --preserve-env=http_proxy,https_proxy,no_proxy,HTTP_PROXY,HTTPS_PROXY,NO_PROXY "$@"
}

# need_packages NAME...: installs the Debian packages that are missing. If that is not possible (no root, another
# distribution), it prints the missing packages and continues: CMake uses the libraries that it finds and names the
# missing ones.
need_packages() {
  local missing="" name
  if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
    [ -n "${TESSERA_TOLD:-}" ] || echo "./dev: not a Debian system; install these packages (Debian's names): $(echo "$@")" >&2
    export TESSERA_TOLD=1
    return 0
  fi
  for name in "$@"; do
    dpkg-query -W -f '${Status}' "$name" 2>/dev/null | grep -q 'install ok installed' || missing="$missing $name"
  done
  [ -n "$missing" ] || return 0
  if ! as_root true; then
    [ -n "${TESSERA_TOLD:-}" ] || echo "./dev: no root; continuing without the packages of 'apt-get install --no-install-recommends$missing'" >&2
    export TESSERA_TOLD=1
    return 0
  fi
  echo "./dev: installing$missing" >&2
  # shellcheck disable=SC2086
  { as_root apt-get update -qq && as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing; } >&2 ||
    die "apt-get could not install:$missing"
}

need_commands() {  # need_commands NAME...: fails with the name of the first missing command
  local name
  for name in "$@"; do
    command -v "$name" >/dev/null || die "no '$name' in PATH; install it and run this again"
  done
}

venv_pip() {
  [ -x .venv/bin/pip ] || python3 -m venv .venv || die "python3 -m venv failed (is python3-venv installed?)"
  .venv/bin/pip --disable-pip-version-check "$@"
}

# pip checks every wheel against the hashes of a lock file before it unpacks the wheel.
setup() {
  [ "$(uname -s)" = Linux ] || die "Tessera builds and runs on Linux only; found $(uname -s)"
  # shellcheck disable=SC2086
  need_packages $PACKAGES
  need_commands cmake ninja c++ git python3
  if [ -n "${TESSERA_TORCH:-}" ]; then
    [ -d "$TESSERA_TORCH/share/cmake/Torch" ] || die "TESSERA_TORCH=$TESSERA_TORCH has no share/cmake/Torch"
    setup_arrow
    return 0
  fi
  TESSERA_TORCH=$(echo "$PWD"/.venv/lib/python3*/site-packages/torch)
  if [ ! -d "$TESSERA_TORCH/share/cmake/Torch" ]; then
    echo "./dev: fetching libtorch" >&2
    install_torch
    TESSERA_TORCH=$(echo "$PWD"/.venv/lib/python3*/site-packages/torch)
    [ -d "$TESSERA_TORCH/share/cmake/Torch" ] || die "the torch wheel has no share/cmake/Torch"
  fi
  export TESSERA_TORCH
  setup_arrow
}

# Installs libparquet and libarrow for data in Parquet. Without them the build continues. A failed attempt (no network)
# is repeated once per day, not at each build.
setup_arrow() {
  cmp -s scripts/arrow.lock .venv/arrow && return 0
  local failed=.venv/no-arrow
  if cmp -s scripts/arrow.lock "$failed" && [ -n "$(find "$failed" -mmin -1440)" ]; then return 0; fi
  echo "./dev: fetching pyarrow, which contains libparquet" >&2
  if (venv_pip --retries 0 --timeout 15 install -q --no-deps --require-hashes -r scripts/arrow.lock); then
    cp scripts/arrow.lock .venv/arrow
    rm -f "$failed"
  else
    echo "./dev: no pyarrow for $(python3 --version) on $(uname -m): data in Parquet will not be read (to try again: rm $failed)" >&2
    mkdir -p .venv && cp scripts/arrow.lock "$failed"
  fi
}

# Installs torch's CPU build. If the package index has none, it installs the CUDA build with the libraries that its CPU
# parts load.
install_torch() {
  venv_pip install -q --no-deps --require-hashes -r scripts/libtorch.lock 2>/dev/null ||
    { echo "./dev: the package index has no CPU build of libtorch for $(python3 --version): fetching the CUDA build" >&2 &&
      venv_pip install -q --no-deps --require-hashes -r scripts/libtorch-cuda.lock; } ||
    die "pip found no torch that scripts/libtorch*.lock list for $(python3 --version) on $(uname -m). Give another index (PIP_EXTRA_INDEX_URL) or an existing libtorch (TESSERA_TORCH=DIR)"
}

setup_oracle() {  # installs the Python packages that tests compare with
  local stamp=.venv/oracle-packages
  cmp -s scripts/oracle-packages.lock "$stamp" && return 0
  echo "./dev: fetching the Python packages of oracle tests" >&2
  # Oracle tests run torch's wheel, also if TESSERA_TORCH is another libtorch.
  [ -d .venv/lib/python3*/site-packages/torch ] || install_torch
  venv_pip install -q --no-deps --require-hashes -r scripts/oracle-packages.lock || die "pip could not install scripts/oracle-packages.lock"
  cp scripts/oracle-packages.lock "$stamp"
}
