#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds and installs PyTorch's C++ tokenizer library, with which diffulex-edge-run takes text:
#
#   scripts/build_tokenizers.sh PREFIX
#   cmake -S . -B build -Dtokenizers_ROOT=PREFIX ...
#
# The sources, those of the libraries below it included, are what pip has as pytorch-tokenizers. About
# seven minutes of one processor. Environment: PYTHON (interpreter with pip), MAX_JOBS.
set -euo pipefail

version=1.0.1
if [ $# -ne 1 ] || [ "${1#-}" != "$1" ]; then
  echo "usage: scripts/build_tokenizers.sh PREFIX" >&2
  exit 2
fi
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

"${PYTHON:-python3}" -m pip download -q --no-deps --no-build-isolation --no-binary :all: \
  --dest "$work" "pytorch-tokenizers==$version"
tar -x -z -f "$work"/*.tar.gz -C "$work"
# Lookahead: the patterns of Qwen's tokenizers have it. Without the definition the library reports on
# standard error what it loads. The parts were written for older CMakes.
cmake -S "$work/pytorch_tokenizers-$version" -B "$work/build" -DCMAKE_BUILD_TYPE=Release \
  -DSUPPORT_REGEX_LOOKAHEAD=ON -DCMAKE_CXX_FLAGS=-DTK_LOG_ENABLED=0 \
  -DCMAKE_POLICY_VERSION_MINIMUM=3.5 "-DCMAKE_INSTALL_PREFIX=$1"
cmake --build "$work/build" -j "${MAX_JOBS:-2}"
cmake --install "$work/build" >"$work/install.log"
echo "tokenizers $version: $1"
