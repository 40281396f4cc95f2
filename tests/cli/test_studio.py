"""`palaestra studio`: what it says when it cannot open its window. Nothing here needs a display."""

import importlib.util
import sys

import pytest
from tests.runs.serving import service_thread
from tests.studio.proxy import Proxy

ODD_URLS = ["http://[::1", "http://a b:80", "http://x..y:80", f"http://{'x' * 70}:80", "http://host:80/path?query"]
STUDIO_VARIABLES = ("DISPLAY", "WAYLAND_DISPLAY", "QT_QPA_PLATFORM", "PALAESTRA_TOKEN")


@pytest.fixture
def studio(palaestra, monkeypatch):
    """`palaestra studio …`, as on a machine with a display."""
    for name in STUDIO_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DISPLAY", ":99")
    return lambda *words: palaestra("studio", *words)


def assert_refused(result, *parts):
    assert result.code == 2
    assert result.out == ""
    assert len(result.err.strip().splitlines()) == 1, result.err
    for part in parts:
        assert part in result.err


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--theme", "pink"), "--theme = 'pink': unknown theme. Use dark, light or system"),
        (("--screenshot", "page.jpg"), "is not a PNG file"),
        (("--token-file", "token"), "needs --connect"),
        (("--connect", "http://127.0.0.1:1"), "needs its token"),
    ],
)
def test_wrong_options_are_refused_in_one_line(studio, words, part):
    assert_refused(studio(*words), part)


def test_a_token_file_that_is_missing_or_a_directory_is_named(studio, tmp_path):
    assert_refused(
        studio("--connect", "http://127.0.0.1:1", "--token-file", "absent"), "--token-file = 'absent'", "cannot be read"
    )
    assert_refused(studio("--connect", "http://127.0.0.1:1", "--token-file", tmp_path), "directory")


@pytest.mark.parametrize("content", [b"two words\nand lines", b"\xff\x00\xfe", b"\n"])
def test_a_file_without_a_token_is_named(studio, tmp_path, content):
    (tmp_path / "token").write_bytes(content)
    result = studio("--connect", "http://127.0.0.1:1", "--token-file", "token")
    assert_refused(result, "--token-file = 'token': holds no token")


@pytest.mark.parametrize(
    "url", ["ftp://host", "host:8710", "http://", "http://user:secret@host", "http://host:port", *ODD_URLS]
)
def test_an_address_that_is_none_is_refused(studio, monkeypatch, url):
    monkeypatch.setenv("PALAESTRA_TOKEN", "x")
    result = studio("--connect", url)
    assert_refused(result, "url")
    assert "secret" not in result.err or "user or password" in result.err


def test_an_address_where_nothing_answers_is_one_line(studio, monkeypatch):
    monkeypatch.setenv("PALAESTRA_TOKEN", "x")
    result = studio("--connect", "http://127.0.0.1:1")
    assert result.code != 0
    assert len(result.err.strip().splitlines()) == 1
    assert "http://127.0.0.1:1 does not answer" in result.err


def test_a_wrong_token_and_an_address_of_something_else_are_told_apart(studio, monkeypatch, home):
    monkeypatch.setenv("PALAESTRA_TOKEN", "wrong")
    with service_thread(home) as url:
        result = studio("--connect", url)
        assert result.code != 0
        assert len(result.err.strip().splitlines()) == 1
        assert "token" in result.err
        with Proxy(url) as proxy:
            for kind in ("page", "object", "error"):
                proxy.answer(kind)
                result = studio("--connect", proxy.url)
                assert result.code != 0
                assert len(result.err.strip().splitlines()) == 1, result.err
                assert proxy.url in result.err


def test_without_a_display_the_message_names_the_ways_out(studio, monkeypatch):
    monkeypatch.delenv("DISPLAY")
    assert_refused(studio(), "there is no display here", "--connect", "--screenshot FILE")


def test_without_the_packages_the_message_is_the_command_that_installs_them(studio, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "PySide6" else find(name))
    assert_refused(studio(), "PySide6", "is not installed", "pip install 'palaestra[studio]'")


def test_without_a_system_library_the_message_is_the_command_that_installs_it(studio, monkeypatch, home):
    for name in [name for name in sys.modules if name.startswith("palaestra.studio.qt")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "PySide6.QtGui", None)
    with service_thread(home):
        assert_refused(studio(), "cannot be loaded", "apt-get install libegl1")
