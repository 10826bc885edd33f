"""A head that two programs could read in two ways is refused, and its connection ends."""

from __future__ import annotations

import pytest

from paceline_gateway.request_head import HeadError, check_head
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
    "an empty line first": ("\r\n" + GET, 400),
    "TLS": ("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
}
TAKEN = [
    GET,
    GET.replace("1.1", "1.0"),
    GET + "Accept: a\r\nAccept: b\r\nX-Forwarded-For: a\r\nX-Forwarded-For: b\r\n",
    POST + "content-length:\t0 \r\n",
    POST + "Transfer-Encoding: Chunked\r\n",
    GET + "a:\r\n" * 127,
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
