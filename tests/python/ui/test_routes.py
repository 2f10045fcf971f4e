# SPDX-License-Identifier: Apache-2.0
"""Routes and files of the page, without a browser."""

from __future__ import annotations

import hashlib
import json
import re
from fnmatch import fnmatch
from importlib import resources
from pathlib import Path

import pytest

fastapi = pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from fastapi import FastAPI  # noqa: E402
from fastapi.testclient import TestClient  # noqa: E402

from diffulex.server.ui import (  # noqa: E402
    ASSET_TYPES,
    IMAGES_PAGE,
    mount_ui,
    page_policy,
    read_assets,
)

ROOT = Path(__file__).resolve().parents[3]
FILES = resources.files("diffulex.server.ui")


@pytest.fixture
def client() -> TestClient:
    app = FastAPI()
    mount_ui(app)
    return TestClient(app, follow_redirects=False)


def test_policy_is_the_specified_one() -> None:
    policy = page_policy("N")
    assert policy.startswith("default-src 'self'; script-src 'nonce-N'; style-src 'nonce-N'")
    assert "unsafe" not in policy


def test_every_answer_has_a_nonce_of_its_own(client: TestClient) -> None:
    nonces = set()
    for _ in range(3):
        answer = client.get("/ui")
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        (nonce,) = set(re.findall(r'nonce="([^"]+)"', answer.text))
        assert answer.headers["content-security-policy"] == page_policy(nonce)
        nonces.add(nonce)
    assert len(nonces) == 3


def test_every_script_and_style_carries_the_nonce(client: TestClient) -> None:
    page = client.get("/ui").text
    for tag in re.findall(r"<(?:script|style|link rel=\"stylesheet\")[^>]*>", page):
        assert "nonce=" in tag
    assert " style=" not in page
    assert not re.findall(r"\son\w+=", page)


def test_referenced_files_are_served(client: TestClient) -> None:
    page = client.get("/ui").text
    names = set(re.findall(r'(?:src|href)="ui/([^"]+)"', page))
    for name in list(names):
        if name.endswith(".js"):
            names |= imported(name, set())
    assert {"app.js", "sse.js", "theme.css", "icon.svg"} <= names
    for name in names:
        answer = client.get(f"/ui/{name}")
        assert answer.status_code == 200, name
        assert answer.headers["content-type"] == ASSET_TYPES["." + name.rpartition(".")[2]]
        assert answer.headers["x-content-type-options"] == "nosniff"
        again = client.get(f"/ui/{name}", headers={"If-None-Match": answer.headers["etag"]})
        assert again.status_code == 304


def test_the_page_of_images_refers_to_files_that_are_there() -> None:
    app = FastAPI()
    mount_ui(app, IMAGES_PAGE)
    client = TestClient(app)
    page = client.get("/ui").text
    names = set(re.findall(r'(?:src|href)="ui/([^"]+)"', page))
    for name in list(names):
        if name.endswith(".js"):
            names |= imported(name, set())
    assert {"images.js", "images.css", "picture.js", "player.js"} <= names
    for name in names:
        assert client.get(f"/ui/{name}").status_code == 200, name
    for tag in re.findall(r"<(?:script|link rel=\"stylesheet\")[^>]*>", page):
        assert "nonce=" in tag


def imported(name: str, seen: set[str]) -> set[str]:
    """Modules that a module imports, and those they import."""
    text = FILES.joinpath(name).read_text(encoding="utf-8")
    for other in re.findall(r'from "\./([^"]+)"', text):
        if other not in seen:
            seen.add(other)
            imported(other, seen)
    return seen


def test_root_leads_to_the_page(client: TestClient) -> None:
    answer = client.get("/")
    assert (answer.status_code, answer.headers["location"]) == (307, "/ui")


def test_root_keeps_a_path_prefix() -> None:
    app = FastAPI()
    mount_ui(app)
    client = TestClient(app, root_path="/models/one", follow_redirects=False)
    answer = client.get("/models/one/")
    assert answer.headers["location"] == "/models/one/ui"


@pytest.mark.parametrize(
    "name", ["nothing.js", "__init__.py", "index.html", "images.html", "..%2f__init__.py"]
)
def test_other_files_are_not_served(client: TestClient, name: str) -> None:
    assert client.get(f"/ui/{name}").status_code == 404


def test_routes_are_not_in_the_document_of_the_api(client: TestClient) -> None:
    assert client.get("/openapi.json").json()["paths"] == {}


@pytest.mark.parametrize("name", sorted([*read_assets(), "index.html", IMAGES_PAGE]))
def test_nothing_comes_from_elsewhere(name: str) -> None:
    text = FILES.joinpath(name).read_text(encoding="utf-8")
    text = text.replace("http://www.w3.org/2000/svg", "")
    if name.startswith("vendor/"):  # where to report faults of a library
        text = text.replace("https://github.com/markedjs/", "")
    assert not re.findall(r"(?:https?:)?//[\w-]+\.\w+", text)
    assert "eval(" not in text
    assert "innerHTML" not in text


def test_wheel_contains_every_file() -> None:
    """The patterns of pyproject.toml cover what the package reads."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (line,) = re.findall(r'^"diffulex\.server\.ui" = \[(.*)\]$', text, re.MULTILINE)
    patterns = re.findall(r'"([^"]+)"', line)
    vendored = [f"vendor/{entry.name}" for entry in FILES.joinpath("vendor").iterdir()]
    for name in (*read_assets(), *vendored, "index.html", IMAGES_PAGE):
        # Patterns of package data are those of a shell: a star ends at a slash.
        same_depth = [pattern for pattern in patterns if pattern.count("/") == name.count("/")]
        assert any(fnmatch(name, pattern) for pattern in same_depth), name


def test_libraries_are_what_the_registry_has() -> None:
    """Version, licence and checksum of every file from elsewhere are written down."""
    folder = FILES.joinpath("vendor")
    versions = json.loads(folder.joinpath("versions.json").read_text(encoding="utf-8"))
    licences = {facts["licence_file"] for facts in versions.values()}
    found = {entry.name for entry in folder.iterdir()}
    assert found == {"versions.json", *versions, *licences}
    for name, facts in versions.items():
        content = folder.joinpath(name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == facts["sha256"], name
        assert f"{facts['package']} v{facts['version']}" in content[:300].decode()


def test_slash_at_the_end_leads_to_the_page(client: TestClient) -> None:
    """Where it is not taken off before: from /ui/ the page would look for ui/ui/app.js."""
    answer = client.get("/ui/")
    assert (answer.status_code, answer.headers["location"]) == (307, "/ui")
