# What quickstart.sh and test.sh share: headings, packages, the configured build. Sourced, not run.
# Needs bash; the caller has set -euo pipefail and stands in the root of the checkout.

export LC_ALL=C.UTF-8

heading() { printf '\n== %s (at %d:%02d)\n' "$*" $((SECONDS / 60)) $((SECONDS % 60)); }

die() {
  printf '%s\n' "$*" >&2
  exit 1
}

run() {
  printf '$ %s\n' "$*"
  "$@"
}

# Debian and Ubuntu packages that stand for a tool; any other source of the tool will do.
tool_package() {
  case $1 in
    g++) command -v g++ >/dev/null || echo g++ ;;
    cmake) command -v cmake >/dev/null || echo cmake ;;
    ninja) command -v ninja >/dev/null || echo ninja-build ;;
    ccache) command -v ccache >/dev/null || echo ccache ;;
    python3) command -v python3 >/dev/null || echo python3 ;;
    python3-venv) python3 -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv ;;
    mpi.h) echo '#include <mpi.h>' | mpicc -x c -E - >/dev/null 2>&1 || echo libopenmpi-dev ;;
    ip) command -v ip >/dev/null || echo iproute2 ;;
    mpirun) command -v mpirun >/dev/null || echo openmpi-bin ;;
    pkg-config) command -v pkg-config >/dev/null || echo pkg-config ;;
    clang) command -v clang++ >/dev/null || echo clang ;;
    clang-format) command -v clang-format >/dev/null || echo clang-format ;;
    *) die "shell_common.sh: no tool named $1" ;;
  esac
}

# Header probes, so that a copy outside apt (/usr/local) counts too.
library_package() {
  local probe=$1 package=$2 root
  for root in /usr/include /usr/local/include; do
    [ -e "$root/$probe" ] && return
  done
  echo "$package"
}

# need_packages PACKAGE...: installs what is missing. As root with apt; everyone else gets the line to run.
need_packages() {
  local missing=("$@")
  [ ${#missing[@]} -eq 0 ] && return
  local line="apt-get install -y --no-install-recommends ${missing[*]}"
  if ! command -v apt-get >/dev/null; then
    die "These Debian/Ubuntu packages (or your system's equivalents) are missing: ${missing[*]}"
  fi
  if [ "$(id -u)" -ne 0 ]; then
    die "Missing: ${missing[*]}
Install them and run this script again:
  sudo apt-get update && sudo $line"
  fi
  heading "Installing ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq || echo "apt-get update failed; trying the package lists that are here" >&2
  $line -qq </dev/null >/dev/null || die "apt could not install: ${missing[*]}"
}

# What every build needs.
build_packages() {
  tool_package g++
  tool_package cmake
  tool_package ninja
  tool_package ccache
  library_package fmt/core.h libfmt-dev
  library_package spdlog/spdlog.h libspdlog-dev
  library_package CLI/CLI.hpp libcli11-dev
  library_package nlohmann/json.hpp nlohmann-json3-dev
  library_package xxhash.h libxxhash-dev
}

# A GPU counts as visible when the driver's own tool lists one.
gpu_visible() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU '; }

jobs() { echo "${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}"; }

# A build folder that another generator, compiler path or checkout configured cannot be reused.
forget_foreign_cache() {
  local cache=$1/CMakeCache.txt
  [ -f "$cache" ] || return 0
  if ! grep -q "^CMAKE_HOME_DIRECTORY:INTERNAL=$PWD\$" "$cache" || ! grep -q '^CMAKE_GENERATOR:INTERNAL=Ninja$' "$cache"; then
    echo "$1 was configured for another checkout or generator; configuring it anew"
    rm -rf "$cache" "$1/CMakeFiles"
  fi
}

# Clones in other folders share what ccache knows: paths inside the checkout count from the build folder.
export CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1
