#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Formats all C++, CUDA and Python files in place; with --check only reports, as continuous integration
# does. Needs the versions pinned in requirements/ci.txt.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

check=0
case "${1:-}" in
  --check) check=1 ;;
  "") ;;
  *)
    echo "usage: scripts/format.sh [--check]" >&2
    exit 2
    ;;
esac

for tool in clang-format ruff; do
  pinned="$(sed -n "s/^$tool==//p" requirements/ci.txt)"
  found="$(command -v "$tool" >/dev/null && "$tool" --version | grep -Eo '[0-9]+\.[0-9]+\.[0-9]+' | head -n 1 || true)"
  if [ "$found" != "$pinned" ]; then
    echo "scripts/format.sh: expected $tool $pinned, got ${found:-none} (pip install $tool==$pinned)" >&2
    exit 1
  fi
done

mapfile -d '' -t sources < <(
  find include csrc tests benchmarks examples -type f \
    \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) -print0 | sort -z
)
if [ "$check" = 1 ]; then
  ruff check .
  ruff format --check .
  clang-format --dry-run -Werror "${sources[@]}"
else
  ruff check --fix .
  ruff format .
  clang-format -i "${sources[@]}"
fi
