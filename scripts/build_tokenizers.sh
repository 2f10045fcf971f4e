#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds and installs PyTorch's C++ tokenizer library, with which diffulex-edge-run takes text:
#
#   scripts/build_tokenizers.sh [--system-libraries] PREFIX
#   cmake -S . -B build -Dtokenizers_ROOT=PREFIX ...
#
# The sources, those of the libraries below it included, are what pip has as pytorch-tokenizers. About
# seven minutes of one processor; one with --system-libraries, which takes RE2 and PCRE2 from the system
# (libre2-dev and libpcre2-dev of Debian 12). Environment: PYTHON (interpreter with pip and setuptools),
# MAX_JOBS.
set -euo pipefail

version=1.0.1
usage() {
  echo "usage: scripts/build_tokenizers.sh [--system-libraries] PREFIX" >&2
  exit 2
}
uses_system=0
if [ "${1:-}" = --system-libraries ]; then
  uses_system=1
  shift
fi
[ $# -eq 1 ] && [ -n "$1" ] && [ "${1#-}" = "$1" ] || usage
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

"${PYTHON:-python3}" -m pip download -q --no-deps --no-build-isolation --no-binary :all: \
  --dest "$work" "pytorch-tokenizers==$version"
tar -x -z -f "$work"/*.tar.gz -C "$work"
sources="$work/pytorch_tokenizers-$version"
# The release takes token 0, "!" in many vocabularies, for an error and drops the word that has it.
merging="$sources/src/hf_tokenizer.cpp"
sed -i -e 's/return std::vector<uint64_t>(\*result);/return std::vector<uint64_t>{*result};/' \
  -e 's/return uint64_t(0);/return UINT64_MAX;/' \
  -e 's/if (token_id != 0)/if (token_id != UINT64_MAX)/' "$merging"
if [ "$(grep -c -e '{\*result}' -e UINT64_MAX "$merging")" != 3 ]; then
  echo "scripts/build_tokenizers.sh: expected the three lines about token 0 in hf_tokenizer.cpp, got others" >&2
  exit 1
fi
if [ "$uses_system" = 1 ]; then
  configure=(-S "$root/cmake/tokenizers" "-DTOKENIZERS_SOURCE_DIR=$sources")
else
  # Lookahead: the patterns of Qwen's tokenizers have it. Without the definition the library reports on
  # standard error what it loads. The parts were written for older CMakes.
  configure=(-S "$sources" -DSUPPORT_REGEX_LOOKAHEAD=ON -DCMAKE_CXX_FLAGS=-DTK_LOG_ENABLED=0
    -DCMAKE_POLICY_VERSION_MINIMUM=3.5)
fi
if command -v ccache >/dev/null; then
  # The directory differs every time, what is compiled in it does not.
  export CCACHE_BASEDIR="$work" CCACHE_NOHASHDIR=1
  configure+=(-DCMAKE_C_COMPILER_LAUNCHER=ccache -DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
fi
cmake "${configure[@]}" -B "$work/build" -DCMAKE_BUILD_TYPE=Release "-DCMAKE_INSTALL_PREFIX=$1"
cmake --build "$work/build" -j "${MAX_JOBS:-2}"
cmake --install "$work/build" >"$work/install.log"
echo "tokenizers $version: $1"
