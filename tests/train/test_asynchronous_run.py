"""A run that collects in the background: its configuration, its journal, and what a failure leaves behind."""

import json
import re
from pathlib import Path

import pytest
from tests.actor import rooms

from palaestra.errors import CollectorFailed, ConfigError
from palaestra.files.run_directory import RunDirectory
from palaestra.learner.checkpoint import load_checkpoint
from palaestra.telemetry import JournalReader, TrainingStep
from palaestra.telemetry.event import LogLine, PhaseChanged
from palaestra.train import config_from, load_config, train

REPOSITORY = Path(__file__).parents[2]


def _config(env="CartPole-v1", kwargs=None, **trainer):
    rooms.Room.made = 0
    defaults = {"total_timesteps": 6 * 32, "rollout_length": 16, "collection": "asynchronous"}
    return config_from(
        {
            "env": {"id": env, "num_envs": 2, "kwargs": kwargs or {}},
            "algorithm": {"n_epochs": 1, "batch_size": 32},
            "trainer": defaults | trainer,
            "telemetry": {"progress": False},
        }
    )


def _events(run, attempt=0):
    return [record.event for record in JournalReader(run.attempts()[attempt].journal).read()]


def test_the_specification_s_configuration_is_asynchronous():
    text = """{
      "env": {"id": "CartPole-v1", "num_envs": 2},
      "trainer": {"buffer_type": "vla", "buffer_size": 2048, "iterations": 500},
      "algorithm": {"name": "ppo", "cfg": {"learning_rate": 1e-5, "gamma": 0.99, "n_epochs": 10, "batch_size": 64}}
    }"""
    config = config_from(json.loads(text))
    assert config.asynchronous is not None
    assert config.asynchronous.max_staleness == 1
    assert config.rollout_length == 2048  # learned from when it is full
    assert config.total_timesteps == 500 * 2048 * 2


def test_settings_of_the_background_reach_it():
    config = _config(max_staleness=4, collector="process", overflow="overwrite_oldest", buffer_size=64)
    assert config.asynchronous.model_dump() == {
        "collector": "process", "max_staleness": 4, "overflow": "overwrite_oldest", "reproducible": False,
        "step_timeout": 60.0, "collector_restarts": 0, "collector_device": None,
    }  # fmt: skip
    assert config.trainer.buffer_size == 64


def test_a_setting_without_asynchronous_collection_is_refused():
    with pytest.raises(ConfigError, match=r"trainer.max_staleness = 3: has no effect with synchronous"):
        _config(collection="synchronous", max_staleness=3)


def test_every_update_is_in_the_journal_with_its_staleness(tmp_path):
    outcome = train(_config(), root=tmp_path, run_id="a")
    steps = [event for event in _events(outcome.run) if isinstance(event, TrainingStep)]
    assert [event.update for event in steps] == [1, 2, 3, 4, 5, 6]
    assert all(event.metrics["staleness_max"] <= 1.0 for event in steps)
    assert outcome.steps == 192


def test_a_resumed_run_says_that_its_episodes_are_fresh(tmp_path):
    first = train(_config(), root=tmp_path, run_id="a")
    again = train(_config(total_timesteps=8 * 32), root=tmp_path, run_id="a", resume=RunDirectory(first.run.path))
    assert again.steps == 256
    warnings = [event.text for event in _events(again.run, 1) if isinstance(event, LogLine)]
    assert any("start new episodes" in text for text in warnings)


def test_a_failed_collector_leaves_a_checkpoint_and_a_failed_phase(tmp_path):
    config = _config("tests.actor.rooms:Raising", {"at": 40}, total_timesteps=10_000)
    with pytest.raises(
        CollectorFailed,
        match=r"the floor gave way \(\S+rooms\.py:\d+, in happen\)\. The last good state is .*update_0000000[0-2]\. "
        "Resume with: palaestra train --res",
    ) as it:
        train(config, root=tmp_path, run_id="a")
    saved = Path(re.search(r"state is (\S+)\. Resume with", str(it.value))[1])
    assert load_checkpoint(saved).progress["updates"] == int(saved.name[-1])
    phases = [event for event in _events(RunDirectory(tmp_path / "a")) if isinstance(event, PhaseChanged)]
    assert [phase.phase for phase in phases] == ["running", "failed"]


def test_a_replaced_collector_is_a_warning_in_the_journal(tmp_path):
    config = _config("tests.actor.rooms:Raising", {"at": 40}, collector_restarts=5)
    outcome = train(config, root=tmp_path, run_id="a")
    warnings = [event.text for event in _events(outcome.run) if isinstance(event, LogLine)]
    assert len(warnings) == int(outcome.final["collector_restarts"]) >= 1
    assert "A collector was replaced: the asynchronous collector failed" in warnings[0]


@pytest.mark.parametrize(("name", "collector"), [("table_reach", "process"), ("table_reach_chunk4", "thread")])
def test_a_pretrained_model_is_fine_tuned_in_the_background(name, collector, tmp_path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    settings = [
        "trainer.collection=asynchronous", f"trainer.collector={collector}", "trainer.total_timesteps=128",
        "trainer.rollout_length=8", "algorithm.batch_size=32", "algorithm.n_epochs=1", "telemetry.progress=false",
    ]  # fmt: skip
    config = load_config(REPOSITORY / "configs" / "vla" / f"{name}.yaml", settings)
    outcome = train(config, root=tmp_path, run_id="a")
    assert outcome.final["update"] == 2.0
    assert outcome.final["staleness_max"] <= 1.0


def test_the_page_s_python_runs():
    page = (REPOSITORY / "docs" / "async.md").read_text()
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, {})
