"""Runs as jobs of a real Ray cluster: the same metrics, once, and the same stop."""

import asyncio
import http.server
import json
import os
import signal
import threading

import pytest
from tests.runs.attempts import wait_until
from tests.runs.remote.ray_head import run_ray_head
from tests.runs.serving import killed_service
from tests.runs.supervisors import (
    echo,
    event_kinds,
    read_echo_report,
    read_journal,
    run_supervisor,
    wait_for_end,
    wait_for_phase,
)

from palaestra.errors import HostUnreachable, LaunchRefused
from palaestra.files.atomic import read_json
from palaestra.processes.procfs import ProcessIdentity, list_descendants
from palaestra.runs.phase import Phase
from palaestra.runs.remote.hosts import HostConfig
from palaestra.telemetry.event import TrainingStep

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def ray_head():
    with run_ray_head() as address:
        yield address


@pytest.fixture(autouse=True)
def without_token(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")


def _hosts(address, tmp_path, **settings):
    return {"cluster": HostConfig(address=address, directory=str(tmp_path / "node"), **settings)}


def _job(home, **config):
    project = home.base / "project"
    project.mkdir(exist_ok=True)
    return echo(on="cluster", invoked_from=project, **config)


def _updates(home, run_id):
    return [r.event.update for r in read_journal(home, run_id) if isinstance(r.event, TrainingStep)]


def _trainer(tmp_path, run_id):
    process = tmp_path / "node" / "var" / "training" / "runs" / run_id / "attempt_1" / "process.json"
    return ProcessIdentity.from_json(read_json(process)["trainer"])


def _links():
    found = []
    for pid in list_descendants(os.getpid()):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                words = file.read().split(b"\0")
        except OSError:
            continue
        if b"palaestra.runs.remote.ray_jobs" in words and b"follow" in words:
            found.append(pid)
    return found


@pytest.mark.slow
def test_a_ray_job_has_the_metrics_and_files_of_a_run_at_home_also_over_a_link_that_was_cut(home, ray_head, tmp_path):
    async def body():
        async with run_supervisor(home, hosts=_hosts(ray_head, tmp_path)) as supervisor:
            config = {"steps": 50, "rate": 25, "checkpoint_every": 25, "until": str(tmp_path / "go")}
            record = await supervisor.submit(_job(home, **config))
            await wait_until(lambda: len(_updates(home, record.run_id)) > 5, "metrics")
            for pid in _links():
                os.kill(pid, signal.SIGKILL)
            await wait_until(lambda: len(_updates(home, record.run_id)) == 50, "everything")
            (tmp_path / "go").touch()
            return await wait_for_end(supervisor, record.run_id)

    record = asyncio.run(body())
    assert (record.phase, record.reason, record.host, record.env_step) == (Phase.SUCCEEDED, "done", "cluster", 500)
    assert _updates(home, record.run_id) == list(range(1, 51))
    assert read_echo_report(home, record.run_id)["episodes"] == 5
    # On a busy machine the new link takes more than two seconds, and the run is unreachable meanwhile.
    kinds = [kind for kind in event_kinds(home, record.run_id) if not kind.startswith("alarm")]
    assert kinds == ["note", "launched", "first_sign", "succeeded"]
    attempt = home.run(record.run_id).attempt(1).path
    assert sorted(path.name for path in (attempt / "checkpoints").iterdir()) == ["step_250.json", "step_500.json"]


@pytest.mark.slow
def test_a_stop_of_a_ray_job_is_that_of_the_run_and_kills_a_stubborn_group_after_the_grace(home, ray_head, tmp_path):
    async def body():
        async with run_supervisor(home, hosts=_hosts(ray_head, tmp_path)) as supervisor:
            record = await supervisor.submit(_job(home, steps=0, then="hang", ignore_term=True, fork="2:setsid"))
            await wait_for_phase(supervisor, record.run_id, Phase.RUNNING)
            trainer = _trainer(tmp_path, record.run_id)
            stopped = await supervisor.stop(record.run_id, grace_s=0.2)
            assert not trainer.is_alive()
            return stopped

    record = asyncio.run(body())
    assert (record.phase, record.reason) == (Phase.STOPPED, "stopped by the operator")
    assert read_json(home.run(record.run_id).attempt(1).exit)["returncode"] == -signal.SIGKILL


@pytest.mark.slow
def test_a_killed_service_adopts_a_ray_job_with_every_metric_once(home, ray_head, tmp_path):
    home.path.mkdir(parents=True)
    settings = {"hosts": {name: host.model_dump() for name, host in _hosts(ray_head, tmp_path).items()}}
    with killed_service(home, **settings) as first:
        config = {"steps": 100, "rate": 25, "until": str(tmp_path / "go")}
        run_id = first.submit(_job(home, **config)).run_id
        asyncio.run(wait_until(lambda: len(_updates(home, run_id)) > 5, "metrics"))
    (tmp_path / "go").touch()
    with killed_service(home, **settings) as second:
        record = second.wait(run_id, timeout_s=120)
    assert (record.phase, record.reason) == (Phase.SUCCEEDED, "done")
    assert _updates(home, run_id) == list(range(1, 101))


@pytest.mark.slow
def test_a_cluster_without_the_interpreter_refuses_the_run_with_the_words_of_its_shell(home, ray_head, tmp_path):
    async def body():
        hosts = _hosts(ray_head, tmp_path, python="/no/such/python")
        async with run_supervisor(home, hosts=hosts) as supervisor:
            record = await supervisor.submit(_job(home, steps=1))
            return await wait_for_end(supervisor, record.run_id)

    record = asyncio.run(body())
    assert record.phase is Phase.REFUSED
    assert "/no/such/python: not found" in record.reason


@pytest.mark.slow
def test_a_trainer_that_is_killed_on_its_node_says_by_which_signal(home, ray_head, tmp_path):
    async def body():
        async with run_supervisor(home, hosts=_hosts(ray_head, tmp_path)) as supervisor:
            record = await supervisor.submit(_job(home, steps=3, then="signal:KILL"))
            return await wait_for_end(supervisor, record.run_id)

    record = asyncio.run(body())
    assert (record.phase, record.reason) == (Phase.KILLED, "killed (SIGKILL)")


class _OtherVersion(http.server.BaseHTTPRequestHandler):
    """A job server of another version of Ray, as far as a client asks before it does anything."""

    def do_GET(self):
        body = json.dumps({"version": "4", "ray_version": "2.9.0", "ray_commit": "x", "session_name": "s"}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


def _refusal(home, tmp_path, address):
    async def body():
        async with run_supervisor(home, hosts=_hosts(address, tmp_path)) as supervisor:
            with pytest.raises((LaunchRefused, HostUnreachable)) as refused:
                await supervisor.submit(_job(home, steps=1))
            assert not list(home.runs.iterdir())
            return str(refused.value)

    return asyncio.run(body())


def test_another_version_of_ray_and_an_unreachable_cluster_are_refused_with_what_to_do(home, tmp_path):
    server = http.server.HTTPServer(("127.0.0.1", 0), _OtherVersion)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    try:
        other = _refusal(home, tmp_path, address)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert f"the cluster runs Ray 2.9.0, and {ray.__version__} is installed here" in other
    assert other.endswith("pip install 'ray[default]==2.9.0'.")
    assert "cluster: cannot be reached (" in _refusal(home, tmp_path, address)
