"""Plays through the whole chain: client, service, worker process, environment, policy process, recordings."""

import asyncio
import contextlib
import json
import os
import signal
import time
import urllib.error
import urllib.request

import numpy as np
import pytest
from tests.runs.serving import service_thread
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from palaestra.errors import ConfigError, PalaestraError, ServiceUnreachable, UnknownRun
from palaestra.runs.client.client import TrainerService
from palaestra.runs.play.episode import open_episode
from palaestra.runs.play.plays import Plays
from palaestra.runs.play.protocol import (
    Act,
    LoadPolicy,
    Pause,
    Reset,
    SetMode,
    SetSpeed,
    SingleStep,
    pack,
)
from palaestra.runs.play.spec import PlaySpec
from palaestra.runs.play.state import PlayEnded, PlayNotice, PlayState, StepReport

WAIT_S = 60


@pytest.fixture
def client(home):
    with service_thread(home) as url:
        yield TrainerService(home), url


def start(client, **spec):
    service, _ = client
    return service, service.start_play(PlaySpec(**spec))


def first(messages, kind, condition=lambda report: True):
    """The first report of a kind that meets a condition."""
    for report, picture in messages:
        if isinstance(report, kind) and condition(report):
            return report, picture
        assert not isinstance(report, PlayEnded), report
    raise AssertionError("the play ended")


def test_a_person_plays_cartpole_and_the_episode_is_recorded(client, home):
    service, play = start(client, env_id="CartPole-v1", seed=3)
    with service.open_play(play.play_id) as messages:
        state, _ = first(messages, PlayState)
        assert state.environment.controls.choices[1].keys == ("ArrowRight", "d")
        assert state.waiting == "move"
        messages.send(Act(1, input=7))
        step, picture = first(messages, StepReport, lambda report: report.step == 1)
        assert (step.action, step.actor, step.reward, step.input) == (1, "human", 1.0, 7)
        assert picture.startswith(b"\xff\xd8\xff")
        last, _ = first(messages, StepReport, lambda report: report.is_last)
    service.stop_play(play.play_id)

    record = next(one for one in service.episodes() if one.outcome == "terminated")
    assert (record.env_id, record.seed, record.steps, record.human_steps) == ("CartPole-v1", 3, last.step, last.step)
    steps = service.episode_steps(record.episode_id)
    assert [one.report.action for one in steps[1:]] == [1] * last.step
    assert service.episode_picture(record.episode_id, 1) == picture
    demonstration = open_episode(home, record.episode_id).demonstration()
    assert demonstration.observations[""].shape == (last.step + 1, 4)
    assert demonstration.rewards.tolist() == [1.0] * last.step


def test_the_same_seed_and_actions_give_the_same_observations_as_gymnasium(client, home):
    gymnasium = pytest.importorskip("gymnasium")
    service, play = start(client, env_id="CartPole-v1", seed=11, paused=True)
    with service.open_play(play.play_id) as messages:
        for number, action in enumerate([0, 1, 1], start=1):
            messages.send(Act(action))
            messages.send(SingleStep())
            first(messages, StepReport, lambda report, number=number: report.step == number)
    service.stop_play(play.play_id)
    demonstration = open_episode(home, service.episodes()[0].episode_id).demonstration()

    env = gymnasium.make("CartPole-v1")
    observations = [env.reset(seed=11)[0], *(env.step(action)[0] for action in (0, 1, 1))]
    env.close()
    np.testing.assert_array_equal(demonstration.observations[""], np.stack(observations))


def test_a_random_policy_acts_and_two_clients_see_the_same_steps(client):
    service, play = start(client, env_id="FrozenLake-v1", mode="agent", checkpoint="random", speed=20.0)
    with service.open_play(play.play_id) as one, service.open_play(play.play_id) as other:
        seen, _ = first(one, StepReport, lambda report: report.step == 2 and report.episode >= 2)
        also, _ = first(other, StepReport, lambda report: (report.episode, report.step) == (seen.episode, seen.step))
        assert also == seen
        assert seen.actor == "agent"
        assert seen.grid.columns == 4
        assert seen.grid.cells[15] == "goal"
    assert service.stop_play(play.play_id).reason == "ended by the user"


