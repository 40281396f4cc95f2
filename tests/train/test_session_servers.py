"""Training against sessions that exist already: bare session servers, and servers of the query dialect alone."""

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
import urllib.request

import pytest
from tests.train.query_server import QueryServer, query_server

from palaestra.errors import ConfigError
from palaestra.experience.trajectory_archive import TrajectoryArchive
from palaestra.gateway import Address, GatewayConfig
from palaestra.gateway.serving import open_gateway
from palaestra.http.server import listen, serve_in_background
from palaestra.train.screen_config import screen_config_from
from palaestra.train.screens import train_screens


@contextlib.contextmanager
def server_process(*arguments):
    """The URL of a real session server process."""
    command = [sys.executable, "-m", "palaestra.sessions.server", "--port", "0", "--until-eof", *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.stdin.close()
        process.wait(30)
        process.stdout.close()


def config(environment, **more):
    return screen_config_from(
        {
            "experiment_name": "t", "model": {"name": "tiny", "max_new_tokens": 12, "history": 1, "lora_rank": 4},
            "tasks": [{"task": "fake/button"}], "algorithm": {"name": "ppo"},
            "trainer": {"batch_size": 4, "num_training_steps": 1, "learning_rate": 1e-3},
            "actor": {"max_steps_per_episode": 2}, "actor_pool": {"target_concurrent_actors": 2},
            "environment": environment, "telemetry": {"progress": False}, **more,
        }
    )  # fmt: skip


def sessions_open(url):
    with urllib.request.urlopen(f"{url}/sessions", timeout=30) as answer:
        return json.load(answer)["sessions"]


def test_a_run_trains_against_bare_session_servers_and_leaves_no_session_open(tmp_path):
    with server_process("--fake") as one, server_process("--fake") as other:
        outcome = train_screens(config({"session_servers": [one, other + "/"]}), root=tmp_path, run_id="bare")
        assert (sessions_open(one), sessions_open(other)) == ([], [])
    assert outcome.final["trajectories_learned"] == 4
    archive = TrajectoryArchive(outcome.run.attempts()[0].path / "trajectories")
    assert [trajectory.task["task"] for trajectory in archive.load()] == ["fake/button"] * 4


def test_a_session_server_that_does_not_answer_is_named_before_a_run_directory_exists(tmp_path):
    place = r"environment.session_servers = 'http://127.0.0.1:9': cannot be reached .*palaestra.sessions.server"
    with pytest.raises(ConfigError, match=place):
        train_screens(config({"session_servers": "http://127.0.0.1:9"}), root=tmp_path, run_id="no")
    assert list(tmp_path.iterdir()) == []


ROWS = {"tasks": [{"task": "simple_data_entry/rows", "params": {"rows": [2, 3], "step_limit": 2}}]}


def played(outcome):
    return list(TrajectoryArchive(outcome.run.attempts()[0].path / "trajectories").load())


def test_a_run_trains_against_a_server_that_speaks_the_query_dialect_alone(tmp_path):
    with query_server() as one, query_server() as other:
        environment = {"dialect": "query", "session_servers": [one.url, other.url], "act_delay_s": 0}
        settings = config({**environment, "reuse_screens": True}, **ROWS)
        outcome = train_screens(settings, root=tmp_path, run_id="query")
        assert {method for method, _ in one.requests + other.requests} == {"GET"}
        acts = one.acts + other.acts
    assert outcome.final["trajectories_learned"] == 4
    episodes = played(outcome)
    assert {episode.task["instruction"] for episode in episodes} == {
        "Enter rows 2 and 3 of the sheet into the form, one at a time, and submit each."
    }
    assert {(episode.task["width"], episode.task["height"]) for episode in episodes} == {(160, 120)}
    assert len({episode.session_id for episode in episodes}) == 4
    done = [turn.action for episode in episodes for turn in episode.turns if turn.action is not None]
    sent = [action for action in done if action["kind"] not in ("terminate", "answer")]
    assert len(acts) == len(sent) > 0  # every action once, none repeated


class _FreshServers:
    """A runtime as a cluster is one: every session is a fresh server, at an address of its own."""

    session_types = ("simple_data_entry",)

    def __init__(self):
        self.servers, self.made = {}, []

    async def start(self, lost):
        pass

    async def create(self, session_id, session_type):
        server = self.servers[session_id] = QueryServer()
        self.made.append(server)
        return Address("127.0.0.1", server.port)

    async def delete(self, session_id):
        server = self.servers.pop(session_id, None)
        if server is not None:
            await asyncio.to_thread(server.close)

    async def list(self):
        return {name: Address("127.0.0.1", server.port) for name, server in self.servers.items()}

    def facts(self):
        return {"ready": 1}

    async def stop(self):
        for name in list(self.servers):
            await self.delete(name)


@contextlib.contextmanager
def gateway_of(runtime, token):
    """The URL of a gateway over this runtime, in a thread of its own."""
    ready, urls, loops = threading.Event(), [], []
    over = asyncio.Event()

    async def serve():
        with listen("127.0.0.1", 0, "gateway.port") as sock:
            async with (
                open_gateway(GatewayConfig(), token=token, runtime=runtime) as gateway,
                serve_in_background(gateway.app, sock),
            ):
                urls.append(f"http://127.0.0.1:{sock.getsockname()[1]}")
                loops.append(asyncio.get_running_loop())
                ready.set()
                await over.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(30)
        yield urls[0]
    finally:
        loops[0].call_soon_threadsafe(over.set)
        thread.join()


def test_the_specifications_session_type_trains_on_fresh_servers_of_the_dialect_behind_a_gateway(tmp_path):
    runtime, token = _FreshServers(), "0123456789abcdef"
    file = tmp_path / "token"
    file.write_text(token)
    with gateway_of(runtime, token) as url:
        environment = {"cluster_host": url, "dialect": "query", "act_delay_s": 0, "token_file": str(file)}
        actor = {"session_type": "simple_data_entry", "max_steps_per_episode": 2}
        settings = config(environment, actor=actor, algorithm={"name": "ppo"}, **ROWS)
        outcome = train_screens(settings, root=tmp_path / "runs", run_id="pods")
        assert runtime.servers == {}  # every session was closed
    assert outcome.final["trajectories_learned"] == 4
    assert len(runtime.made) == 5  # one for each episode, and one that checked the task
    assert len({episode.session_id for episode in played(outcome)}) == 4


def test_a_server_of_the_other_dialect_is_named_with_the_key_to_change(tmp_path):
    with (
        query_server() as server,
        pytest.raises(ConfigError, match=r"status 404. Does it need environment.dialect=query\?"),
    ):
        train_screens(config({"session_servers": server.url}), root=tmp_path, run_id="no")


def test_a_server_process_given_a_task_serves_the_dialect_without_a_reset():
    with server_process("--fake", "--task", "fake/button", "--params", '{"step_limit": 1000}') as url:
        with urllib.request.urlopen(f"{url}/act?action_type=mouse_move&x=1&y=1&step=1", timeout=30) as answer:
            assert answer.headers["Content-Type"] == "image/png"
        with urllib.request.urlopen(f"{url}/act?action_type=screenshot", timeout=30) as answer:
            assert answer.read(4) == b"\x89PNG"
