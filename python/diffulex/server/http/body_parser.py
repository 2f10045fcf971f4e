# SPDX-License-Identifier: Apache-2.0
"""Program that parses the JSON body on its standard input: `body_parser.py LIMITS`.

Parsing holds the interpreter for as long as it takes, and a few bytes of JSON make hundreds of
bytes of objects, so a large body is parsed in a separate process. Its result (`marshal`, on
standard output) is one of

    ("document", value)               the body, within its limits
    ("size", field, kind, most, got)  a field is longer than the server takes
    ("json", message, position)       the body is no JSON
    ("other", message)                anything else that parsing raised

Imports the standard library only, and nothing of this package: it starts in a few milliseconds.
"""

from __future__ import annotations

import gc
import json
import marshal
import os
import resource
import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["find_excess", "parse_body"]

Limits = Mapping[str, Mapping[str, int]]

#: JSON values of a body, numbers of token ids not counted.
_MAX_VALUES = 1 << 16
# What the objects of a body may take: bodies that ask something need less.
_SPARE_BYTES, _BYTES_PER_BYTE = 256 << 20, 16


def find_excess(document: Mapping[str, Any], limits: Limits) -> tuple[str, str, int, int] | None:
    """The first field that is longer than it may be: (field, kind, most, got).

    The values of all fields together have one limit; the field that exceeds it is named.

    Args:
        document: a parsed body.
        limits: by field: `chars` of a text; `items` of a list; `ids` of a list of numbers, also of
            one inside a list, and then `total` of all of them.
    """
    num_values = 0
    for field, value in document.items():
        most = limits.get(field, {})
        found = _excess(value, most)
        if found is None and isinstance(value, list) and "ids" in most:
            found = next(filter(None, (_excess(item, most) for item in value)), None)
        if found is None:
            num_ids, num_others = _count_values(value, has_ids="total" in most)
            num_values += num_others
            if num_ids > most.get("total", 0):
                found = ("total", most["total"], num_ids)
            elif num_values > _MAX_VALUES:
                found = ("values", _MAX_VALUES, num_values)
        if found is not None:
            return field, *found
    return None


def _excess(value: Any, most: Mapping[str, int]) -> tuple[str, int, int] | None:
    kind = "chars" if isinstance(value, str) else "items" if isinstance(value, list) else None
    # A list of numbers means token ids.
    if kind == "items" and "ids" in most and value and isinstance(value[0], (int, float)):
        kind = "ids"
    if kind is None or kind not in most or len(value) <= most[kind]:
        return None
    return kind, most[kind], len(value)


def _count_values(value: Any, *, has_ids: bool) -> tuple[int, int]:
    """The numbers in lists, where they are token ids, and all other values."""
    num_ids, count, open_values = 0, 1, [value]
    while open_values:
        item = open_values.pop()
        if isinstance(item, (dict, list)):
            inner = item.values() if isinstance(item, dict) else item
            open_values.extend(value for value in inner if isinstance(value, (dict, list)))
            count += len(item)
            if has_ids and isinstance(item, list):
                num_ids += sum(isinstance(value, (int, float)) for value in item)
    return num_ids, count - num_ids


def parse_body(body: bytes, limits: Limits) -> tuple[Any, ...]:
    """What is written to standard output for a body."""
    try:
        document = json.loads(body)
    except json.JSONDecodeError as error:
        return "json", error.msg, error.pos
    except MemoryError:
        return "other", "expected fewer values, got more than the server takes"
    except (ValueError, RecursionError) as error:
        return "other", f"expected JSON, got {error}"
    if not isinstance(document, dict):
        return "other", f"expected a JSON object, got {type(document).__name__}"
    excess = find_excess(document, limits)
    return ("document", document) if excess is None else ("size", *excess)


def _main() -> None:
    # Others have their answers first.
    os.nice(5)
    # Nothing here is garbage, and looking for it takes longer than parsing.
    gc.disable()
    body = sys.stdin.buffer.read()
    most = _SPARE_BYTES + _BYTES_PER_BYTE * len(body)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    result = parse_body(body, json.loads(sys.argv[1]))
    sys.stdout.buffer.write(marshal.dumps(result))


if __name__ == "__main__":
    _main()
