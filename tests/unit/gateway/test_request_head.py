"""A head that two programs could read in two ways is refused, and its connection ends."""

from __future__ import annotations

import pytest

from paceline_gateway.http.request_head import HeadError, check_head, path_of
from support.gateway import gateway_over

POST = "POST /v1/models HTTP/1.1\r\nHost: localhost\r\n"
GET = "GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"
REFUSED = {
    "length and chunks": (POST + "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", 400),
    "chunks and length": (POST + "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n", 400),
    "two lengths": (POST + "Content-Length: 5\r\nContent-Length: 6\r\n", 400),
    "the same length twice": (POST + "Content-Length: 5\r\nContent-Length: 5\r\n", 400),
    "two lengths in one": (POST + "Content-Length: 5, 5\r\n", 400),
    "a length with a sign": (POST + "Content-Length: +5\r\n", 400),
    "a negative length": (POST + "Content-Length: -5\r\n", 400),
    "a length with a space": (POST + "Content-Length: 1 0\r\n", 400),
    "a length with an underscore": (POST + "Content-Length: 1_0\r\n", 400),
    "a hexadecimal length": (POST + "Content-Length: 0x5\r\n", 400),
    "an empty length": (POST + "Content-Length:\r\n", 400),
    "an endless length": (POST + f"Content-Length: {'9' * 40}\r\n", 400),
    "a space before a colon": (POST + "Content-Length : 5\r\n", 400),
    "another coding": (POST + "Transfer-Encoding: gzip\r\n", 501),
    "two codings": (POST + "Transfer-Encoding: gzip, chunked\r\n", 501),
    "a quoted coding": (POST + 'Transfer-Encoding: "chunked"\r\n', 501),
    "the coding twice": (
        POST + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        400,
    ),
    "chunks in HTTP/1.0": (
        POST.replace("1.1", "1.0") + "Transfer-Encoding: chunked\r\n",
        400,
    ),
    "two keys": (GET + "Authorization: Bearer a\r\nauthorization: Bearer b\r\n", 400),
    "the same key twice": (GET + "Authorization: Bearer a\r\nAuthorization: Bearer a\r\n", 400),
    "two keys of the other kind": (GET + "X-Api-Key: a\r\nx-api-key: b\r\n", 400),
    "two origins": (GET + "Origin: http://localhost\r\nOrigin: http://localhost\r\n", 400),
    "two types of content": (POST + "Content-Type: a/b\r\ncontent-type: a/b\r\n", 400),
    "two encodings of content": (POST + "Content-Encoding: gzip\r\nContent-Encoding: br\r\n", 400),
    "two hosts": (GET + "Host: localhost\r\n", 400),
    "no host": (GET.replace("Host: localhost\r\n", ""), 400),
    "a folded line": (GET + "X: a\r\n b\r\n", 400),
    "a line folded with a tab": (GET + "X: a\r\n\tb\r\n", 400),
    "a folded first line": (GET.replace("Host", " Host"), 400),
    "a bare line feed": (GET + "X: a\nY: b\r\n", 400),
    "a bare carriage return": (GET + "X: a\rY: b\r\n", 400),
    "a null": (GET + "X: a\0b\r\n", 400),
    "a null in a name": (GET + "X\0: a\r\n", 400),
    "no colon": (GET + "X\r\n", 400),
    "no name": (GET + ": a\r\n", 400),
    "one field too many": (GET + "a:\r\n" * 128, 431),
    "a long field": (GET + f"X: {'x' * 20_000}\r\n", 431),
    "a long line": (GET.replace("/v1", "/" + "x" * 20_000), 431),
    "another host's target": (GET.replace("/v1", "http://evil.example/v1"), 400),
    "a target without a path": (GET.replace("/v1/models", "*"), 400),
    "a tunnel": ("CONNECT evil.example:443 HTTP/1.1\r\nHost: evil.example:443\r\n", 400),
    "HTTP/0.9": ("GET /v1/models\r\n", 400),
    "HTTP/2 without asking": ("PRI * HTTP/2.0\r\n", 505),
    "a version that is not": (GET.replace("1.1", "1.2"), 505),
    "two spaces": (GET.replace(" HTTP", "  HTTP"), 400),
    "two empty lines first": ("\r\n\r\n" + GET, 400),
    "a target with a user": (GET.replace("/v1", "http://a@localhost/v1"), 400),
    "a target of another scheme": (GET.replace("/v1", "ftp://localhost/v1"), 400),
    "a target with another port": (GET.replace("/v1", "http://localhost:1/v1"), 400),
    "TLS": ("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
}
TAKEN = [
    GET,
    GET.replace("1.1", "1.0"),
    GET + "Accept: a\r\nAccept: b\r\nX-Forwarded-For: a\r\nX-Forwarded-For: b\r\n",
    POST + "content-length:\t0 \r\n",
    POST + "Transfer-Encoding: Chunked\r\n",
    GET + "a:\r\n" * 127,
    GET.replace("/v1", "http://localhost/v1"),
]


async def test_a_head_that_is_not_clear_is_refused_and_nothing_after_it_is_read():
    answers = {}
    async with gateway_over() as gateway:
        for name, (head, _) in REFUSED.items():
            async with gateway.connected() as (reader, writer):
                writer.write(f"{head}\r\n{GET}\r\n".encode("latin-1"))
                answers[name] = (await reader.read()).decode()
    begins = {name: answer.partition("\r\n")[0] for name, answer in answers.items()}
    assert {name: int(line.split()[1]) for name, line in begins.items()} == {
        name: status for name, (_, status) in REFUSED.items()
    }
    for answer in answers.values():
        assert answer.count("content-length: ") == 1
        assert "connection: close" in answer.lower()
        assert '{"error": {"message": ' in answer


@pytest.mark.parametrize("head", TAKEN)
def test_a_clear_head_is_taken_in_whatever_pieces_it_comes(head):
    whole = f"{head}\r\n".encode()
    for length in range(len(whole) + 1):
        check_head(whole[:length])


def test_a_stray_end_of_line_is_refused_before_the_head_ends():
    with pytest.raises(HeadError, match="CR LF"):
        check_head(b"GET / HTTP/1.1\nHost")
    with pytest.raises(HeadError, match="CR LF"):
        check_head(b"GET / HTTP/1.1\r\nX: a\rY")


async def test_what_servers_have_to_understand_is_taken():
    """RFC 9112: a target as proxies are sent it (3.2.2), and an empty line before a head (2.2)."""
    forms = [
        GET.replace("/v1", "http://localhost/v1"),
        GET.replace("/v1", "HTTP://LOCALHOST/v1"),
        GET.replace("/v1/models", "https://localhost/v1/models?a=b"),
        "\r\n" + GET,
    ]
    async with gateway_over() as gateway, gateway.connected() as (reader, writer):
        for form in forms:
            writer.write(f"{form}\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 "), form
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            assert b'"fake"' in await reader.readexactly(int(length))
    for target, path in (("http://a", "/"), ("http://a?b", "/?b"), ("/a?b", "/a?b")):
        assert path_of(target.encode()) == path.encode()


async def test_an_empty_line_behind_a_body_begins_no_head():
    body = b'{"model": "fake", "prompt": "p"}'
    head = f"{POST.replace('models', 'completions')}Content-Length: {len(body)}\r\n\r\n".encode()
    async with (
        gateway_over(slow_reader_seconds=0.1) as gateway,
        gateway.connected() as (reader, writer),
    ):
        for _ in range(2):
            writer.write(head + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200 ")
            length = answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            await reader.readexactly(int(length))
            writer.write(b"\r\n")
            async with gateway.connected() as (silent, _):
                assert await silent.read() == b""  # for as long as a head may take
