# SPDX-License-Identifier: Apache-2.0
"""`diffulex serve` with a fake engine: python serve_fake.py FACTORY [flags]; `real`: no fake."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent)]

import slow_engine  # noqa: E402
from diffulex.server.args import parse_args  # noqa: E402
from diffulex.server.launch import serve  # noqa: E402

if __name__ == "__main__":
    factory = None if sys.argv[1] == "real" else getattr(slow_engine, sys.argv[1])
    sys.exit(serve(parse_args(sys.argv[2:]), factory))
