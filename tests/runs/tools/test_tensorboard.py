import asyncio
import json
import time
import urllib.request
from unittest import mock

import pytest
from tests.runs.supervisors import echo, run_supervisor, wait_for_end

from palaestra.errors import ConfigError
from palaestra.runs.tools.tensorboard import TensorBoards, find_event_directories


def trained(home, **config):
    async def body():
        async with run_supervisor(home) as supervisor:
            run = await supervisor.submit(echo(steps=20, rate=0, metrics=2, **config))
            await wait_for_end(supervisor, run.run_id)
            return run.run_id

    return asyncio.run(body())


def tags(url):
    with urllib.request.urlopen(f"{url}data/plugin/scalars/tags", timeout=30) as answer:
        return json.loads(answer.read())


def until_tags(url, count):
    """TensorBoard answers before it has read everything."""
    deadline = time.monotonic() + 60
    while len(found := tags(url)) < count and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def test_both_kinds_of_runs_are_shown_by_one_instance_that_is_used_again_and_ends(home):
    pytest.importorskip("tensorboard")
    ours, foreign = trained(home, name="ours"), trained(home, speak="tensorboard")
    boards = TensorBoards(home)
    try:
        url = boards.open([ours, foreign])
        assert boards.open([foreign, ours, ours]) == url
        found = until_tags(url, 2)
    finally:
        boards.close()

    assert url.startswith("http://127.0.0.1:")
    assert sorted(found) == sorted([ours, foreign])
    assert "losses/m0" in found[foreign]
    assert any("m0" in tag for tag in found[ours])
    with pytest.raises(OSError, match=r"refused|reset"):
        tags(url)
    assert not (home.service / "tensorboard").exists()


def test_one_that_nobody_asks_for_ends_by_itself(home):
    pytest.importorskip("tensorboard")
    run_id = trained(home)
    boards = TensorBoards(home, idle_timeout_s=0.05)
    try:
        boards.open([run_id])
        deadline = time.monotonic() + 60
        while boards.running():
            assert time.monotonic() < deadline, "it did not end"
            time.sleep(0.02)
        assert boards.running() == []
    finally:
        boards.close()


def test_event_files_of_a_trainer_are_shown_as_they_are_and_others_are_written(home):
    pytest.importorskip("tensorboard")
    ours, foreign = trained(home), trained(home, speak="tensorboard")

    assert find_event_directories(home.run(ours)) == {ours: home.run(ours).path / "tensorboard"}
    (directory,) = find_event_directories(home.run(foreign)).values()
    assert directory.is_relative_to(home.run(foreign).attempt(1).work)


def test_what_cannot_be_shown_is_refused(home):
    boards = TensorBoards(home)
    with pytest.raises(ConfigError, match="no run to show"):
        boards.open([])
    with pytest.raises(ConfigError, match="has no directory"):
        boards.open(["gone"])
    with mock.patch("importlib.util.find_spec", return_value=None), pytest.raises(ConfigError, match="pip install"):
        boards.open(["gone"])
