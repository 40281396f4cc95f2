"""Runs from Python, through a service that starts by itself."""

import datetime
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest
from tests.runs.serving import end_service, service, service_thread

from palaestra.errors import (
    ConfigError,
    IllegalTransition,
    LaunchRefused,
    ServiceUnreachable,
    StateDirectoryLocked,
    UnknownRun,
)
from palaestra.files.atomic import read_json
from palaestra.runs import TrainerService
from palaestra.runs.client import connect, requests
from palaestra.runs.client.connect import ensure_service, find_service, stop_service
from palaestra.runs.phase import Phase
from palaestra.runs.record import RunEvent
from palaestra.runs.spec import RunSpec
from palaestra.runs.supervisor.orchestrator import TrainerOrchestrator
from palaestra.telemetry.event import EpisodeSummary, TrainingStep


@pytest.fixture
def trainer(home):
    with service_thread(home):
        yield TrainerService(home)


def test_a_run_is_started_followed_and_read(trainer):
    run_id = trainer.start_run({"steps": 30, "metrics": 2}, runner="echo")
    events = list(trainer.stream_events(run_id))
    steps = [item.event for item in events if isinstance(getattr(item, "event", None), TrainingStep)]
    assert [step.metrics["m0"] for step in steps] == [float(u) for u in range(1, 31)]
    assert sum(isinstance(getattr(item, "event", None), EpisodeSummary) for item in events) == 3
    happened = [item.kind for item in events if isinstance(item, RunEvent)]
    assert happened == ["note", "launched", "first_sign", "succeeded"]
    assert trainer.run(run_id).phase is Phase.SUCCEEDED
    recent = trainer.recent_metrics(run_id, 5)
    assert [point.value for point in recent["m1"]] == [27.0, 28.0, 29.0, 30.0, 31.0]
    assert [point.step for point in trainer.metrics(run_id, "m0", first=10, last=30)] == [10, 20, 30]
    assert "echo: 30 updates to go" in list(trainer.stream_log(run_id))
    assert list(trainer.stream_log(run_id, follow=False)) == list(trainer.stream_log(run_id))


def test_what_is_known_by_now_can_be_read_without_waiting(trainer, tmp_path):
    run_id = trainer.start_run({"steps": 3, "then": "hang"}, runner="echo")
    stream = trainer.stream_events(run_id)
    while not (isinstance(getattr(item := next(stream), "event", None), TrainingStep) and item.event.update == 3):
        pass
    stream.close()
    known = list(trainer.stream_events(run_id, follow=False))
    assert [item.event.update for item in known if isinstance(getattr(item, "event", None), TrainingStep)] == [1, 2, 3]
    with pytest.raises(TimeoutError, match=r"is running after 0\.1 s"):
        trainer.wait(run_id, timeout_s=0.1)
    trainer.stop_run(run_id, grace_s=0)


def test_stop_returns_when_the_run_is_gone(trainer):
    run_id = trainer.start_run({"steps": 3, "then": "hang"}, runner="echo")
    trainer.wait(run_id, phases=[Phase.RUNNING], timeout_s=30)
    pid = trainer.run(run_id).trainer.pid
    record = trainer.stop_run(run_id, grace_s=0.5)
    assert (record.phase, record.reason) == (Phase.STOPPED, "stopped by the operator")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(IllegalTransition, match="cannot be stopped"):
        trainer.stop_run(run_id)


def test_an_unknown_run_is_named_as_it_would_be_here(trainer):
    with pytest.raises(UnknownRun, match="no such run"):
        trainer.run("nobody")
    with pytest.raises(LaunchRefused, match="Did you mean 'echo'"):
        trainer.start_run({}, runner="ecko")
    with pytest.raises(ConfigError, match="no such metric"):
        trainer.recent_metrics(_done(trainer), 3, ["nothing"])


def _done(trainer, **config):
    run_id = trainer.start_run({"steps": 5, **config}, runner="echo")
    trainer.wait(run_id, timeout_s=30)
    return run_id


def test_changes_of_a_resume_may_be_anything_that_yaml_says_and_no_number_is_lost(trainer):
    with pytest.raises(ConfigError, match="steps = nan: is not a finite number"):
        trainer.resume_run("nothing", changes={"steps": float("nan")})
    with pytest.raises(UnknownRun):
        trainer.resume_run("nothing", changes={"name": datetime.date(2020, 1, 1)})


