#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Cross-compiles core, CPU ops and the edge session for 64-bit ARM and runs the tests of the ops and of the
# session under an emulator:
#
#   scripts/aarch64_edge.sh [BUNDLE]
#
# With a BUNDLE of `diffulex edge export`, diffulex-edge-run is linked with the ARM libraries of
# ExecuTorch's Python package and answers a prompt of token ids, which is compared with the answer of
# the same program on this machine, if RUNNER names it.
#
# Debian packages: g++-aarch64-linux-gnu, qemu-user, libgtest-dev, libgmock-dev. Minutes, so that it
# is no part of continuous integration. Environment: PYTHON, MAX_JOBS, RUNNER.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

for tool in aarch64-linux-gnu-g++ qemu-aarch64; do
  if ! command -v "$tool" >/dev/null; then
    echo "scripts/aarch64_edge.sh: expected $tool (apt-get install g++-aarch64-linux-gnu qemu-user), got none" >&2
    exit 1
  fi
done

build="build/aarch64"
sysroot="/usr/aarch64-linux-gnu"
# The processor of a Raspberry Pi 5. Not the emulator's default, which announces matrix extensions under
# which the quantised kernels of ExecuTorch give other answers than on every processor by name.
emulate=(qemu-aarch64 -cpu cortex-a76 -L "$sysroot")
edge_args=(-DDIFFULEX_BUILD_EDGE=OFF)
if [ $# -gt 0 ]; then
  sdk="$build/executorch"
  if [ ! -d "$sdk" ]; then
    mkdir -p "$build/wheel"
    "${PYTHON:-python3}" -m pip download -q --no-deps --only-binary :all: --dest "$build/wheel" \
      --platform manylinux_2_28_aarch64 --python-version 3.11 "executorch>=1.5.1,<1.6"
    "${PYTHON:-python3}" -m zipfile -e "$build"/wheel/executorch-*.whl "$build"
  fi
  edge_args=(-DDIFFULEX_BUILD_EDGE=AUTO "-DEXECUTORCH_ROOT=$PWD/$sdk")
fi

cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
  -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_FIND_ROOT_PATH="$sysroot;$PWD/$build" \
  -DCMAKE_FIND_ROOT_PATH_MODE_PROGRAM=NEVER \
  -DCMAKE_CROSSCOMPILING_EMULATOR="qemu-aarch64;-cpu;cortex-a76;-L;$sysroot" \
  -DDIFFULEX_BUILD_OPS=OFF -DDIFFULEX_BUILD_PYTHON=OFF -DDIFFULEX_WITH_CUDA=OFF \
  -DDIFFULEX_BUILD_TESTS=ON "${edge_args[@]}"
cmake --build "$build" -j "${MAX_JOBS:-2}" --target diffulex_tests_edge diffulex_tests_kernels
"${emulate[@]}" "$build/tests/diffulex_tests_edge"
"${emulate[@]}" "$build/tests/diffulex_tests_kernels" --gtest_brief=1

if [ $# -gt 0 ]; then
  cmake --build "$build" -j "${MAX_JOBS:-2}" --target diffulex-edge-run
  run=(--ids "285 198 429" --ignore-eos --max-tokens 16 --threads 1)
  answer="$("${emulate[@]}" "$build/examples/edge_runner/diffulex-edge-run" "$1" "${run[@]}")"
  echo "aarch64: $answer"
  if [ -n "${RUNNER:-}" ] && [ "$answer" != "$("$RUNNER" "$1" "${run[@]}")" ]; then
    echo "scripts/aarch64_edge.sh: expected the answer of $RUNNER, got another one" >&2
    exit 1
  fi
fi
