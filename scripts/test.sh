#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds Diffulex with its tests and runs all of them: ctest, then pytest.
#
#   bash scripts/test.sh [--offline] [pytest options]
#
# Environment: PYTHON (interpreter), VENV (default .venv), CMAKE_ARGS, MAX_JOBS.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ "${1:-}" = --offline ]; then
  OFFLINE=1
  shift
fi

. scripts/lib.sh

say "this will: use or create the environment $VENV, install torch if it has none,"
say "build Diffulex in place with its tests, and run the C++ and Python tests"
need "a C++ compiler" has_compiler g++
need "GoogleTest" has_gtest libgtest-dev libgmock-dev
find_python
setup_venv
install_torch
say "building (some minutes the first time)"
build_editable
say "C++ tests"
run_ctest
say "Python tests"
run_pytest "$@"
