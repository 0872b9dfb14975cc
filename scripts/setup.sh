# Sourced by ./dev: Debian packages, libtorch, and the oracle's Python packages. Everything is checked before it is
# installed, so that a second run costs nothing.

TORCH_VERSION=2.13.0
PACKAGES="build-essential cmake ninja-build ccache mold pkg-config git python3 python3-venv ca-certificates unzip
  nlohmann-json3-dev libyaml-cpp-dev libcli11-dev libpcre2-dev libutf8proc-dev libxxhash-dev libgoogle-perftools-dev
  libgtest-dev libgmock-dev libbenchmark-dev librapidcheck-dev iproute2"

die() { echo "./dev: $*" >&2; exit 1; }

need_packages() {  # need_packages NAME...: installs what is missing, or prints the exact command and stops
  local missing="" name as_root=""
  for name in "$@"; do
    dpkg-query -W -f '${Status}' "$name" 2>/dev/null | grep -q 'install ok installed' || missing="$missing $name"
  done
  [ -n "$missing" ] || return 0
  command -v apt-get >/dev/null || die "this set-up knows Debian packages only; install these by hand:$missing"
  if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null && sudo -n true 2>/dev/null && as_root="sudo -n" ||
      die "these packages are missing; run: apt-get install --no-install-recommends$missing"
  fi
  echo "./dev: installing$missing" >&2
  # shellcheck disable=SC2086
  { $as_root apt-get update -qq && $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing; } >&2 ||
    die "apt-get could not install:$missing"
}

venv_pip() {
  [ -x .venv/bin/pip ] || python3 -m venv .venv || die "python3 -m venv failed (is python3-venv installed?)"
  .venv/bin/pip --disable-pip-version-check "$@"
}

setup() {
  # shellcheck disable=SC2086
  need_packages $PACKAGES
  if [ -n "${TESSERA_TORCH:-}" ]; then
    [ -d "$TESSERA_TORCH/share/cmake/Torch" ] || die "TESSERA_TORCH=$TESSERA_TORCH holds no share/cmake/Torch"
    return 0
  fi
  TESSERA_TORCH=$(echo "$PWD"/.venv/lib/python3*/site-packages/torch)
  if [ ! -d "$TESSERA_TORCH/share/cmake/Torch" ]; then
    echo "./dev: fetching libtorch $TORCH_VERSION" >&2
    # The CPU build where the package index has it under its own version, whatever the index has otherwise.
    venv_pip install -q --no-deps "torch==$TORCH_VERSION+cpu" 2>/dev/null ||
      venv_pip install -q --no-deps "torch==$TORCH_VERSION" || die "pip could not install torch==$TORCH_VERSION"
    TESSERA_TORCH=$(echo "$PWD"/.venv/lib/python3*/site-packages/torch)
    [ -d "$TESSERA_TORCH/share/cmake/Torch" ] || die "the torch wheel holds no share/cmake/Torch"
  fi
  export TESSERA_TORCH
}

setup_oracle() {  # the Python packages that tests compare with
  local stamp=.venv/oracle-packages
  cmp -s scripts/oracle-packages.txt "$stamp" && return 0
  echo "./dev: fetching the oracle's Python packages" >&2
  venv_pip install -q "torch==$TORCH_VERSION" -r scripts/oracle-packages.txt || die "pip could not install scripts/oracle-packages.txt"
  cp scripts/oracle-packages.txt "$stamp"
}
