#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Fills .deps for a build on a host without network: the CUTLASS headers, taken from the PyPI wheel.
# Copy the tree including .deps to that host afterwards.
#
# Environment: PYTHON (interpreter with pip).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

version=4.2.0.0
python="${PYTHON:-python3}"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

echo "downloading nvidia-cutlass $version"
"$python" -m pip download -q --no-deps --only-binary :all: -d "$work" "nvidia-cutlass==$version"
"$python" - "$work" <<'PYTHON'
import pathlib
import sys
import zipfile

(wheel,) = pathlib.Path(sys.argv[1]).glob("*.whl")
prefix = "cutlass_library/source/include/"
with zipfile.ZipFile(wheel) as archive:
    names = [name for name in archive.namelist() if name.startswith(prefix)]
    if prefix + "cutlass/cutlass.h" not in names:
        sys.exit(f"{wheel.name}: expected {prefix}cutlass/cutlass.h, got none")
    archive.extractall(sys.argv[1], names)
PYTHON
mkdir -p .deps/cutlass
rm -rf .deps/cutlass/include
mv "$work/cutlass_library/source/include" .deps/cutlass/include
echo "wrote .deps/cutlass/include"
