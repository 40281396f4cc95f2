"""Clips of a run's checkpoints while it trains: asked for, one at a time, and given up when the service ends."""

import threading

import pytest
from tests.runs.checkpoints.own import own_checkpoint

from palaestra.errors import ConfigError
from palaestra.runs.phase import Phase
from palaestra.runs.record import RunRecord
from palaestra.runs.state.attempt_files import AttemptPlan
from palaestra.runs.store.rebuild import open_registry
from palaestra.runs.video.clip import list_clips
from palaestra.runs.video.record_video import CheckpointRecorder, record_clip
from palaestra.telemetry.event import CheckpointSaved, Record

RUN = RunRecord(run_id="run", runner="palaestra", agent_id="palaestra/ppo", env_id="CartPole-v1", phase=Phase.RUNNING)


class _Set:
    """A recorder and a run that saves checkpoints."""

    def __init__(self, home, film, *, asked=True):
        self.attempt = home.run("run").attempt(1)
        self.attempt.path.mkdir(parents=True)
        AttemptPlan(record_video=asked).write(self.attempt)
        self.registry = open_registry(home)
        self.recorder = CheckpointRecorder(self.registry, home, film)

    def saves(self, update):
        path = self.attempt.path / "checkpoints" / f"update_{update:08d}"
        sha256 = own_checkpoint(path, env_step=update * 100, seed=update)
        event = CheckpointSaved(update=update, env_step=update * 100, path=str(path), sha256=sha256)
        self.recorder.add_announced(RUN, self.attempt, [Record(update, 1000.0 + update, event)])

    def close(self):
        self.recorder.close()
        self.registry.close()


class _Film:
    """Says what it films, and takes its time."""

    def __init__(self):
        self.steps, self.begun, self.go = [], threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, run, checkpoint, *, niceness, is_cancelled):
        self.steps.append(checkpoint.env_step)
        self.begun.release()
        self.go.acquire()
        if checkpoint.env_step == 100:
            raise ConfigError("video", "", "could not be recorded")


def test_one_at_a_time_is_filmed_and_then_the_newest(home):
    film = _Film()
    film_set = _Set(home, film)
    try:
        film_set.saves(1)
        film.begun.acquire()
        film_set.saves(2)
        film_set.saves(3)
        assert film_set.recorder.busy
        film.go.release()
        film.begun.acquire()
    finally:
        film.go.release()
        film_set.close()

    assert film.steps == [100, 300]
    assert not film_set.recorder.busy


def test_a_run_that_did_not_ask_is_not_filmed(home):
    film_set = _Set(home, _Film(), asked=False)
    try:
        film_set.saves(1)
        assert not film_set.recorder.busy
    finally:
        film_set.close()


def test_a_new_checkpoint_becomes_a_clip_of_its_run(home):
    pytest.importorskip("imageio_ffmpeg")
    pytest.importorskip("pygame")
    done = threading.Event()

    def short(run, checkpoint, **how):
        record_clip(run, checkpoint, frames=5, **how)
        done.set()

    film_set = _Set(home, short)
    try:
        film_set.saves(7)
        assert done.wait(120)
    finally:
        film_set.close()

    (clip,) = list_clips(home.run("run"))
    assert "step_700_" in clip.path
    assert clip.report.frames == 5


def test_filming_is_given_up_when_the_service_ends(home):
    pytest.importorskip("imageio_ffmpeg")
    film_set = _Set(home, _Film())
    film_set.recorder.close()
    film_set.saves(1)
    (checkpoint,) = film_set.registry.checkpoints(run_id="run")
    film_set.close()

    with pytest.raises(ConfigError, match="was cancelled"):
        record_clip(home.run("run"), checkpoint, is_cancelled=lambda: True)
