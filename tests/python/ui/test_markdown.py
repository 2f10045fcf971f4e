# SPDX-License-Identifier: Apache-2.0
"""What a model wrote, as nodes of the page: formatted, and never more than text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fixtures.ui_page import open_modules

_HOSTILE = [
    "<script>window.attacked = 1</script>",
    "<img src=x onerror='window.attacked = 1'>",
    "<svg onload='window.attacked = 1'>",
    "<iframe srcdoc='<script>parent.attacked = 1</script>'></iframe>",
    "[go](javascript:window.attacked=1)",
    "[go](JaVaScRiPt:window.attacked=1)",
    "[go](java\tscript:window.attacked=1)",
    "[go](data:text/html,<script>alert(1)</script>)",
    "[go](vbscript:x) <javascript:window.attacked=1>",
    "[x]: javascript:window.attacked=1\n\n[x]",
    "![pic](http://elsewhere.test/pixel.png)",
    "![pic](javascript:window.attacked=1)",
    "```<img src=x onerror=window.attacked=1>\n</code></pre><script>window.attacked=1</script>\n```",
    "| <img src=x onerror=window.attacked=1> |\n| --- |\n| <b onclick=window.attacked=1>x</b> |",
    "- [ ] <input autofocus onfocus=window.attacked=1>",
    "<style>body{display:none}</style><link rel=stylesheet href=//elsewhere.test>",
    "<form action=javascript:window.attacked=1><button>x</button></form>",
    "# <a href='javascript:window.attacked=1' style=position:fixed>x</a>",
]


@pytest.fixture(scope="module")
def page(browser: Any) -> Iterator[Any]:
    with open_modules(browser) as opened:
        yield opened


def render(page: Any, text: str) -> Any:
    """Tags in order of the nodes of a text, its shown text, and addresses of its links."""
    return page.evaluate(
        """async (text) => {
          const { renderMarkdown } = await import("/ui/markdown.js");
          const host = document.createElement("div");
          document.body.replaceChildren(host);
          renderMarkdown(host, text);
          const nodes = [...host.querySelectorAll("*")];
          return {
            tags: nodes.map((node) => node.localName),
            text: host.innerText,
            raw: host.textContent,
            links: [...host.querySelectorAll("a")].map((node) => node.getAttribute("href")),
            attributes: [...new Set(nodes.flatMap((node) => node.getAttributeNames()))],
            isFormatted: host.classList.contains("formatted"),
          };
        }""",
        text,
    )


@pytest.mark.parametrize("text", _HOSTILE)
def test_markup_of_a_model_stays_text(page: Any, text: str) -> None:
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    result = render(page, text)
    page.wait_for_timeout(30)
    assert page.evaluate("window.attacked") is None
    forbidden = {"script", "img", "svg", "iframe", "style", "link", "form", "object", "b"}
    assert not forbidden & set(result["tags"])
    assert not [name for name in result["attributes"] if name.startswith("on") or name == "style"]
    assert all(link.startswith(("http:", "https:", "mailto:")) for link in result["links"])
    assert not [url for url in asked if "elsewhere" in url]


def test_tags_are_shown_as_written(page: Any) -> None:
    assert render(page, "a <b>bold</b> claim &lt;x&gt;")["raw"] == "a <b>bold</b> claim &lt;x&gt;"


def test_usual_forms_become_nodes(page: Any) -> None:
    text = (
        "# Title\n\nSome **strong**, *soft*, ~~old~~ text with `code`\nand a second line.\n\n"
        "1. one\n2. two\n   - nested\n\n> quoted\n\n```python\nprint(1 < 2)\n```\n\n"
        "| a | b |\n| --: | --- |\n| 1 | 2 |\n\n- [x] done\n\n[site](https://example.org/a?b=1)\n"
    )
    result = render(page, text)
    tags = result["tags"]
    for tag in ("h4", "strong", "em", "del", "code", "br", "ol", "ul", "li", "blockquote", "pre",
                "table", "th", "td", "input", "a"):  # fmt: skip
        assert tag in tags, tag
    assert result["links"] == ["https://example.org/a?b=1"]
    assert "print(1 < 2)" in result["text"]
    assert "python" in result["text"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("#### 7", ["h4"]),
        ("# a\n### b\n###### c\n# d", ["h4", "h5", "h6", "h4"]),
        ("###### a\n## b", ["h4", "h5"]),
    ],
)
def test_no_level_of_heading_is_skipped(page: Any, text: str, expected: list[str]) -> None:
    """They stand below the third level, that of messages."""
    assert render(page, text)["tags"] == expected


@pytest.mark.parametrize("text", ["x" * 120_000, "> " * 3000 + "deep", "- " * 400 + "deep"])
def test_what_cannot_be_formatted_stays_plain(page: Any, text: str) -> None:
    result = render(page, text)
    assert not result["isFormatted"]
    assert result["raw"] == text


@pytest.mark.slow
def test_half_a_text_is_no_error(page: Any) -> None:
    """While an answer is written, every prefix of it is drawn."""
    text = "# T\n\n| a |\n| - |\n| `x` |\n\n```c\nint x;\n```\n[a](https://example.org) **b**"
    for length in range(len(text) + 1):
        render(page, text[:length])