def test_the_start_of_an_id_is_enough_when_it_is_the_only_one(trainer):
    run_id = trainer.start_run({"steps": 1}, runner="echo", name="alpha")
    trainer.wait(run_id, timeout_s=30)
    assert trainer.run("alp").run_id == run_id
    trainer.wait(trainer.start_run({"steps": 1}, runner="echo", name="alps"), timeout_s=30)
    with pytest.raises(UnknownRun, match="is a prefix of several runs"):
        trainer.run("alp")


def test_the_service_starts_by_itself_once(home):
    assert find_service(home) is None
    try:
        first = ensure_service(home, settings={"min_free_disk_mb": 0})
        assert ensure_service(home) == first
        assert first.url.startswith("http://127.0.0.1:")
        assert home.token.stat().st_mode & 0o777 == 0o600
        assert home.endpoint.stat().st_mode & 0o777 == 0o600
    finally:
        end_service(home)
    assert not home.endpoint.exists()
    with pytest.raises(ServiceUnreachable, match="palaestra serve"):
        ensure_service(home, start=False)


def test_a_client_finds_the_next_service_when_the_one_it_knew_is_gone(home):
    with service_thread(home):
        trainer = TrainerService(home)
        run_id = _done(trainer)
    with service_thread(home):
        assert trainer.run(run_id).phase is Phase.SUCCEEDED


def test_a_stream_goes_on_across_a_killed_service_and_tells_everything_once(home):
    gate = home.base / "go"
    try:
        with service(home):
            trainer = TrainerService(home)
            run_id = trainer.start_run({"steps": 40, "until": str(gate)}, runner="echo")
            stream = trainer.stream_events(run_id)
            updates = []
            while len(updates) < 20:
                item = next(stream)
                updates += [item.event.update] if isinstance(getattr(item, "event", None), TrainingStep) else []
            os.kill(read_json(home.endpoint)["pid"], signal.SIGKILL)
        gate.touch()
        # The stream starts the next service by itself.
        updates += [i.event.update for i in stream if isinstance(getattr(i, "event", None), TrainingStep)]
        assert updates == list(range(1, 41))
    finally:
        end_service(home)


def test_a_state_directory_that_an_orchestrator_holds_is_named(home, monkeypatch):
    monkeypatch.setattr("palaestra.runs.client.connect._LOCK_TIMEOUT_S", 0.0)
    with TrainerOrchestrator(home), pytest.raises(StateDirectoryLocked, match=f"is held by process {os.getpid()}"):
        ensure_service(home)


def test_a_second_service_refuses_and_says_who_holds_the_directory(home):
    with service(home) as first, service(home) as second:
        assert second["error"]["code"] == "state_held"
        assert first["url"] in second["error"]["text"]


def test_the_environment_of_the_client_says_who_trains_whatever_that_of_the_service_is(home, tmp_path, monkeypatch):
    checkout = tmp_path / "checkout"
    (checkout / "cleanrl").mkdir(parents=True)
    (checkout / "cleanrl" / "mine.py").write_text(
        "from dataclasses import dataclass\nimport tyro\n\n@dataclass\nclass Args:\n"
        '    env_id: str = "CartPole-v1"\n    """the environment"""\n\n'
        'if __name__ == "__main__":\n    tyro.cli(Args)\n'
    )
    own = checkout / "own" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.symlink_to(sys.executable)
    monkeypatch.delenv("PALAESTRA_CLEANRL", raising=False)
    spec = RunSpec(runner="cleanrl", script="mine", env_id="CartPole-v1", invoked_from=tmp_path)
    with service(home):
        trainer = TrainerService(home)
        script = next(one for one in trainer.prepare_training(spec).findings if one.check == "script")
        assert (script.level, "no CleanRL checkout" in script.text) == ("refused", True)
        monkeypatch.setenv("PALAESTRA_CLEANRL", "checkout")
        monkeypatch.setenv("UV_PROJECT_ENVIRONMENT", "own")
        findings = {one.check: one for one in trainer.prepare_training(spec).findings}
    assert findings["script"].level == "ok"
    assert str(own) in findings["python"].text