def test_pause_speed_reset_and_mode_take_effect(client):
    service, play = start(client, env_id="Pendulum-v1", paused=True)
    with service.open_play(play.play_id) as messages:
        messages.send(SetSpeed(4.0))
        assert first(messages, PlayState, lambda state: state.speed == 4.0)[0].paused
        messages.send(Pause(False))
        first(messages, StepReport, lambda report: report.step >= 3)
        messages.send(Reset(99))
        assert first(messages, PlayState, lambda state: state.seed == 99)[0].episode == 2
        messages.send(SetMode("agent"))
        assert first(messages, PlayState, lambda state: state.mode == "agent")[0].waiting == "policy"
    service.stop_play(play.play_id)


@pytest.mark.parametrize(
    ("spec", "place", "text"),
    [
        ({"env_id": "CartPole-v9"}, "env_id", "no such version"),
        ({"env_id": "CartPol-v1"}, "env_id", "no environment has this name"),
        ({"env_id": "no_such_module:Env"}, "env_id", "cannot be imported"),
        ({"env_id": "CartPole-v1", "parameters": {"gravity": 3}}, "parameters", "does not take these"),
        (
            {"env_id": "CartPole-v1", "parameters": {"render_mode": "human"}},
            "parameters.render_mode",
            "set by the play",
        ),
    ],
)
def test_an_environment_that_cannot_be_made_is_refused_with_the_reason(client, spec, place, text):
    service, _ = client
    with pytest.raises(ConfigError, match=text) as refusal:
        service.start_play(PlaySpec(**spec))
    assert refusal.value.place == place
    assert service.plays() == []


def test_a_bad_request_is_refused_before_a_process_is_started(client):
    service, _ = client
    for body in ({"spec": {}}, {"spec": {"env_id": "A", "task": "b"}}, {"spec": {"env_id": "A", "sped": 1}}, {}):
        with pytest.raises(ConfigError):
            service.request("POST", "/play", body)
    assert service.plays() == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mode": "nonsense"}, "spec.mode"),
        ({"sped": 1}, "Did you mean 'speed'"),
        ({"invoked_from": "/tmp/\0"}, "spec.invoked_from"),
        ({"invoked_from": "/tmp/\udc80"}, "spec.invoked_from"),
    ],
    ids=str,
)
def test_a_bad_request_is_explained_with_the_keys_of_a_play(client, change, reason):
    service, _ = client
    with pytest.raises(ConfigError, match=reason) as refusal:
        service.request("POST", "/play", {"spec": {"env_id": "CartPole-v1"} | change})
    assert "name" not in str(refusal.value)


def test_a_killed_worker_ends_the_play_with_the_reason_and_keeps_the_recording(client):
    service, play = start(client, env_id="Pendulum-v1")
    with service.open_play(play.play_id) as messages:
        first(messages, StepReport, lambda report: report.step >= 2)
        os.kill(play.pid, signal.SIGKILL)
        ended = [report for report, _ in messages if isinstance(report, PlayEnded)][-1]
    assert ended.failed
    assert "killed by signal 9" in ended.reason
    assert service.plays()[0].phase == "ended"
    record = service.episodes()[0]
    assert record.outcome == "interrupted"
    assert record.steps >= 2


CRASHING = """
import gymnasium, numpy as np
class Crashing(gymnasium.Env):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 50}
    observation_space = gymnasium.spaces.Box(-1, 1, (1,))
    action_space = gymnasium.spaces.Box(-1, 1, (1,))
    def __init__(self, render_mode=None, mode="crash"):
        self.render_mode, self.mode, self.count = render_mode, mode, 0
    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}
    def step(self, action):
        self.count += 1
        if self.mode == "crash" and self.count == 3:
            raise ZeroDivisionError("the simulator broke")
        return np.zeros(1, np.float32), 1.0, False, False, {}
    def render(self):
        return None if self.mode == "blind" else np.zeros((8, 8, 3), np.uint8)
"""


