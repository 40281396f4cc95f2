"""One stream of the new points of many runs: nothing is lost, nothing floods, and a slow client costs little."""

import asyncio
import contextlib
import gc
import http.client
import json
import math
import os
import signal
import threading
import time
import urllib.parse

import pytest
from tests.runs.attempts import wait_until
from tests.runs.serving import killed_service, service_thread
from tests.runs.supervisors import echo, run_supervisor

from palaestra.errors import ConfigError, ServiceUnreachable, UnknownRun
from palaestra.files.atomic import read_json, write_json
from palaestra.runs import TrainerService
from palaestra.runs.ingest.live_metrics import LiveMetrics
from palaestra.runs.phase import Phase
from palaestra.runs.reader import RunReader
from palaestra.runs.service import streaming
from palaestra.telemetry.event import EpisodeSummary, PhaseChanged, Record, TrainingStep
from palaestra.telemetry.journal import Journal


class Watcher:
    """A client that loads the stored series whenever it is told to, and keeps every point it gets."""

    def __init__(self, trainer, *run_ids):
        self._trainer = trainer
        self.points = {run_id: {} for run_id in run_ids}
        self.histories = dict.fromkeys(run_ids, 0)
        self.arrivals = {run_id: [] for run_id in run_ids}
        self.error = None
        self._changed = threading.Condition()
        self._events = trainer.watch_metrics(run_ids)
        self._thread = threading.Thread(target=self._read)

    def __enter__(self):
        self._thread.start()
        self.wait_for(lambda: all(self.histories.values()))
        return self

    def __exit__(self, *error):
        self._events.close()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _read(self):
        try:
            for run_id, points in self._events:
                is_history = not points
                if is_history:
                    points = self._trainer.metric_series(run_id, points=100_000)
                with self._changed:
                    for name, curve in points.items():
                        self.points[run_id].setdefault(name, {}).update({(p.step, p.time): p.value for p in curve})
                    self.histories[run_id] += is_history
                    self.arrivals[run_id] += [] if is_history else [time.monotonic()]
                    self._changed.notify_all()
        except ServiceUnreachable as error:
            with self._changed:
                self.error = error
                self._changed.notify_all()

    def wait_for(self, fact):
        with self._changed:
            assert self._changed.wait_for(fact, timeout=60), (self.histories, self.error)

    def values(self, run_id, name):
        return sorted(self.points[run_id].get(name, {}).values())


def test_a_run_that_was_queued_is_told_from_its_first_point_to_its_end(served):
    trainer = served.trainer
    trainer.drain(True)
    run_id = trainer.start_run({"steps": 30}, runner="echo")
    with Watcher(trainer, run_id) as watcher:
        assert watcher.points[run_id] == {}
        trainer.drain(False)
        watcher.wait_for(lambda: watcher.histories[run_id] == 2)
        assert watcher.values(run_id, "m0") == [float(u) for u in range(1, 31)]
        assert watcher.values(run_id, "m1") == [float(u) for u in range(2, 32)]
        assert watcher.values(run_id, "episode/return") == [1.0, 2.0, 3.0]
        assert set(watcher.points[run_id]) == set(trainer.metric_names(run_id))


def test_clients_that_connect_in_the_middle_of_two_runs_lose_nothing(served):
    trainer = served.trainer
    ids = [trainer.start_run({"steps": 600, "rate": 300}, runner="echo") for _ in range(2)]
    for run_id in ids:
        trainer.wait(run_id, phases=[Phase.RUNNING], timeout_s=60)
    with contextlib.ExitStack() as stack:
        watchers = [stack.enter_context(Watcher(trainer, *ids)) for _ in range(3)]
        for watcher in watchers:
            watcher.wait_for(lambda watcher=watcher: all(count == 2 for count in watcher.histories.values()))
            for run_id in ids:
                assert watcher.values(run_id, "m0") == [float(u) for u in range(1, 601)]


def test_a_run_that_has_ended_is_told_at_once_and_the_stream_stays_open(served):
    run_id, other = served.done(steps=5), served.trainer.start_run({"steps": 3, "then": "hang"}, runner="echo")
    with Watcher(served.trainer, run_id, other) as watcher:
        watcher.wait_for(lambda: watcher.histories[run_id] == 2)
        watcher.wait_for(lambda: watcher.values(other, "m0") == [1.0, 2.0, 3.0])
        served.trainer.stop_run(other, grace_s=0)
        watcher.wait_for(lambda: watcher.histories[other] == 2)
    assert watcher.error is None


