# SPDX-License-Identifier: Apache-2.0
"""A server and a browser for the tests of the page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fixtures.browser import find_chromium, open_browser
from fixtures.live_server import LiveServer, running_server
from fixtures.ui_page import open_page


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    find_chromium()
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
    with running_server("--device", "cpu") as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as running:
        yield running


@pytest.fixture
def page(server: LiveServer, browser: Any) -> Iterator[Any]:
    with open_page(server, browser) as opened:
        yield opened
