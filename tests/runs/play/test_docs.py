"""The page about plays shows code that runs, and every message there is."""

import re
from pathlib import Path

import pytest
from tests.runs.serving import service_thread

from palaestra.runs.play.protocol import CONTROLS
from palaestra.runs.play.spec import PlaySpec
from palaestra.runs.play.state import REPORTS

PAGE = (Path(__file__).parents[3] / "docs" / "play.md").read_text()


def test_the_example_plays_an_episode_and_reads_its_recording(home, monkeypatch):
    pytest.importorskip("imageio_ffmpeg")
    monkeypatch.setenv("PALAESTRA_HOME", str(home.base))
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    scope = {}
    with service_thread(home):
        exec(code, scope)
    assert scope["episode"].outcome == "terminated"
    assert scope["episode"].human_steps == len(scope["demonstration"].actions) > 0
    assert scope["video"][:4] == b"\x1a\x45\xdf\xa3"  # the first bytes of WebM


def test_every_message_and_every_field_of_a_request_is_on_the_page():
    fields = set(PlaySpec.model_fields) - {"max_episode_steps", "invoked_from"}
    assert [name for name in (*CONTROLS, *REPORTS, *fields) if f"`{name}`" not in PAGE] == []
