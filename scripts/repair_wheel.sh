#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Gives a wheel the platform tag that an index takes, for scripts/wheel.sh and cibuildwheel:
#
#   bash scripts/repair_wheel.sh DIRECTORY WHEEL
#
# torch brings its own libraries; a wheel with a copy of them would load two.
set -euo pipefail

if [ "$(uname)" = Darwin ]; then
  delocate-wheel --exclude libtorch --exclude libc10 -w "$1" "$2"
else
  auditwheel repair -w "$1" --exclude 'libtorch*.so*' --exclude 'libc10*.so*' \
    --exclude 'libcudart.so*' --exclude 'libcublas*.so*' "$2"
fi
