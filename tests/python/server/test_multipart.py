# SPDX-License-Identifier: Apache-2.0
"""Forms: what httpx sends is read byte by byte, anything else is refused in one line."""

from __future__ import annotations

import random
import time

import httpx
import pytest

from diffulex.server.http import multipart
from diffulex.server.http.api_errors import ApiError
from diffulex.server.http.multipart import FormPart, parse_form

KIND = "multipart/form-data; boundary=xx"
HEAD = b'--xx\r\nContent-Disposition: form-data; name="a"\r\n\r\n'


def test_what_a_client_sends_is_read() -> None:
    rng = random.Random(0)
    for size in (0, 1, 2, 5000, 100_000):
        data = bytes(rng.choice(b"\r\n-\0a\xff") for _ in range(size))
        request = httpx.Request(
            "POST",
            "http://localhost",
            data={"prompt": "größe\r\nx", "empty": ""},
            files={"image[]": ('a "b".png', data, "image/png")},
        )
        parts = parse_form(request.headers["content-type"], request.read(), 3)
        names = [(part.name, part.filename is None) for part in parts]
        assert names == [("prompt", True), ("empty", True), ("image[]", False)]
        assert parts[0].text() == "größe\r\nx"
        assert parts[1].text() == ""
        assert parts[2].data == data


def test_content_that_looks_like_a_boundary_stays() -> None:
    body = HEAD + b"\r\n--x\r\n--\r\n\r\n--xx--\r\n"
    assert parse_form(KIND, body, 1) == [FormPart("a", None, b"\r\n--x\r\n--\r\n")]


@pytest.mark.parametrize(
    ("kind", "body", "status", "expected"),
    [
        ("application/json", b"{}", 415, "Content-Type: expected multipart/form-data"),
        ("multipart/form-data", b"", 400, "Content-Type: expected a boundary"),
        ("multipart/form-data; boundary=" + "x" * 71, b"", 400, "expected a boundary"),
        (KIND, b"", 400, "expected it to begin with its boundary"),
        (KIND, b"hello" + HEAD, 400, "expected it to begin with its boundary"),
        (KIND, HEAD + b"1", 400, "expected it to end with its boundary"),
        (KIND, HEAD + b"1\r\n" + HEAD + b"2\r\n" + HEAD + b"\r\n--xx--", 400, "at most 2 parts"),
        (KIND, b"--xx\r\nno empty line\r\n--xx--", 400, "expected lines and an empty one"),
        (KIND, b"--xxContent: 1\r\n\r\n1\r\n--xx--", 400, "expected lines and an empty one"),
        (KIND, b"--xx\r\n" + b"x" * 9000 + b"\r\n\r\n1\r\n--xx--", 400, "expected lines"),
        (KIND, b"--xx\r\nX: 1\r\n\r\n1\r\n--xx--", 400, "parts of form-data with a name"),
        (
            KIND,
            b"--xx\r\nContent-Disposition: form-data\r\n\r\n1\r\n--xx--",
            400,
            "parts of form-data with a name",
        ),
    ],
)
def test_other_bodies_are_refused(kind: str, body: bytes, status: int, expected: str) -> None:
    with pytest.raises(ApiError) as raised:
        parse_form(kind, body, 2)
    assert raised.value.status == status
    assert expected in raised.value.message
    assert "\n" not in raised.value.message


@pytest.mark.parametrize("parameter", ["a*" + "1" * 5000 + "=x", "filename*=a\0b''x"])
def test_parameters_that_are_none_are_refused(parameter: str) -> None:
    """The parser of the library takes them for numbers or names of files, and raises other errors."""
    head = f'Content-Disposition: form-data; name="a"; {parameter}'
    body = b"--xx\r\n" + head.encode() + b"\r\n\r\n1\r\n--xx--"
    with pytest.raises(ApiError) as raised:
        parse_form(KIND, body, 2)
    assert raised.value.status == 400
    assert raised.value.message.startswith("body: expected ")


def test_a_type_with_parameters_that_are_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = KIND + "; a*" + "1" * 5000 + "=x"
    with pytest.raises(ApiError, match="Content-Type: expected at most 1024 characters, got more"):
        parse_form(kind, HEAD + b"1\r\n--xx--", 2)
    monkeypatch.setattr(multipart, "_MOST_HEAD", 1 << 14)
    with pytest.raises(ApiError, match="Content-Type: expected parameters, got others"):
        parse_form(kind, HEAD + b"1\r\n--xx--", 2)


def test_many_semicolons_take_no_time() -> None:
    part = b'--xx\r\nContent-Disposition: form-data; name="a"; b="' + b";" * 900 + b'"\r\n\r\n1\r\n'
    begin = time.process_time()
    assert len(parse_form(KIND, part * 64 + b"--xx--", 64)) == 64
    assert time.process_time() - begin < 1
    with pytest.raises(ApiError, match="expected lines and an empty one"):
        parse_form(KIND, part.replace(b";" * 900, b";" * 8000) + b"--xx--", 64)
    with pytest.raises(ApiError, match="Content-Type: expected at most 1024 characters"):
        parse_form(f'{KIND}; a="' + ";" * 60_000, HEAD + b"1\r\n--xx--", 64)


def test_a_field_is_text() -> None:
    with pytest.raises(ApiError, match="a: expected UTF-8, got other bytes"):
        FormPart("a", None, b"\xff").text()