def test_a_resumed_attempt_is_told_and_asks_for_the_history_because_it_replaces_points(served):
    trainer = served.trainer
    run_id = trainer.start_run({"steps": 20, "checkpoint_every": 10, "then": "exit:1"}, runner="echo")
    trainer.wait(run_id, timeout_s=60)
    earliest = min(trainer.checkpoints(run=run_id), key=lambda row: row.env_step)
    with Watcher(trainer, run_id) as watcher:
        watcher.wait_for(lambda: watcher.histories[run_id] == 2)
        trainer.resume_run(run_id, checkpoint=earliest.checkpoint_id, changes={"then": "exit:0"})
        trainer.wait(run_id, timeout_s=60)
        watcher.wait_for(lambda: watcher.histories[run_id] == 4)
        stored = trainer.metrics(run_id, "m0")
        assert [point.value for point in stored] == [float(u) for u in range(1, 21)]
        # Of the second attempt: updates 11 to 20, which replace those of the first.
        known = watcher.points[run_id]["m0"]
        assert {(point.step, point.time) for point in stored} <= set(known)


def test_no_more_than_about_ten_batches_a_second_come_for_a_run(served):
    run_id = served.trainer.start_run(
        {"steps": 3000, "rate": 1500, "wait_for": str(served.home.path / "go")}, runner="echo"
    )
    with Watcher(served.trainer, run_id) as watcher:
        (served.home.path / "go").touch()
        watcher.wait_for(lambda: watcher.histories[run_id] == 2)
        arrivals = watcher.arrivals[run_id]
        assert len(arrivals) <= 10 * (arrivals[-1] - arrivals[0]) + 2
        assert len(watcher.values(run_id, "m0")) == 3000


def test_numbers_that_are_none_arrive_as_numbers(served):
    run_id = served.trainer.start_run({"steps": 4, "nan_from": 3, "then": "hang"}, runner="echo")
    with Watcher(served.trainer, run_id) as watcher:
        watcher.wait_for(lambda: len(watcher.points[run_id].get("m0", {})) == 4)
        values = [value for _, value in sorted(watcher.points[run_id]["m0"].items())]
        assert values[:2] == [1.0, 2.0]
        assert all(map(math.isnan, values[2:]))
    served.trainer.stop_run(run_id, grace_s=0)


def _unsupervised_run(home, run_id):
    run = home.run(run_id)
    run.attempt(1).path.mkdir(parents=True)
    resolved = {"algorithm": {"name": "ppo"}, "env": {"id": "CartPole-v1"}, "trainer": {"total_timesteps": 100}}
    write_json(run.resolved, resolved)
    return run


def test_a_run_of_palaestra_train_alone_is_told_too(served):
    run = _unsupervised_run(served.home, "alone-1")
    with Journal(run.attempt(1).journal) as journal:
        journal.emit_many(TrainingStep(u, 10 * u, {"loss": float(u)}) for u in range(1, 6))
        with Watcher(served.trainer, "alone-1") as watcher:
            watcher.wait_for(lambda: watcher.values("alone-1", "loss") == [1.0, 2.0, 3.0, 4.0, 5.0])
            journal.emit_many(TrainingStep(u, 10 * u, {"loss": float(u)}) for u in range(6, 9))
            journal.emit(EpisodeSummary(80, 1, 0, 9.0, 4))
            watcher.wait_for(lambda: len(watcher.values("alone-1", "loss")) == 8)
            assert watcher.histories["alone-1"] == 1
            journal.emit(PhaseChanged("succeeded"))
            journal.close()
            watcher.wait_for(lambda: watcher.histories["alone-1"] == 2)
            assert watcher.values("alone-1", "episode/return") == [9.0]


