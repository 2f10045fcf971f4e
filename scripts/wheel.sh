#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds wheels for this machine's architecture, repairs, tests and names them for an index:
#
#   bash scripts/wheel.sh [--sdist] [--cuda] PYTHON...        for example: python3.10 python3.11 python3.12
#
# One wheel per interpreter: diffulex_ext._core is built with pybind11, which has no stable ABI; the ops
# use torch's stable ABI and no Python. With --cuda the wheels have the CUDA kernels too and carry the
# version of nvcc in their own, as in 0.1.0+cu130: for an index of their own, since pip would choose
# them everywhere. They contain the CUDA runtime, and run with every torch, on hosts without a GPU too.
#
# Environment: OUT (default dist), MAX_JOBS, DIFFULEX_TORCH_DIR (directory of a torch package, for
# interpreters without one: the ops are the same for all), TORCH_CUDA_ARCH_LIST (default 8.0+PTX;9.0:
# what the build takes by itself depends on the GPUs of the host), CUDACXX, SKIP_BUILD=1 (test what OUT
# holds).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/lib.sh

usage() {
  echo "usage: bash scripts/wheel.sh [--sdist] [--cuda] PYTHON... (what it does: head of this file)"
  exit "$1"
}

OUT="$(realpath -m "${OUT:-dist}")"
with_sdist=0
with_cuda=0
while [ "$#" -gt 0 ]; do
  case "$1" in
    --sdist) with_sdist=1 ;;
    --cuda) with_cuda=1 ;;
    -h | --help) usage 0 ;;
    *) break ;;
  esac
  shift
done
[[ "$#" -gt 0 && "$1" != -* ]] || usage 2 >&2
for python in "$@"; do
  is_supported_python "$python" || die "PYTHON: expected Python 3.10 or newer, got $python"
done

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
mkdir -p "$OUT"

version="$(cat VERSION)"
if [ "$with_cuda" = 1 ]; then
  nvcc="${CUDACXX:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}"
  release="$({ "$nvcc" --version 2>/dev/null || true; } | sed -n 's/.*release \([0-9]*\)\.\([0-9]*\).*/\1\2/p')"
  [ -n "$release" ] || die "--cuda: expected a working nvcc (CUDACXX, PATH or /usr/local/cuda/bin), got none"
  version="$version+cu$release"
  unset DIFFULEX_DEVICE
  export CUDACXX="$nvcc" CMAKE_ARGS="-DDIFFULEX_WITH_CUDA=ON ${CMAKE_ARGS:-}"
  export TORCH_CUDA_ARCH_LIST="${TORCH_CUDA_ARCH_LIST:-8.0+PTX;9.0}"
  export DIFFULEX_LOCAL_VERSION="cu$release"
  minutes="CUDA for $TORCH_CUDA_ARCH_LIST; an hour or more: set MAX_JOBS"
else
  export DIFFULEX_DEVICE=cpu
  minutes="3 to 10 minutes"
fi

# tag_of PYTHON: cp311 and so on.
tag_of() { "$1" -c 'import sys; print("cp%d%d" % sys.version_info[:2])'; }

# torch_dir_of PYTHON: directory of its torch, else DIFFULEX_TORCH_DIR.
torch_dir_of() {
  "$1" -c 'import importlib.util as u; s = u.find_spec("torch"); print(s.submodule_search_locations[0])' \
    2>/dev/null || printf '%s\n' "${DIFFULEX_TORCH_DIR:-}"
}

# build PYTHON: a repaired wheel in OUT.
build() {
  local python="$1" tag torch_dir venv
  tag="$(tag_of "$python")"
  torch_dir="$(torch_dir_of "$python")"
  [ -n "$torch_dir" ] || die "$python: expected torch or DIFFULEX_TORCH_DIR, got neither"
  venv="$work/build-$tag"
  rm -rf build/lib.* build/bdist.* # of earlier builds, with modules that are gone
  say "$tag: building $version with the torch of $torch_dir ($minutes)"
  "$python" -m venv "$venv"
  "$venv/bin/python" -m pip install -q -r requirements/wheels.txt
  DIFFULEX_TORCH_DIR="$torch_dir" PATH="$venv/bin:$PATH" "$venv/bin/python" -m pip wheel -q \
    --no-build-isolation --no-deps -w "$work/raw" .
  PATH="$venv/bin:$PATH" bash scripts/repair_wheel.sh "$OUT" "$work/raw/diffulex-$version-$tag-"*.whl
}

# check PYTHON: the wheel of OUT in a bare environment.
check() {
  local python="$1" tag wheel venv torch_dir
  tag="$(tag_of "$python")"
  wheel="$(compgen -G "$OUT/diffulex-$version-$tag-*manylinux*.whl")" ||
    die "$OUT: expected a wheel diffulex-$version-$tag, got none"
  venv="$work/test-$tag"
  "$python" -m venv "$venv"
  "$venv/bin/python" -m pip install -q --no-deps "$wheel"
  "$venv/bin/python" scripts/wheel_check.py "$wheel" "$version"
  torch_dir="$("$python" -c 'import torch; print(torch.__file__)' 2>/dev/null || true)"
  if [ -n "$torch_dir" ]; then
    # The packages it needs come from the interpreter, the wheel from the environment.
    "$python" -c 'import sys; print("\n".join(p for p in sys.path if p.endswith("-packages")))' \
      >"$work/base-$tag.pth"
    cp "$work/base-$tag.pth" "$(echo "$venv"/lib/python3*/site-packages)/zz_base.pth"
    (cd "$work" && "$venv/bin/python" -m diffulex doctor)
  else
    say "$tag: no torch for this interpreter: the core alone was tested"
  fi
  say "$tag: $(basename "$wheel") works"
}

for python in "$@"; do
  [ "${SKIP_BUILD:-0}" = 1 ] || build "$python"
  check "$python"
done
if [ "$with_sdist" = 1 ]; then
  "$1" -m venv "$work/sdist"
  "$work/sdist/bin/python" -m pip install -q -r requirements/wheels.txt
  "$work/sdist/bin/python" -m build -q --sdist --no-isolation -o "$OUT" .
fi
ls -l "$OUT"
