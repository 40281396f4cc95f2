"""`palaestra studio`: what is refused before a window opens."""

import pytest

pytest.importorskip("PySide6")


@pytest.fixture
def studio(palaestra, monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "PALAESTRA_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("QT_QPA_PLATFORM", "offscreen")
    return lambda *words: palaestra("studio", *words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--theme", "pink"], "--theme = 'pink': is no theme. Use dark, light or system."),
        (["--screenshot", "s.jpg"], "is not a PNG file"),
        (["--token-file", "t"], "needs --connect"),
        (["--connect", "http://127.0.0.1:9"], "needs its token. Give --token-file, or set PALAESTRA_TOKEN;"),
        (["--connect", "http://127.0.0.1:9", "--token-file", "missing"], "cannot be read (No such file or directory)"),
        (["--connect", "http://127.0.0.1:9", "--token-file", "text"], "--token-file = 'text': holds no token."),
        (["--connect", "http://127.0.0.1:9", "--token-file", "binary"], "--token-file = 'binary': holds no token."),
        (["--connect", "http://127.0.0.1:9", "--token-file", "empty"], "--token-file = 'empty': holds no token."),
        (["--connect", "127.0.0.1:9", "--token-file", "token"], "is not the address of a service"),
    ],
)
def test_wrong_options_are_one_line_with_exit_code_2(studio, tmp_path, words, message):
    (tmp_path / "text").write_text("two words\nand lines")
    (tmp_path / "binary").write_bytes(b"\xff\x00\xfe")
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "token").write_text("abc\n")
    result = studio(*words)
    assert (result.code, result.out) == (2, "")
    assert message in result.err
    assert result.err.count("\n") == 1


def test_a_service_that_does_not_answer_is_named(studio, tmp_path):
    (tmp_path / "token").write_text("abc\n")
    result = studio("--connect", "http://127.0.0.1:9", "--token-file", "token")
    assert result.code == 1
    assert "http://127.0.0.1:9 does not answer" in result.err


def test_without_a_display_the_message_says_what_to_do(studio, monkeypatch):
    monkeypatch.delenv("QT_QPA_PLATFORM")
    result = studio()
    assert result.code == 2
    assert "there is no display here" in result.err
    assert "--connect" in result.err


def test_without_the_extra_the_message_names_it(studio, monkeypatch):
    monkeypatch.setattr("palaestra.cli.studio.importlib.util.find_spec", lambda name: None)
    result = studio()
    assert result.code == 2
    assert "pip install 'palaestra[studio]'" in result.err