HOLDER = """
import sys
from palaestra.files.home import Home
from palaestra.runs.store.lock import ServiceLock
with ServiceLock(Home.default()) as lock:
    lock.publish_url("http://127.0.0.1:1")
    print("held", flush=True)
    sys.stdin.readline()
"""


def test_a_client_waits_for_a_service_that_is_just_leaving_and_starts_the_next(home):
    command = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as leaving:
        assert leaving.stdout.readline() == "held\n"
        gone = threading.Timer(0.5, lambda: leaving.communicate("\n", timeout=30))
        gone.start()
        try:
            assert ensure_service(home).url != "http://127.0.0.1:1"
        finally:
            gone.join()
            end_service(home)


def test_a_service_is_asked_to_leave_and_its_runs_go_on(home):
    assert stop_service(home) is None
    gate = home.base / "go"
    try:
        with service(home) as said:
            trainer = TrainerService(home)
            run_id = trainer.start_run({"steps": 5, "until": str(gate)}, runner="echo")
            trainer.wait(run_id, phases=[Phase.RUNNING], timeout_s=30)
            assert stop_service(home) == said["pid"]
            assert find_service(home) is None
        gate.touch()
        # The next one adopts it.
        assert trainer.wait(run_id, timeout_s=30).phase is Phase.SUCCEEDED
    finally:
        end_service(home)


def test_an_orchestrator_is_not_ended_for_a_service(home):
    with (
        TrainerOrchestrator(home),
        pytest.raises(StateDirectoryLocked, match=f"is held by process {os.getpid()}, which is an"),
    ):
        stop_service(home)


def test_a_token_that_the_service_does_not_take_is_told_with_the_file_and_the_way_out(home, monkeypatch):
    monkeypatch.setattr("palaestra.runs.client.connect._LOCK_TIMEOUT_S", 0.0)
    with service(home) as said:
        token = home.token.read_text()
        home.token.write_text("0" * 64)
        with pytest.raises(ServiceUnreachable, match=rf"not accept the token in {home.token}.*palaestra serve --stop"):
            TrainerService(home).runs()
        home.token.unlink()
        with pytest.raises(ServiceUnreachable, match=rf"{said['url']}, and {home.token} cannot be read.*serve --stop"):
            TrainerService(home).runs()
        home.token.write_text(token)
        home.endpoint.write_text("no address at all")
        assert TrainerService(home).runs() == []


def test_a_service_that_falls_silent_is_named(home, monkeypatch, caplog):
    with service(home) as said:
        trainer = TrainerService(home)
        assert trainer.runs() == []
        monkeypatch.setattr(requests, "_WARN_AFTER_S", 0.1)
        monkeypatch.setattr(requests, "_QUICK_TIMEOUT_S", 0.3)
        os.kill(said["pid"], signal.SIGSTOP)
        try:
            with pytest.raises(ServiceUnreachable, match=rf"process {said['pid']}\) has not answered GET /runs for"):
                trainer.runs()
        finally:
            os.kill(said["pid"], signal.SIGCONT)
    assert f"the run service (process {said['pid']}) has not answered for 0 s; still waiting" in caplog.messages


def test_a_service_that_is_stopped_is_told_from_one_that_serves(home, monkeypatch):
    with service(home) as said:
        monkeypatch.setattr(connect, "_RESPONSE_TIMEOUT_S", 0.2)
        os.kill(said["pid"], signal.SIGSTOP)
        with pytest.raises(ServiceUnreachable, match=f"is suspended.*kill -CONT {said['pid']}"):
            ensure_service(home)
        assert stop_service(home) == said["pid"]


def test_a_request_that_is_aborted_is_not_sent_again(home, monkeypatch):
    failures = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = connect.Endpoint(f"http://127.0.0.1:{silent.getsockname()[1]}", "token")
        trainer = TrainerService(home)
        monkeypatch.setattr(trainer, "_endpoint", lambda refresh: endpoint)

        def ask():
            try:
                trainer.runs()
            except ServiceUnreachable as error:
                failures.append(error)

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        with silent.accept()[0] as connection:
            connection.recv(1)  # the request has arrived
            trainer.abort()
            asking.join(30)
        silent.setblocking(False)
        with pytest.raises(BlockingIOError):
            silent.accept()
    assert not asking.is_alive()
    assert "closed the connection" in str(failures[0])
