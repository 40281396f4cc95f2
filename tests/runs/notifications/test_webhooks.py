"""Notifications against real HTTP servers on loopback: what arrives, what is retried, and what never disturbs a run."""

import asyncio
import errno
import hashlib
import hmac
import http.server
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.runs.serving import killed_service, service_thread
from tests.runs.supervisors import echo, run_supervisor, wait_for_end

from palaestra.config import parse_section
from palaestra.errors import ConfigError
from palaestra.runs import TrainerService
from palaestra.runs.config import ServiceConfig
from palaestra.runs.notifications import webhooks as webhooks_module
from palaestra.runs.notifications.notification import Notification, WebhookConfig, build_notification, find_kind
from palaestra.runs.notifications.outbox import Outbox, remove_other_outboxes
from palaestra.runs.notifications.webhooks import Webhooks
from palaestra.runs.phase import Phase
from palaestra.runs.record import RunEvent, RunRecord
from palaestra.runs.supervisor.state_writer import EventBus

DEADLINE_S = 30.0


class Receiver:
    """An HTTP server that keeps what it gets and answers with the given codes, then with 200."""

    def __init__(self, *codes, location="http://127.0.0.1:1/"):
        self.requests, self.answers = [], list(codes)

        requests, answers = self.requests, self.answers

        class Answer(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                requests.append((self.path, dict(self.headers), body))
                self.send_response(answers.pop(0) if answers else 200)
                self.send_header("Location", location)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def documents(self):
        return [json.loads(body) for _, _, body in self.requests]


def wait_until(fact, what):
    end = time.monotonic() + DEADLINE_S
    while not fact():
        assert time.monotonic() < end, f"waited {DEADLINE_S} s for {what}"
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch):
    monkeypatch.setattr(webhooks_module, "_MAX_WAIT_S", 0.01)


def test_the_end_and_the_failure_of_runs_arrive_signed_and_in_order(home):
    home.path.mkdir(parents=True)
    (home.path / "hook.secret").write_text("s3cret-of-the-hook\n")
    with Receiver() as receiver:
        hook = {"url": f"{receiver.url}/hooks/7?room=lab", "secret_file": "hook.secret"}
        with service_thread(home, webhooks=[hook]):
            service = TrainerService(home)
            good = service.start_run({"steps": 1}, runner="echo", name="Baseline")
            service.wait(good, timeout_s=60)
            wait_until(lambda: len(receiver.requests) == 1, "the first notification")
            bad = service.start_run({"steps": 1, "then": "exit:3"}, runner="echo")
            service.wait(bad, timeout_s=60)
            wait_until(lambda: len(receiver.requests) == 2, "the second notification")
            wait_until(lambda: service.webhooks()[0].pending == 0, "the answer")
            (status,) = service.webhooks()
        assert (status.url, status.signed, status.delivered, status.failed) == (f"{receiver.url}/…", True, 2, 0)
        path, headers, body = receiver.requests[0]
        signature = hmac.new(b"s3cret-of-the-hook", body, hashlib.sha256).hexdigest()
        assert (path, headers["Content-Type"]) == ("/hooks/7?room=lab", "application/json")
        assert headers["X-Palaestra-Signature"] == f"sha256={signature}"
        first, second = receiver.documents()
    assert (first["schema"], first["kind"], first["run"]["run_id"], first["run"]["phase"]) == (
        1,
        "ended",
        good,
        "succeeded",
    )
    assert first["id"] == headers["X-Palaestra-Delivery"] == f"{good}:{first['event']['seq']}"
    assert (second["kind"], second["event"]["kind"], second["event"]["phase"]) == ("failed", "failed", "failed")
    assert second["text"] == f"{bad}: failed: exit code 3: echo: exiting with 3 as requested"
    assert "hooks/7" not in (home.service / "service.log").read_text()


