# SPDX-License-Identifier: Apache-2.0
"""Answers pairs of texts, one JSON list a line, with whether they are the same mathematics.

Started as a file by `diffulex.bench.scoring.verifier`, which ends it when an answer takes too long.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any


def is_same(parse: Any, verify: Any, gold: str, predicted: str) -> bool:
    """Whether both can be read and are equal."""
    try:
        # Its own limits work by signals; this process is ended from outside.
        left, right = (parse(f"${text}$", parsing_timeout=None) for text in (gold, predicted))
        return bool(left and right and verify(left, right, timeout_seconds=None))
    except Exception:  # a parser of what models write may raise anything
        return False


def main() -> None:
    logging.disable()  # the package warns about every limit that is set here instead
    from math_verify import parse, verify  # noqa: PLC0415 (slow to import)

    for line in sys.stdin:
        gold, predicted = json.loads(line)
        print(json.dumps(is_same(parse, verify, gold, predicted)), flush=True)


if __name__ == "__main__":
    main()
