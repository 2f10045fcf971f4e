# SPDX-License-Identifier: Apache-2.0
#
# Functions of quickstart.sh, test.sh and .ci/run, so that the README's commands and continuous
# integration cannot drift apart. Source it with the repository root as current directory.
#
# Input: PYTHON (interpreter), VENV (virtual environment), OFFLINE (1: no download).
# No `command | grep -q` here: grep stops reading early, and with pipefail the broken pipe of the
# command would count as "no match".

ROOT="$(pwd)"
PYTHON="${PYTHON:-}"
VENV="${VENV:-$ROOT/.venv}"
OFFLINE="${OFFLINE:-0}"
# Where the CPU build of torch comes from when nothing else is configured; empty: not used.
TORCH_INDEX_URL="${TORCH_INDEX_URL-https://download.pytorch.org/whl/cpu}"

say() { printf '[diffulex] %s\n' "$*"; }

die() {
  printf '[diffulex] error: %s\n' "$*" >&2
  exit 1
}

# --- system packages ---------------------------------------------------------------------------------

can_use_apt() { [ "$OFFLINE" = 0 ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }

# apt_install <package>...: installs those that are missing.
apt_install() {
  local package missing=()
  for package in "$@"; do
    case "$(dpkg-query -W -f '${Status}' "$package" 2>/dev/null)" in
      *"ok installed") ;;
      *) missing+=("$package") ;;
    esac
  done
  [ "${#missing[@]}" -gt 0 ] || return 0
  set -- "${missing[@]}"
  say "installing system packages: $*"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

# need <what> <test command> <package>...: installs the packages when the test fails, or says so.
need() {
  local what="$1" check="$2"
  shift 2
  if "$check"; then
    return
  fi
  if can_use_apt; then
    apt_install "$@"
    "$check" || die "$what: still not found after installing $*"
  else
    die "$what not found; install it first, for example: sudo apt-get install $*"
  fi
}

has_compiler() { command -v "${CXX:-c++}" >/dev/null || command -v g++ >/dev/null; }

compiles() { echo "#include <$1>" | "${CXX:-g++}" -x c++ -std=c++17 -fsyntax-only - 2>/dev/null; }
has_gtest() {
  { compiles gtest/gtest.h && compiles gmock/gmock.h; } ||
    [ -e .deps/googletest/CMakeLists.txt ] || [ -e /usr/src/googletest/CMakeLists.txt ]
}
has_benchmark() { compiles benchmark/benchmark.h; }
has_tokenizer_libraries() { compiles re2/re2.h && compiles pcre2posix.h; }
has_python_venv() { "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null; }
has_python_headers() {
  "$PYTHON" -c 'import os, sys, sysconfig as s
sys.exit(not os.path.exists(os.path.join(s.get_path("include"), "Python.h")))'
}

# --- Python environment ------------------------------------------------------------------------------

is_supported_python() {
  command -v "$1" >/dev/null && "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null
}

# find_python: sets PYTHON to a supported interpreter that can make environments and build modules.
find_python() {
  local candidate
  if [ -n "$PYTHON" ]; then
    is_supported_python "$PYTHON" || die "PYTHON: expected Python 3.10 or newer, got $PYTHON"
  else
    for candidate in python3 python3.13 python3.12 python3.11 python3.10; do
      if is_supported_python "$candidate"; then
        PYTHON="$candidate"
        break
      fi
    done
    [ -n "$PYTHON" ] || die "expected Python 3.10 or newer on PATH, got none"
  fi
  # Absolute: PATH changes once an environment is set up.
  PYTHON="$(command -v "$PYTHON")"
  local version
  version="$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
  need "the venv module of $PYTHON" has_python_venv "python$version-venv"
  need "the headers of $PYTHON" has_python_headers "python$version-dev"
}

# torch_version <interpreter>: version of its torch, empty if there is none. torch is not imported.
torch_version() {
  "$1" -c 'import importlib.metadata as m
try:
    print(m.version("torch"))
except m.PackageNotFoundError:
    pass'
}

is_supported_torch() { [[ "$1" =~ ^(2\.(1[1-9]|[2-9][0-9])|[3-9]\.|[1-9][0-9]) ]]; }

# setup_venv: makes VENV unless it exists, puts it first on PATH, and pins torch before any pip call.
setup_venv() {
  local options=()
  if [ ! -x "$VENV/bin/python" ] || ! "$VENV/bin/python" -c 'import pip' 2>/dev/null; then
    if is_supported_torch "$(torch_version "$PYTHON")"; then
      options=(--system-site-packages)
    fi
    say "creating $VENV with $("$PYTHON" -V) ${options[*]:-}"
    "$PYTHON" -m venv --clear ${options[@]+"${options[@]}"} "$VENV"
  fi
  VENV="$(cd "$VENV" && pwd)"
  export PATH="$VENV/bin:$PATH"
  export VIRTUAL_ENV="$VENV"
  export PIP_DISABLE_PIP_VERSION_CHECK=1
  pin_torch
}

# pin_torch: exports PIP_CONSTRAINT, which makes pip keep the torch that is there, else take the
# pinned one. A file: URL, because pip splits the variable at spaces.
pin_torch() {
  local version file="$ROOT/requirements/constraints.txt"
  version="$(torch_version "$VENV/bin/python")"
  if [ -n "$version" ]; then
    is_supported_torch "$version" || die "torch in $VENV: expected 2.11 or newer, got $version"
    file="$VENV/diffulex-constraints.txt"
    echo "torch==$version" >"$file"
  fi
  PIP_CONSTRAINT="$(python -c 'import pathlib, sys; print(pathlib.Path(sys.argv[1]).as_uri())' "$file")"
  export PIP_CONSTRAINT
}

# has_own_index: pip is configured to look elsewhere than on PyPI.
has_own_index() {
  case "$(pip config list)" in
    *index-url* | *find-links*) return 0 ;;
  esac
  return 1
}