def test_an_alarm_is_sent_once_however_often_it_comes_back(home):
    record = RunRecord(run_id="r-1", runner="echo", agent_id="echo", env_id="", phase=Phase.RUNNING)
    now = [1000.0]

    async def events():
        for seq, code in enumerate(("stalled", "stalled", "traceback", "stalled")):
            now[0] += 600.0 if seq == 3 else 1.0
            yield "r-1", RunEvent(seq, now[0], 1, "alarm", Phase.RUNNING, f"{code}!", code)

    async def body(url):
        hooks = Webhooks(home, [WebhookConfig(url=url)], lambda _: record, lambda: now[0])
        await hooks.start(events())
        await asyncio.to_thread(wait_until, lambda: hooks.statuses()[0].delivered == 3, "three notifications")
        await hooks.close()

    with Receiver() as receiver:
        asyncio.run(body(receiver.url))
        documents = receiver.documents()
    assert [document["event"]["seq"] for document in documents] == [0, 2, 3]
    assert documents[0]["text"] == "r-1: alarm stalled: stalled!"


def _deliver(home, receiver_url, **config):
    """Send the end of one run; returns the status afterwards."""
    record = RunRecord(run_id="r-1", runner="echo", agent_id="echo", env_id="", phase=Phase.FAILED)

    async def events():
        yield "r-1", RunEvent(5, 1.0, 1, "failed", Phase.FAILED, "exit code 3")

    async def body():
        hooks = Webhooks(home, [WebhookConfig(url=receiver_url, **config)], lambda _: record)
        await hooks.start(events())
        await asyncio.to_thread(wait_until, lambda: sum(_counts(hooks)) == 1, "the outcome")
        (status,) = hooks.statuses()
        await hooks.close()
        return status

    return asyncio.run(body())


def _counts(hooks):
    (status,) = hooks.statuses()
    return status.delivered, status.failed


def test_a_busy_receiver_is_tried_again_with_the_same_id_and_a_refusal_is_not(home):
    with Receiver(503, 429) as receiver:
        status = _deliver(home, receiver.url)
        assert (status.delivered, status.failed, status.last_error) == (1, 0, "")
        assert [headers["X-Palaestra-Delivery"] for _, headers, _ in receiver.requests] == ["r-1:5"] * 3
        assert len({body for _, _, body in receiver.requests}) == 1
    with Receiver(410) as receiver:
        status = _deliver(home, receiver.url)
        assert (status.failed, status.last_error, len(receiver.requests)) == (1, "answered 410", 1)
    with Receiver(500, 500, 500) as receiver:
        status = _deliver(home, receiver.url, max_tries=2)
        assert (status.failed, status.last_error, len(receiver.requests)) == (1, "answered 500", 2)


def test_a_redirect_is_not_followed(home):
    with Receiver() as other, Receiver(302, location=other.url) as receiver:
        status = _deliver(home, receiver.url)
        assert (status.failed, other.requests) == (1, [])
        assert status.last_error.endswith("give the final address)")


def test_an_unreachable_receiver_and_one_that_never_answers_disturb_no_run(home):
    with socket.socket() as closed, socket.socket() as silent:
        closed.bind(("127.0.0.1", 0))  # and never listens
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)
        ports = [sock.getsockname()[1] for sock in (closed, silent)]
        hooks = [{"url": f"http://127.0.0.1:{port}/token-{port}", "timeout_s": 0.2, "max_tries": 3} for port in ports]
        with Receiver() as receiver, service_thread(home, webhooks=[*hooks, {"url": receiver.url}]):
            service = TrainerService(home)
            ids = [service.start_run({"steps": 1}, runner="echo") for _ in range(3)]
            assert [service.wait(run_id, timeout_s=60).phase for run_id in ids] == [Phase.SUCCEEDED] * 3
            wait_until(lambda: len(receiver.requests) == 3, "the reachable receiver")
            wait_until(lambda: [one.failed for one in service.webhooks()] == [3, 3, 0], "the end of all tries")
            refused, timed_out, _ = service.webhooks()
            assert "refused" in refused.last_error
            assert "timed out" in timed_out.last_error
            tests = service.test_webhooks()
        assert [result.ok for result in tests] == [False, False, True]
    log = (home.service / "service.log").read_text()
    assert "is dropped" in log
    assert "token-" not in log


