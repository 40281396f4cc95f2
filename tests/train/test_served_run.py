"""Runs on screens whose replies come from an inference engine over HTTP."""

import threading

import pytest
from tests.policy.vlm.serving.conftest import MODEL
from tests.train.test_screen_loop import config, gateway, learned, steps_of

from palaestra.errors import CollectorFailed, ConfigError
from palaestra.experience.trajectory_archive import TrajectoryArchive
from palaestra.files.run_directory import RunDirectory
from palaestra.learner.checkpoint import load_checkpoint
from palaestra.policy.vlm.serving.small_server import SmallServer
from palaestra.train.screens import train_screens

__all__ = ["gateway"]


@pytest.fixture
def server():
    with SmallServer(MODEL) as one:
        yield one


def served(gateway, server, updates=2, **more):
    inference = {"backend": "server", "urls": [server.url], "unreachable_s": 0.1, **more.pop("inference", {})}
    return config(gateway, updates, inference=inference, **more)


def test_a_run_learns_from_the_replies_of_an_engine_and_leaves_no_adapter_on_it(gateway, server, tmp_path):
    outcome = train_screens(served(gateway, server), root=tmp_path, run_id="served")
    assert [step.update for step in steps_of(outcome.run)] == [1, 2]
    assert outcome.final["trajectories_learned"] == 4
    # The engine computes with the same code, so the recorded log-probabilities are the learner's own.
    assert outcome.final["disagreement_max"] < 1e-3
    assert outcome.final["probe_difference"] < 1e-4
    assert outcome.final["inference_retries"] == 0
    played = list(TrajectoryArchive(outcome.run.attempts()[0].path / "trajectories").load())
    known = load_checkpoint(outcome.checkpoint).learner.facts["fingerprints"]
    assert sorted({version for one in played for turn in one.turns for version in turn.versions.tolist()}) == [0, 1]
    assert all(turn.weights == known[str(turn.versions[0])] for one in played for turn in one.turns)
    assert known["2"] == learned(outcome.run)[0]
    assert server.adapters == []
    assert not [thread for thread in threading.enumerate() if thread.name == "palaestra-engines"]


@pytest.mark.slow
def test_played_by_an_engine_behind_the_learners_back_nothing_is_older_than_allowed(gateway, server, tmp_path):
    settings = served(gateway, server, 3, trainer={"collection": "asynchronous", "max_staleness": 1})
    outcome = train_screens(settings, root=tmp_path, run_id="back")
    assert outcome.final["update"] == 3
    assert all(step.metrics["staleness_max"] <= 1 for step in steps_of(outcome.run))
    assert server.adapters == []


def test_an_engine_that_turns_to_the_old_adapter_fails_the_run_with_a_checkpoint_to_resume_from(
    gateway, server, tmp_path
):
    settings = served(gateway, server, 3, trainer={"learning_rate": 0.05}, inference={"probe_tolerance": 1e-4})
    real = server._load_adapter

    def load_adapter(name, path):
        server.fault = "keeps old adapter" if name.endswith("-v2") else ""
        return real(name, path)

    server._load_adapter = load_adapter
    with pytest.raises(CollectorFailed, match=r"answers with the adapter of version 1\. Version 2 is refused"):
        train_screens(settings, root=tmp_path, run_id="old")
    assert server.adapters == []
    assert RunDirectory.find("old", tmp_path).latest_checkpoint().name == "update_00000002"
    server._load_adapter = real
    server.fault = ""
    resumed = train_screens(settings, root=tmp_path, run_id="-", resume=RunDirectory.find("old", tmp_path))
    assert resumed.final["update"] == 3


def test_an_engine_that_dies_in_a_batch_fails_the_run_in_words_and_nothing_is_left_running(gateway, tmp_path):
    server = SmallServer(MODEL)
    real = server._reply

    def reply(model, prompt, sampling, headers):
        if model.endswith("-v1") and not headers["X-Request-Id"].startswith("probe"):
            threading.Thread(target=server.close).start()
        return real(model, prompt, sampling, headers)

    server._reply = reply
    with pytest.raises(CollectorFailed, match=r"no inference engine has answered for 0\.1 s"):
        train_screens(served(gateway, server), root=tmp_path, run_id="dies")
    assert not [thread for thread in threading.enumerate() if thread.name == "palaestra-engines"]
    # The first update is not lost.
    assert RunDirectory.find("dies", tmp_path).latest_checkpoint().name == "update_00000001"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"inference": {"urls": []}}, "backend: server needs urls"),
        ({"inference": {"urls": ["127.0.0.1:8000"]}}, "is not a URL such as"),
        ({"inference": {"urls": ["ftp://127.0.0.1:8000"]}}, "is not a URL such as"),
        ({"inference": {"urls": ["http://127.0.0.1:99999"]}}, "is not a URL such as"),
        ({"inference": {"urls": ["http://[::1"]}}, "is not a URL such as"),
        ({"inference": {"urls": ["http://127.0.0.1:8000?model=a"]}}, "is not a URL such as"),
        ({"inference": {"urls": ["http://me:secret@127.0.0.1:1"]}}, "use api_key_file"),
        ({"inference": {"device": "cpu"}}, "device has no effect with backend: server"),
        ({"inference": {"backend": "thread"}}, "urls counts only with backend: server"),
        ({"inference": {"probe_tolerance": 0}}, "probe_tolerance"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_is_started(gateway, server, more, message):
    with pytest.raises(ConfigError, match=message) as caught:
        served(gateway, server, **more)
    assert "secret" not in str(caught.value)


def test_full_fine_tuning_with_a_server_is_refused_with_the_remedy(gateway, server):
    model = {"name": "tiny", "use_lora": False, "lora_rank": 4}
    with pytest.raises(ConfigError, match=r"engines take LoRA adapters, .* Set model\.use_lora=true"):
        served(gateway, server, model=model)


def test_an_engine_that_cannot_be_reached_is_refused_before_the_run_directory_is_made(gateway, tmp_path):
    server = SmallServer(MODEL)
    server.close()
    with pytest.raises(ConfigError, match="the engine does not answer"):
        train_screens(served(gateway, server), root=tmp_path, run_id="none")
    assert not (tmp_path / "none").exists()