def test_the_events_of_the_stream_are_those_of_the_reference(served):
    run_id = served.done(steps=2)
    parts = urllib.parse.urlsplit(served.url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
    # A prefix names the run, and a run that is named twice is told once.
    path = f"/stream/metrics?run={run_id}&run={run_id}"
    connection.request("GET", path, headers={"Authorization": f"Bearer {served.token}"})
    response = connection.getresponse()
    assert (response.status, response.headers["Content-Type"]) == (200, "text/event-stream; charset=utf-8")
    lines = [response.readline().decode().rstrip() for _ in range(6)]
    about = json.dumps({"run_id": run_id})
    assert lines == ["event: history", f"data: {about}", "", "event: run_end", f"data: {about}", ""]
    connection.close()


@pytest.mark.parametrize(
    ("query", "status", "place"),
    [
        ("", 422, "run"),
        ("run=nobody", 404, "run"),
        ("run=..%2Fservice", 422, "run.0"),
        ("&".join(f"run=r{n}" for n in range(65)), 422, "run"),
    ],
)
def test_bad_requests_are_refused_before_the_stream_begins(served, query, status, place):
    answer = served.ask("GET", f"/stream/metrics?{query}")
    assert (answer.status, answer.json["error"]["place"]) == (status, place)


def test_the_client_raises_what_the_service_refuses(served):
    with pytest.raises(UnknownRun):
        next(iter(served.trainer.watch_metrics(["nobody"])))
    with pytest.raises(ConfigError):
        next(iter(served.trainer.watch_metrics([])))


def test_a_client_that_does_not_read_costs_bounded_memory_and_sees_the_spike(home):
    async def body():
        async with run_supervisor(home) as supervisor:
            record = await supervisor.submit(echo(steps=1, then="hang"))
            stream = streaming._stream_metrics(supervisor, RunReader(home), [record], asyncio.Event())
            async with contextlib.aclosing(stream):
                assert b"event: history" in await anext(stream)
                (subscription,) = supervisor._live_metrics._subscriptions
                # 400,000 points, of which one is a spike, while the client does not read.
                for first in range(0, 200_000, 1000):
                    records = [
                        Record(n, 1.0, TrainingStep(n, n, {"a": 1e9 if n == 77_777 else 0.5, "b": float(n)}))
                        for n in range(first, first + 1000)
                    ]
                    supervisor._live_metrics.publish(record.run_id, 1, records)
                waiting, chunk = subscription.waiting, await anext(stream)
            assert supervisor._live_metrics._subscriptions == []
            return waiting, chunk

    waiting, chunk = asyncio.run(body())
    assert waiting <= 65_536 + 2000
    assert len(chunk) < 4_000_000
    data = next(line for line in chunk.decode().splitlines() if line.startswith("data: ") and "points" in line)
    points = json.loads(data.removeprefix("data: "))["points"]
    assert [77_777, 1e9, 1.0] in points["a"]
    assert points["b"][-1] == [199_999, 199_999.0, 1.0]


def test_clients_that_leave_are_forgotten_by_the_service(served):
    run_id = served.trainer.start_run({"steps": 1, "then": "hang"}, runner="echo")
    # `isinstance` would wake deprecated proxies of torch, if another test has imported it.
    everyone = [one for one in gc.get_objects() if type(one) is LiveMetrics]
    with Watcher(served.trainer, run_id), Watcher(served.trainer, run_id):
        assert sum(len(one._subscriptions) for one in everyone) == 2
    asyncio.run(wait_until(lambda: not any(one._subscriptions for one in everyone), "the service to notice"))
    served.trainer.stop_run(run_id, grace_s=0)


def test_a_client_whose_service_is_killed_finds_everything_at_the_next(home):
    home.path.mkdir(parents=True)
    gate = home.path / "go"
    with killed_service(home) as trainer:
        run_id = trainer.start_run({"steps": 200, "rate": 200, "until": str(gate)}, runner="echo")
        watcher = Watcher(trainer, run_id)
        with watcher:
            watcher.wait_for(lambda: len(watcher.values(run_id, "m0")) > 20)
            os.kill(read_json(home.endpoint)["pid"], signal.SIGKILL)
            watcher.wait_for(lambda: watcher.error is not None)
    with killed_service(home) as trainer, Watcher(trainer, run_id) as watcher:
        gate.touch()
        watcher.wait_for(lambda: watcher.histories[run_id] == 2)
        assert watcher.values(run_id, "m0") == [float(u) for u in range(1, 201)]


def test_a_service_that_stops_ends_the_streams_of_its_clients(home):
    with contextlib.ExitStack() as stack:
        with service_thread(home):
            trainer = TrainerService(home)
            run_id = trainer.start_run({"steps": 1}, runner="echo")
            watcher = stack.enter_context(Watcher(trainer, run_id))
        watcher.wait_for(lambda: watcher.error is not None)
    asyncio.run(wait_until(lambda: not watcher._thread.is_alive(), "the client to end"))