def test_a_test_of_a_silent_receiver_leaves_the_threads_of_the_service_free(home):
    async def body(url):
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        webhooks = Webhooks(home, [WebhookConfig(url=url, timeout_s=0.5)], lambda _: None)
        tests = asyncio.create_task(webhooks.test())
        await asyncio.sleep(0)
        await asyncio.to_thread(int)
        assert not tests.done()
        return await tests

    with socket.create_server(("127.0.0.1", 0)) as silent:
        (result,) = asyncio.run(body(f"http://127.0.0.1:{silent.getsockname()[1]}"))
    assert (result.ok, result.text) == (False, "timed out")


def test_an_answer_without_an_end_is_an_answer(home):
    def answer(server):
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            while connection.recv(1 << 16):  # until the other side closes
                pass

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer, args=(server,))
        thread.start()
        config = WebhookConfig(url=f"http://127.0.0.1:{server.getsockname()[1]}", timeout_s=DEADLINE_S)
        (result,) = asyncio.run(Webhooks(home, [config], lambda _: None).test())
        thread.join(DEADLINE_S)
    assert (result.ok, result.text) == (True, "answered 200")
    assert result.seconds < DEADLINE_S / 2


def test_a_run_that_ended_without_a_service_is_notified_by_the_next_one(home):
    gate = home.base / "go"
    with service_thread(home):
        service = TrainerService(home)
        run_id = service.start_run({"steps": 1, "until": str(gate)}, runner="echo")
        service.wait(run_id, phases=[Phase.RUNNING], timeout_s=60)
    gate.touch()
    wait_until(lambda: home.run(run_id).attempt(1).exit.exists(), "the end of the trainer")
    with Receiver() as receiver:
        with service_thread(home, webhooks=[{"url": receiver.url}]):
            wait_until(lambda: receiver.requests, "the notification")
        assert receiver.documents()[0]["text"].startswith(f"{run_id}: succeeded")


def test_what_could_not_be_delivered_before_a_kill_is_sent_in_order_by_the_next_service(home):
    with Receiver(*[503] * 100) as receiver:
        hook = {"url": f"{receiver.url}/secret-path"}
        with killed_service(home, webhooks=[hook]) as service:
            ids = []
            for _ in range(2):
                ids.append(service.start_run({"steps": 1}, runner="echo"))
                service.wait(ids[-1], timeout_s=60)
            wait_until(lambda: service.webhooks()[0].pending == 2 and receiver.requests, "two that wait")
        (outbox,) = (home.service / "notifications").iterdir()
        assert "secret-path" not in outbox.name
        receiver.answers.clear()
        receiver.requests.clear()
        with service_thread(home, webhooks=[hook]):
            wait_until(lambda: TrainerService(home).webhooks()[0].delivered == 2, "both notifications")
        assert [document["run"]["run_id"] for document in receiver.documents()] == ids
        assert list(outbox.iterdir()) == []
        with service_thread(home, webhooks=[hook]):
            assert TrainerService(home).webhooks()[0].pending == 0


def test_events_immediately_before_the_end_are_kept_for_the_next_service(home, monkeypatch):
    monkeypatch.setattr(webhooks_module, "_MAX_WAIT_S", 60.0)
    record = RunRecord(run_id="r-1", runner="echo", agent_id="echo", env_id="", phase=Phase.FAILED)

    async def body():
        bus = EventBus()
        hooks = Webhooks(home, [WebhookConfig(url="http://127.0.0.1:1/")], lambda _: record)
        await hooks.start(bus.stream())
        for seq in range(3):
            bus.publish("r-1", RunEvent(seq, 1.0, 1, "failed", Phase.FAILED))
        await hooks.close()
        (outbox,) = (home.service / "notifications").iterdir()
        return len(list(outbox.iterdir()))

    assert asyncio.run(body()) == 3