# install_torch: the pinned CPU build, unless the environment has a torch already.
install_torch() {
  local version
  version="$(torch_version python)"
  if [ -n "$version" ]; then
    say "using torch $version"
    return
  fi
  [ "$OFFLINE" = 0 ] || die "--offline: expected an installed torch 2.11 or newer, got none"
  version="$(sed -n 's/^torch==//p' requirements/constraints.txt)"
  say "installing torch $version (CPU)"
  # PyPI's own build of torch for Linux needs several GB of CUDA packages.
  if [ -n "$TORCH_INDEX_URL" ] && ! has_own_index; then
    pip install -q --no-deps --retries 2 --index-url "$TORCH_INDEX_URL" "torch==$version" ||
      die "torch $version could not be installed from $TORCH_INDEX_URL; install it into $VENV" \
        "yourself, or set TORCH_INDEX_URL (empty: PyPI's CUDA build)"
  fi
  pip install -q "torch==$version"
}

# --- build and test ----------------------------------------------------------------------------------

num_jobs() { echo "${MAX_JOBS:-$(nproc)}"; }

build_dir() { python -c 'import sys; print("build/cp%d%d" % sys.version_info[:2])'; }

# with_progress <command>...: runs it, and says every half minute how much of the build is done.
with_progress() {
  local status=0 watcher marker
  marker="$(mktemp)"
  # Its sleep may outlive it, so that it must not hold the output open; nor does it outlive the script.
  while sleep "${PROGRESS_SECONDS:-30}" >/dev/null 2>&1 </dev/null && kill -0 $$ 2>/dev/null; do
    say "$(find "$(build_dir)" -name '*.o' -newer "$marker" 2>/dev/null | wc -l) sources compiled," \
      "$((SECONDS / 60)) minutes so far"
  done &
  watcher=$!
  "$@" || status=$?
  kill "$watcher" 2>/dev/null || true
  rm -f "$marker"
  return "$status"
}

# build_editable <cmake argument>...: the package in place, with its C++ tests, in one build tree.
build_editable() {
  local cmake_args="-DDIFFULEX_BUILD_TESTS=ON $*"
  if [ "$OFFLINE" = 0 ]; then
    pip install -q "setuptools>=77" wheel "cmake>=3.26" ninja "pybind11>=2.13"
    CMAKE_ARGS="$cmake_args ${CMAKE_ARGS:-}" pip install -q --no-build-isolation -e ".[serve,test]"
  else
    CMAKE_ARGS="$cmake_args ${CMAKE_ARGS:-}" pip install -q --no-build-isolation --no-deps -e .
  fi
}

run_ctest() {
  ctest --test-dir "$(build_dir)" --output-on-failure --no-tests=error -j "$(num_jobs)"
}

# run_sanitizer <preset>
run_sanitizer() {
  cmake --preset "$1"
  cmake --build --preset "$1" -j "$(num_jobs)"
  ctest --preset "$1" -j "$(num_jobs)"
}

# run_pytest [pytest options]: with options, as pytest does it; without, first the tests that need the
# host to themselves, then the rest in as many processes as there are jobs, one thread each.
run_pytest() {
  if [ $# -gt 0 ]; then
    python -m pytest "$@"
    return
  fi
  run_pytest_alone
  run_pytest_together
}
run_pytest_alone() { python -m pytest -m alone; }
run_pytest_together() {
  OMP_NUM_THREADS=1 python -m pytest -m "not alone" -n "$(num_jobs)" --dist loadfile --no-loadscope-reorder
}
