"""What reaches a session and what does not: paths and headers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaestra.errors import SessionRefused
from palaestra.gateway.proxy import parse_proxy_path, request_headers, response_headers


@pytest.mark.parametrize(
    ("raw", "session_id", "path"),
    [
        (b"/proxy/4f2a/act", "4f2a", "act"),
        (b"/proxy/4f2a/a/b/c", "4f2a", "a/b/c"),
        (b"/proxy/4f2a/files/a%20b.png", "4f2a", "files/a%20b.png"),
        (b"/proxy/4f2a/a..b/..c/d..", "4f2a", "a..b/..c/d.."),
        (b"/proxy/4f2a/folder/", "4f2a", "folder/"),
        (b"/proxy/4f2a/%C3%A9", "4f2a", "%C3%A9"),
    ],
)
def test_a_path_is_forwarded_byte_for_byte(raw, session_id, path):
    assert parse_proxy_path(raw) == (session_id, path)


@pytest.mark.parametrize(
    "raw",
    [
        b"/proxy/",
        b"/proxy//act",
        b"/proxy/4f2a",
        b"/proxy/4f2a/",
        b"/proxy/../sessions",
        b"/proxy/4f2a/..",
        b"/proxy/4f2a/../other/act",
        b"/proxy/4f2a/a/../../other/act",
        b"/proxy/4f2a/%2e%2e/other/act",
        b"/proxy/4f2a/.%2E/other",
        b"/proxy/4f2a/%252e%252e/other",
        b"/proxy/4f2a/%25252e%25252e/other",
        b"/proxy/4f2a/..%2fother",
        b"/proxy/4f2a/..%252fother",
        b"/proxy/4f2a/..%5cother",
        b"/proxy/4f2a/..\\other",
        b"/proxy/4f2a/..;/other",
        b"/proxy/4f2a/./act",
        b"/proxy/4f2a/http://evil/act",
        b"/proxy/4f2a/a/https://evil",
        b"/proxy/4f2a//evil/act",
        b"/proxy/4f2a/a//b",
        b"/proxy/4f2a/a%00b",
        b"/proxy/4f2a/a%0d%0aHost:evil",
        b"/proxy/4f2a/a b",
        b"/proxy/4f2a/a%zz",
        b"/proxy/4f2a/a#b",
        b"/proxy/4f%32a/act",
        b"/proxy/a.b/act",
        b"/proxy/" + b"a" * 65 + b"/act",
    ],
)
def test_a_path_that_two_readers_could_read_differently_is_refused(raw):
    with pytest.raises(SessionRefused) as caught:
        parse_proxy_path(raw)
    assert (caught.value.status, caught.value.code) == (400, "bad_path")


@given(st.text(alphabet="./\\%25efEF;a", max_size=12))
def test_no_path_that_is_let_through_climbs_out_whatever_is_decoded_how_often(path):
    from urllib.parse import unquote

    try:
        _, let_through = parse_proxy_path(b"/proxy/id/" + path.encode())
    except SessionRefused:
        return
    for _ in range(6):
        parts = let_through.replace("\\", "/").split("/")
        assert ".." not in parts
        assert "." not in parts
        let_through = unquote(let_through)


def test_tokens_cookies_and_what_concerns_one_connection_stay_here():
    sent = [
        (b"authorization", b"Bearer secret"), (b"cookie", b"a=b"), (b"host", b"me"), (b"connection", b"X-One, close"),
        (b"x-one", b"1"), (b"keep-alive", b"5"), (b"te", b"trailers"), (b"upgrade", b"h2c"), (b"expect", b"100"),
        (b"proxy-authorization", b"Basic x"), (b"transfer-encoding", b"chunked"), (b"content-type", b"text/plain"),
        (b"accept", b"image/png"), (b"x-two", b"2"),
    ]  # fmt: skip

    assert request_headers(sent) == [(b"content-type", b"text/plain"), (b"accept", b"image/png"), (b"x-two", b"2")]


def test_a_session_can_set_no_cookie_for_the_gateway():
    answered = [(b"Set-Cookie", b"a=b"), (b"Content-Type", b"image/png"), (b"Connection", b"x-hop"), (b"X-Hop", b"1")]

    assert response_headers(answered) == [(b"content-type", b"image/png")]


def test_a_header_that_comes_twice_goes_on_twice():
    twice = [(b"x-two", b"1"), (b"x-two", b"2")]

    assert request_headers(twice) == twice
