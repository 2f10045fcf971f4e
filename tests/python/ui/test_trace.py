# SPDX-License-Identifier: Apache-2.0
"""Pages of ``diffulex trace --html`` in a real browser: a recording of every strategy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "trajectories"))

from diffulex.tools.cli import main
from fixtures.browser import PageWatch
from traced_answers import QUESTIONS, Traced, every_strategy, traced  # noqa: F401


@pytest.mark.slow
@every_strategy
def test_a_trace_plays_in_a_browser(traced: Traced, browser: Any, tmp_path: Path) -> None:  # noqa: F811
    file = tmp_path / "replay.html"
    assert main(["trace", str(traced.path), "--html", str(file)]) == 0
    context = browser.new_context(offline=True)
    context.set_default_timeout(60_000)
    page = context.new_page()
    watch = PageWatch(page, file.as_uri())
    page.goto(file.as_uri())
    output = traced.full[0]
    assert page.locator("h1").inner_text() == QUESTIONS[0]
    # The browser folds blanks of the answer's lines no more than the model wrote them.
    assert page.locator(".answer").evaluate("node => node.textContent") == output.text
    cells = page.locator("#buffer .cell")
    if traced.mask_id >= 0:
        assert page.locator('#buffer .cell:not([data-state="masked"])').count() == 0
    seen = _shown_steps(page)
    assert max(counts["new"] for counts in seen) > 0
    if traced.mask_id >= 0:
        assert max(counts["masked"] for counts in seen) > 0
    page.get_by_role("button", name="Last step").click()
    assert page.locator('#buffer .cell[data-state="committed"]').count() == len(output.token_ids)
    assert page.locator('#buffer .cell[data-state="masked"]').count() == 0 or (
        traced.mask_id in output.generated_ids
    )
    assert cells.count() >= len(output.token_ids)
    assert page.locator('[data-metric="nfe"]').inner_text() == str(output.metrics.nfe)
    assert page.locator('[data-metric="tokens"]').inner_text() == str(len(output.token_ids))
    page.get_by_role("button", name="First step").click()
    page.get_by_role("button", name="Play").click()
    page.locator(".summary", has_text="End:").wait_for()
    watch.check()
    context.close()


def _shown_steps(page: Any) -> list[dict[str, int]]:
    """Cells that each frame shows as masked, and as new in it."""
    return list(
        page.evaluate(
            """async () => {
              const slider = document.querySelector(".timeline input");
              const seen = [];
              for (let at = 0; at <= Number(slider.max); at += 1) {
                slider.value = String(at);
                slider.dispatchEvent(new Event("input"));
                const count = (query) => document.querySelectorAll(`#buffer ${query}`).length;
                seen.push({
                  masked: count('.cell[data-state="masked"]'), new: count('.cell[data-change="new"]'),
                });
              }
              return seen;
            }"""
        )
    )
