# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffulex.bench.serve.errors import RequestError
from diffulex.bench.serve.http_stream import BodyDecoder, Endpoint, HttpClient
from diffulex.errors import ConfigError
from fixtures.sse_endpoint import Answer, sse_endpoint

_CHUNKED = {"transfer-encoding": "chunked"}


def _split(data: bytes, cuts: list[int]) -> list[bytes]:
    points = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[low:high] for low, high in itertools.pairwise(points)]


@given(
    st.lists(st.binary(min_size=1, max_size=40), max_size=5),
    st.lists(st.integers(0, 500)),
    st.sampled_from([b"", b"X-Trailer: 1\r\n"]),
    st.sampled_from([b"", b";name=value"]),
)
def test_chunks_are_joined_wherever_the_network_splits_them(
    chunks: list[bytes], cuts: list[int], trailer: bytes, extension: bytes
) -> None:
    encoded = b"".join(b"%x%s\r\n%s\r\n" % (len(c), extension, c) for c in chunks)
    encoded += b"0\r\n" + trailer + b"\r\n"
    decoder = BodyDecoder(200, _CHUNKED)
    parts = [decoder.feed(part) for part in _split(encoded, cuts)]
    assert b"".join(parts) == b"".join(chunks)
    assert decoder.is_complete


def test_a_chunk_is_delivered_before_the_next_one_arrives() -> None:
    decoder = BodyDecoder(200, _CHUNKED)
    assert decoder.feed(b"3\r\nabc") == b"abc"
    assert not decoder.is_complete
    assert decoder.feed(b"\r\n0\r\n\r") == b""
    assert not decoder.is_complete
    assert decoder.feed(b"\n") == b""
    assert decoder.is_complete


def test_a_body_of_known_length_ends_there() -> None:
    decoder = BodyDecoder(200, {"content-length": "5"})
    assert decoder.feed(b"abc") == b"abc"
    assert not decoder.is_complete
    assert decoder.feed(b"defgh") == b"de"
    assert decoder.is_complete
    assert BodyDecoder(200, {"content-length": "0"}).is_complete
    assert BodyDecoder(204, {}).is_complete


def test_a_body_without_length_ends_with_the_connection() -> None:
    decoder = BodyDecoder(200, {})
    assert decoder.ends_with_connection
    assert decoder.feed(b"abc") == b"abc"
    assert not decoder.is_complete


@pytest.mark.parametrize("line", [b"xyz\r\n", b"-4\r\n", b"\r\n"])
def test_a_malformed_chunk_length_is_a_protocol_error(line: bytes) -> None:
    with pytest.raises(RequestError, match="expected a body length") as caught:
        BodyDecoder(200, _CHUNKED).feed(line)
    assert caught.value.kind == "protocol"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://host:81", "http://host:81"),
        ("http://host", "http://host:80"),
        ("https://host/", "https://host:443"),
        ("http://host:81/v1", "http://host:81"),
        ("http://host:81/gateway/v1/", "http://host:81/gateway"),
        ("http://[::1]:81/v1", "http://[::1]:81"),
        ("http://b\u00fccher.example/\u00e4%20/v1", "http://xn--bcher-kva.example:80/%C3%A4%20"),
    ],
)
def test_the_address_is_the_same_with_and_without_v1(url: str, shown: str) -> None:
    assert Endpoint.parse(url).url == shown


@pytest.mark.parametrize(
    "url", ["", "host:80", "ftp://host", "http://", "http://h:x", "http://h?a=b"]
)
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"base_url: expected http\(s\)://host"):
        Endpoint.parse(url)


def _bodies(client: HttpClient, count: int) -> list[bytes]:
    async def read() -> list[bytes]:
        bodies = []
        for _ in range(count):
            async with client.request("POST", "/", b"{}") as response:
                bodies.append(await response.read())
        await client.close()
        return bodies

    return asyncio.run(read())


def test_a_connection_serves_request_after_request() -> None:
    with sse_endpoint(lambda _: Answer([(0, "one"), (0, "two")])) as endpoint:
        assert _bodies(HttpClient(Endpoint.parse(endpoint.url)), 3) == [b"onetwo"] * 3
        assert endpoint.num_connections == 1


def test_a_connection_closed_while_idle_is_replaced() -> None:
    """`is_cut` after a whole body of known length closes the connection without saying so."""
    answer = Answer([], headers={}, is_cut=True)
    with sse_endpoint(lambda _: answer) as endpoint:
        client = HttpClient(Endpoint.parse(endpoint.url))

        async def twice() -> list[int]:
            statuses = []
            for _ in range(2):
                async with client.request("GET", "/v1/models") as response:
                    await response.read()
                    statuses.append(response.status)
                # The server forgets the connection; the client still holds it as idle.
                for connection in client._idle:
                    connection.reader.feed_eof()
            await client.close()
            return statuses

        assert asyncio.run(twice()) == [200, 200]
        assert endpoint.num_connections == 2


def test_a_body_cut_short_is_truncated() -> None:
    with sse_endpoint(lambda _: Answer([(0, "one")], is_cut=True)) as endpoint:
        with pytest.raises(RequestError, match="expected the rest of it") as caught:
            _bodies(HttpClient(Endpoint.parse(endpoint.url)), 1)
        assert caught.value.kind == "truncated"


def test_no_server_is_said_with_its_address() -> None:
    with sse_endpoint(lambda _: Answer()) as endpoint:
        url = endpoint.url
    with pytest.raises(RequestError, match=f"{url}: expected a server") as caught:
        _bodies(HttpClient(Endpoint.parse(url)), 1)
    assert caught.value.kind == "connect"


def test_something_else_than_http_is_a_protocol_error() -> None:
    async def talk() -> None:
        async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"220 mail ready\r\n\r\n")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(greet, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            client = HttpClient(Endpoint.parse(f"http://127.0.0.1:{port}"))
            async with client.request("GET", "/"):
                pass

    with pytest.raises(RequestError, match=r"expected HTTP/1\.1") as caught:
        asyncio.run(talk())
    assert caught.value.kind == "protocol"
