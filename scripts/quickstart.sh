#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs Diffulex into a virtual environment and answers a prompt with the bundled model.
#
#   bash scripts/quickstart.sh [--offline] "your prompt" [further options of `diffulex generate`]
#
# Environment: PYTHON (interpreter), VENV (default .venv).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
  echo "usage: bash scripts/quickstart.sh [--offline] \"your prompt\" [generate options]" >&2
  exit 2
}

if [ "${1:-}" = --offline ]; then
  OFFLINE=1
  shift
fi
case "${1:-}" in
  "" | --*) usage ;;
esac
prompt="$1"
shift

. scripts/lib.sh

say "this will: use or create the environment $VENV, install torch if it has none,"
say "build and install Diffulex from this directory, and answer the prompt with the bundled model"
need "a C++ compiler" has_compiler g++
find_python
setup_venv
install_torch
say "building and installing Diffulex (3 to 10 minutes the first time; 2 GB of disk with torch)"
if [ "$OFFLINE" = 1 ]; then
  with_progress pip install -q --no-build-isolation --no-deps .
else
  with_progress pip install -q .
fi
say "generating"
exec python -m diffulex generate --model demo --device auto "--prompt=$prompt" "$@"