@pytest.fixture
def own_module(tmp_path):
    (tmp_path / "own_env.py").write_text(CRASHING)
    return tmp_path


def test_an_environment_that_raises_ends_the_play_with_its_message(client, own_module, home):
    service, play = start(client, env_id="own_env:Crashing", invoked_from=own_module)
    with service.open_play(play.play_id) as messages:
        ended = [report for report, _ in messages if isinstance(report, PlayEnded)][-1]
    assert "ZeroDivisionError: the simulator broke" in ended.reason
    assert "own_env.py" in (home.service / "plays" / f"{play.play_id}.log").read_text()
    assert service.episodes()[0].steps == 2


def test_an_environment_that_renders_nothing_can_be_played_blind_or_says_what_it_rendered(client, own_module):
    service, _ = client
    with pytest.raises(ConfigError, match="rendered NoneType"):
        service.start_play(PlaySpec(env_id="own_env:Crashing", parameters={"mode": "blind"}, invoked_from=own_module))


def test_a_wrong_control_is_answered_with_a_notice_and_the_play_goes_on(client):
    service, play = start(client, env_id="Pendulum-v1")
    url = service._endpoint(False).url.replace("http", "ws") + f"/play/{play.play_id}"
    headers = {"Authorization": f"Bearer {service._endpoint(False).token}"}
    with connect(url, additional_headers=headers, compression=None, proxy=None) as raw:
        for wrong in (b"", b"garbage", pack({"type": "dance"}), pack({"type": "act", "action": {}, "input": -1})):
            raw.send(wrong)
        raw.send(pack({"type": "act", "action": ["x"]}))
        raw.send(pack({"type": "speed", "factor": 10**400}))
        for name in ("~nosuchuser/x", "a" * 300):
            raw.send(pack({"type": "load_policy", "checkpoint": name}))
        raw.send("text")
        with contextlib.suppress(ConnectionClosed):
            while True:
                raw.recv(timeout=WAIT_S)
        assert raw.close_code == 1003
    with service.open_play(play.play_id) as messages:
        messages.send(Act([5.0, 5.0]))
        assert "is not an action" in first(messages, PlayNotice)[0].text
        first(messages, StepReport, lambda report: report.step > 3)
    service.stop_play(play.play_id)


def test_a_websocket_needs_the_token_and_refuses_web_pages(client):
    service, play = start(client, env_id="Pendulum-v1")
    endpoint = service._endpoint(False)
    url = endpoint.url.replace("http", "ws") + f"/play/{play.play_id}"
    token = {"Authorization": f"Bearer {endpoint.token}"}
    for headers in ({}, {"Authorization": "Bearer wrong"}, {**token, "Origin": "http://evil.example"}):
        with pytest.raises(InvalidStatus, match="403"):
            connect(url, additional_headers=headers, proxy=None)
    with service.open_play("play-nowhere") as nothing, pytest.raises(UnknownRun):
        next(iter(nothing))
    service.stop_play(play.play_id)


def test_a_policy_that_is_not_there_is_reported_by_the_play_and_the_play_goes_on(client):
    service, play = start(client, env_id="Pendulum-v1", mode="hybrid", checkpoint="abcdef12")
    with service.open_play(play.play_id) as messages:
        state, _ = first(messages, PlayState, lambda state: state.loading is not None)
        assert state.loading.state == "failed"
        assert "no such checkpoint" in state.loading.text.lower()
        messages.send(LoadPolicy("random"))
        assert first(messages, PlayState, lambda state: state.policy is not None)[0].policy.name == "random actions"
    service.stop_play(play.play_id)