def test_notifications_on_disk_are_private_and_go_with_their_webhook(home, caplog):
    root = home.service / "notifications"
    kept, gone = Outbox(root, "https://a/"), Outbox(root, "https://b/")
    for outbox in (kept, gone):
        for number in range(3):
            outbox.add(Notification(f"r:{number}", "ended", b"{}"))
    kept.remove(Notification("r:1", "ended", b"{}"))
    for number, text in enumerate(("{ not JSON", "[1]", "7", '{"id": [], "kind": "", "body": ""}'), start=7):
        (kept.directory / f"00000000{number}.json").write_text(text)
    (kept.directory / f".000000011.json.{2**30}.tmp").touch()  # of a process that was killed
    assert {path.stat().st_mode & 0o777 for path in kept.directory.glob("00000000[0-2].json")} == {0o600}
    again = Outbox(root, "https://a/")
    remove_other_outboxes(root, [again])
    assert list(root.iterdir()) == [again.directory]
    assert [notification.id for notification in again.load()] == ["r:0", "r:2"]
    assert caplog.text.count("is not a notification and is removed") == 4
    assert len(list(kept.directory.iterdir())) == 2
    again.add(Notification("r:3", "ended", b"{}"))
    assert [notification.id for notification in Outbox(root, "https://a/").load()] == ["r:0", "r:2", "r:3"]


def test_a_notification_that_cannot_be_read_is_kept_for_the_next_service(home, monkeypatch):
    outbox = Outbox(home.service / "notifications", "https://a/")
    outbox.add(Notification("r:0", "ended", b"{}"))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", raise_input_output_error)
        again = Outbox(home.service / "notifications", "https://a/")
        assert again.load() == []
    again.add(Notification("r:1", "ended", b"{}"))
    third = Outbox(home.service / "notifications", "https://a/")
    assert [notification.id for notification in third.load()] == ["r:0", "r:1"]


def raise_input_output_error(path):
    raise OSError(errno.EIO, "Input/output error", str(path))


def test_only_ends_and_alarms_are_notifications_and_secrets_are_replaced(home, monkeypatch):
    async def body():
        async with run_supervisor(home) as supervisor:
            record = await wait_for_end(supervisor, (await supervisor.submit(echo(steps=1))).run_id)
            await supervisor.edit(record.run_id, {"notes": "x"})
            return supervisor.get_run(record.run_id)

    record = asyncio.run(body())
    events = [json.loads(line) for line in home.run(record.run_id).events.read_text().splitlines()]
    kinds = [RunEvent(0, 0.0, 1, one["kind"], Phase(one["phase"])) for one in events]
    assert [event.kind for event in kinds if find_kind(event) is not None] == ["succeeded"]
    assert events[-1]["kind"] == "edited"  # in the phase `succeeded`, and no notification
    monkeypatch.setenv("MY_API_KEY", "planted-planted")
    event = RunEvent(1, 0.0, 1, "failed", Phase.FAILED, "refused planted-planted at https://me:planted@host", "")
    text = build_notification("failed", record, event).body.decode()
    assert "planted" not in text
    assert json.loads(text)["event"]["reason"] == "refused *** at https://me:***@host"


@pytest.mark.parametrize("url", ["ftp://host/x", "host/x", "http://", "http://h/a b", "http://h/ü"])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ValueError, match="address"):
        ServiceConfig(webhooks=[{"url": url}])


@pytest.mark.parametrize(("url", "reason"), [
    ("http://host:99999/x", "Port out of range"),
    ("http://host:port/x", "Port could not be cast"),
    ("http://me:planted@host/x", "has a user name or password, which is not sent"),
    ("http://host\\@other/x", "has characters that an address must quote"),
])  # fmt: skip
def test_an_address_that_could_not_be_shown_or_sent_to_is_refused(url, reason):
    with pytest.raises(ConfigError, match=reason) as error:
        parse_section(ServiceConfig, {"webhooks": [{"url": url}]})
    assert "planted" not in str(error.value)


def test_a_secret_that_is_missing_or_empty_is_refused_at_the_start(home):
    home.path.mkdir(parents=True)
    config = WebhookConfig(url="http://127.0.0.1:1/", secret_file="none")
    with pytest.raises(ConfigError, match=r"webhooks.secret_file = .*none': cannot be read .*openssl rand"):
        Webhooks(home, [config], lambda _: None)
    (home.path / "none").write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        Webhooks(home, [config], lambda _: None)
    for path, reason in (("~no-such-user/x", "home directory"), ("a\0b", "null byte")):
        with pytest.raises(ConfigError, match=rf"cannot be read \(.*{reason}"):
            Webhooks(home, [WebhookConfig(url="http://127.0.0.1:1/", secret_file=path)], lambda _: None)
