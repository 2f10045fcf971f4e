# SPDX-License-Identifier: Apache-2.0
"""A recording as one HTML file that plays without a server; ``export.js`` makes the same."""

from __future__ import annotations

import html
import json
import re
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["replay_html"]

_PAGE = "replay.html"


def replay_html(recording: Mapping[str, Any]) -> str:
    """The page of a recording: it may run what is written in it, and loads nothing at all."""
    here = resources.files("diffulex.server.ui")

    def part(match: re.Match[str]) -> str:
        name = match[1]
        if name == "title":
            return html.escape(recording["meta"]["question"])
        if name == "recording":
            return json.dumps(recording, ensure_ascii=False).replace("<", "\\u003c")
        text = here.joinpath(name).read_text(encoding="utf-8")
        # All modules end up in one script.
        return re.sub(r"^import [^;]*;\n", "", text, flags=re.MULTILINE)

    return re.sub(r"\{\{([\w.-]+)\}\}", part, here.joinpath(_PAGE).read_text(encoding="utf-8"))