@pytest.mark.parametrize("name", ["~nosuchuser/x", "a" * 300])
def test_a_policy_that_is_no_path_is_reported_by_the_play(client, name):
    service, play = start(client, env_id="Pendulum-v1", mode="hybrid", checkpoint=name)
    with service.open_play(play.play_id) as messages:
        state, _ = first(messages, PlayState, lambda state: state.loading is not None)
    assert "is no readable path" in state.loading.text
    service.stop_play(play.play_id)


def test_a_play_whose_policy_cannot_be_planned_is_not_left_running(home):
    async def fail(request, spec):
        raise RuntimeError("a bug")

    async def start_and_list():
        plays = Plays(home, fail, idle_timeout_s=60)
        with pytest.raises(RuntimeError):
            await plays.start(PlaySpec(env_id="Pendulum-v1", checkpoint="x"))
        await plays.close()
        return plays.list()

    assert asyncio.run(start_and_list()) == []


def test_plays_end_with_the_service_and_leave_no_process(home):
    with service_thread(home):
        service = TrainerService(home)
        play = service.start_play(PlaySpec(env_id="Pendulum-v1"))
        messages = service.open_play(play.play_id)
        first(messages, StepReport)
    with pytest.raises((ProcessLookupError, AssertionError)):
        os.kill(play.pid, 0)
    reports = []
    with contextlib.suppress(ServiceUnreachable):
        reports = [report for report, _ in messages]
    assert any(isinstance(report, PlayEnded) and report.reason == "the service ended" for report in reports)


def test_a_play_that_nothing_watches_ends_by_itself(home):
    with service_thread(home, play_idle_s=3.5):
        service = TrainerService(home)
        play = service.start_play(PlaySpec(env_id="Pendulum-v1"))
        with service.open_play(play.play_id) as messages:
            first(messages, StepReport)
        with service.open_play(play.play_id) as again:
            first(again, StepReport)
        deadline = time.monotonic() + WAIT_S
        while service.plays()[0].phase == "running" and time.monotonic() < deadline:
            time.sleep(0.05)
        assert service.plays()[0].reason == "no client for 3.5 s"


def test_an_episode_is_exported_as_a_video_and_deleted(client):
    service, play = start(client, env_id="CartPole-v1", mode="agent", checkpoint="random", speed=4.0)
    with service.open_play(play.play_id) as messages:
        first(messages, StepReport, lambda report: report.is_last)
        first(messages, StepReport, lambda report: report.episode == 2)
    service.stop_play(play.play_id)
    record = next(one for one in service.episodes() if one.outcome == "terminated")
    assert service.export_episode(record.episode_id)[:4] == b"\x1a\x45\xdf\xa3"  # the first bytes of WebM
    service.delete_episode(record.episode_id)
    with pytest.raises(UnknownRun):
        service.episode_steps(record.episode_id)


def test_episodes_of_other_names_and_damaged_ones_are_answered_clearly(client, home):
    service, url = client
    (home.episodes / "broken-1").mkdir(parents=True)
    (home.episodes / "broken-1" / "episode.json").write_text("nonsense")
    assert service.episodes()[0].problem == "episode.json cannot be read"
    with pytest.raises(PalaestraError, match="cannot be read"):
        service.episode_steps("broken-1")
    (home.episodes / "empty-1").mkdir()
    assert service.delete_episode("broken-1").problem == "episode.json cannot be read"
    assert service.delete_episode("empty-1").episode_id == "empty-1"
    assert list(home.episodes.iterdir()) == []
    with pytest.raises(UnknownRun):
        service.delete_episode("broken-1")
    request = urllib.request.Request(
        f"{url}/episodes/..%2Fservice/steps", headers={"Authorization": f"Bearer {home.token.read_text().strip()}"}
    )
    with pytest.raises(urllib.error.HTTPError) as refusal:
        urllib.request.urlopen(request)
    assert refusal.value.code in (404, 422)
    assert "error" in json.loads(refusal.value.read())
    assert service.episodes() == []
