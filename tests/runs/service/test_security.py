"""Who is let in, what cannot be smuggled in, and what never comes out."""

import contextlib
import http.client
import json
import os
import socket
import stat
from pathlib import Path

import pytest
from tests.runs.service.asking import ask
from tests.runs.serving import service, service_thread

from palaestra.config import parse_section
from palaestra.errors import ConfigError
from palaestra.files.home import Home
from palaestra.http.hosts import AllowedHosts, exposure_warning
from palaestra.http.server import listen
from palaestra.runs import TrainerService
from palaestra.runs.client.connect import Endpoint, find_service
from palaestra.runs.service import server as service_module
from palaestra.runs.service.server import read_token

ROUTES = [
    ("GET", "/runs"), ("POST", "/runs"), ("GET", "/runs/x"), ("POST", "/runs/x/stop"), ("DELETE", "/runs/x"),
    ("GET", "/runs/x/events"), ("GET", "/runs/x/log"), ("GET", "/stream"), ("GET", "/runners"),
    ("GET", "/runners/echo/scripts"), ("GET", "/runners/echo/readiness"), ("GET", "/environments"),
    ("GET", "/environments/CartPole-v1/parameters"), ("GET", "/tasks"), ("POST", "/drain"),
    ("GET", "/datasets"), ("POST", "/datasets/a-v0/verify"),
    ("GET", "/openapi.json"), ("GET", "/nothing"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_without_the_token_nothing_is_answered(served, method, path):
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {served.token}"}):
        answer = served.ask(method, path, token=None, headers=headers)
        assert answer.status == 401
        assert answer.headers["WWW-Authenticate"].startswith("Bearer")
        assert answer.json["error"]["code"] == "unauthorised"
        assert served.token.encode() not in answer.body


def test_health_needs_no_token_and_tells_little(served):
    answer = served.ask("GET", "/health", token=None)
    assert (answer.status, set(answer.json)) == (200, {"status", "version", "pid"})


def test_web_pages_and_other_names_of_this_machine_are_not_served(served):
    answer = served.ask("GET", "/runs", headers={"Origin": "http://evil.example"})
    assert (answer.status, answer.json["error"]["code"]) == (403, "foreign_origin")
    for path in ("/runs", "/health"):
        answer = served.ask("GET", path, headers={"Host": "evil.example:80"})
        assert (answer.status, answer.json["error"]["code"]) == (403, "foreign_host")
    assert served.ask("GET", "/runs", headers={"Host": "localhost:1"}).status == 200


def test_who_listens_everywhere_is_warned_and_still_answers_to_its_own_names_alone(home, monkeypatch):
    # Told to listen everywhere, and in fact on this machine alone, as a test must.
    monkeypatch.setattr(service_module, "listen", lambda _, port, place: listen("127.0.0.1", port, place))
    own = ["localhost", "127.0.0.1", "[::1]", socket.gethostname(), "runs.example.org", "RUNS.EXAMPLE.ORG."]
    foreign = ["evil.example", "0.0.0.0", "192.0.2.7", "localhost.evil.example", "runs.example.org.evil"]
    with service_thread(home, host="0.0.0.0", allowed_hosts=["runs.example.org"]) as url:
        port, token = url.rpartition(":")[2], home.token.read_text().strip()
        # Clients of this machine are sent to its loopback address.
        assert url == f"http://127.0.0.1:{port}"
        assert TrainerService(home).runs() == []

        def answer(path, name):
            return ask(url, "GET", path, token=token, headers={"Host": f"{name}:{port}"})

        for path in ("/health", "/runs"):
            assert {name: answer(path, name).status for name in own} == dict.fromkeys(own, 200)
            assert {answer(path, name).json["error"]["code"] for name in foreign} == {"foreign_host"}
    log = (home.service / "service.log").read_text()
    assert (
        "WARNING palaestra.runs.service.server: the service listens on every address of this machine without encry"
        in log
    )
    assert f"ssh -L {port}:127.0.0.1:{port} HOST" in log


def test_the_address_that_was_connected_to_is_a_name_of_a_service_that_listens_beyond_this_machine():
    everywhere, here = AllowedHosts("0.0.0.0"), AllowedHosts("127.0.0.1")
    assert everywhere.allows("192.0.2.7:8710", "192.0.2.7")
    assert everywhere.allows("192.0.2.7", "::ffff:192.0.2.7")
    assert AllowedHosts("::").allows("[2001:DB8::1]:80", "2001:db8::1")
    assert not everywhere.allows("192.0.2.8", "192.0.2.7")
    assert not here.allows("192.0.2.7", "192.0.2.7")
    assert AllowedHosts("machine.lan").allows("machine.lan:1", "192.0.2.7")
    assert AllowedHosts("127.0.0.1", ["*"]).allows("anything at all", None)
    for name in ("http://runs.example.org", "runs.example.org:8710", "a:80", "[::1", "a b", ""):
        with pytest.raises(ConfigError, match="is not the name or address of a host"):
            parse_section(service_module.ServiceConfig, {"allowed_hosts": [name]})
    assert parse_section(service_module.ServiceConfig, {"allowed_hosts": ["*", "a.b", "::1", "[::1]"]}).allowed_hosts
    assert [exposure_warning(host, 1) for host in ("127.0.0.1", "::1", "localhost", "127.0.0.9")] == [""] * 4


def test_a_client_speaks_tls_when_its_url_says_so_and_takes_no_password_in_it():
    secure = Endpoint("https://runs.example.org", "t").connection(1.0)
    assert (type(secure), secure.port) == (http.client.HTTPSConnection, 443)
    assert Endpoint("http://127.0.0.1:8710", "t").connection(1.0).port == 8710
    with pytest.raises(ConfigError, match=r"url = 'http://me:\*\*\*@host': holds a user or password"):
        TrainerService(url="http://me:planted123@host")
    with pytest.raises(ConfigError, match="is not the address of a service"):
        TrainerService(url="ftp://host")


def test_a_body_beyond_a_megabyte_is_refused_announced_or_not(served):
    big = b"[" + b" " * (1 << 20) + b"]"
    headers = {"Content-Type": "application/json"}
    for body in (big, iter([big[: 1 << 19], big[1 << 19 :], b" " * 100])):
        # Whoever is still sending when the answer comes may find the connection closed instead.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            assert served.ask("POST", "/runs", raw=body, headers=headers).status == 413
    assert served.trainer.runs() == []


def test_a_form_as_a_web_page_sends_it_is_refused(served):
    raw = json.dumps({"spec": {"runner": "echo"}}).encode()
    answer = served.ask("POST", "/runs", raw=raw, headers={"Content-Type": "text/plain"})
    assert answer.status == 422
    assert served.trainer.runs() == []


@pytest.mark.parametrize(
    "name", ["..", "../..", "..%2f..%2fetc", "%2e%2e", ".hidden", "a/b", "A", "x" * 91, "x%00y", "a..b"]
)
@pytest.mark.parametrize("tail", ["", "/log", "/spec", "/events"])
def test_no_id_leads_out_of_the_directory_of_runs(served, name, tail):
    answer = served.ask("GET", f"/runs/{name}{tail}")
    assert answer.status in (404, 422), answer.body
    assert b"root:" not in answer.body


def test_a_configuration_cannot_leave_the_run_directory(served):
    for spec in (
        {"runner": "echo", "name": "../escape"},
        {"runner": "echo", "name": "/tmp/escape"},
        {"runner": "echo", "name": ".hidden"},
        {"runner": "cleanrl", "script": "../../evil", "env_id": "CartPole-v1"},
    ):
        answer = served.ask("POST", "/runs", {"spec": {"config": {}, **spec}})
        assert answer.status == 422, answer.body
    assert os.listdir(served.home.runs) == []


def test_shell_words_reach_the_program_verbatim(served, tmp_path, monkeypatch):
    canary = tmp_path / "canary"
    for evil in (
        ";touch canary",
        "$(touch canary)",
        "`touch canary`",
        "|touch canary",
        "&&touch canary",
        "\ntouch canary",
    ):
        gate = tmp_path / f"x{evil} --steps 99"
        gate.touch()
        spec = {"config": {"steps": 1, "wait_for": str(gate)}, "tags": (evil.strip(),), "invoked_from": str(tmp_path)}
        run_id = served.trainer.start_run(spec.pop("config"), runner="echo", **spec)
        assert served.trainer.wait(run_id, timeout_s=30).env_step == 10
        assert any(str(gate) in word for word in served.ask("GET", f"/runs/{run_id}/command").json["argv"])
    assert not list(Path(served.home.base).rglob("canary"))
    assert not canary.exists()


def test_an_export_is_not_written_over_anything_else(served, tmp_path):
    run_id = served.done()
    (tmp_path / "precious").write_text("mine")
    answer = served.ask("POST", f"/runs/{run_id}/export-tensorboard", {"into": str(tmp_path)})
    assert (answer.status, answer.json["error"]["place"]) == (422, "into")
    assert (tmp_path / "precious").read_text() == "mine"
    assert served.ask("POST", f"/runs/{run_id}/export-tensorboard", {"into": "relative"}).status == 422


def test_the_state_directory_keeps_its_secrets_to_its_owner(served):
    assert stat.S_IMODE(served.home.service.stat().st_mode) == 0o700
    assert stat.S_IMODE(served.home.token.stat().st_mode) == 0o600
    assert len(served.token) == 64
    run_id = served.done()
    attempt = served.home.run(run_id).attempt(1)
    assert stat.S_IMODE(attempt.command.stat().st_mode) == 0o600
    assert stat.S_IMODE(attempt.stdout.stat().st_mode) == 0o600


def test_a_token_that_others_could_read_is_refused(tmp_path):
    home = Home(tmp_path)
    home.service.mkdir()
    token = read_token(home)
    assert read_token(home) == token
    home.token.chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by others"):
        read_token(home)


def test_planted_keys_are_in_no_file_no_log_and_no_answer(home, monkeypatch):
    """The service has them in its environment, the trainer is given what it may have, and nobody writes them down."""
    planted = {
        "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
        "HF_TOKEN": "hf_plantedplantedplantedplanted",
        "MY_SECRET": "planted-secret-of-mine",
    }
    for name, value in planted.items():
        monkeypatch.setenv(name, value)
    with service(home, log_level="debug"):
        trainer = TrainerService(home)
        token = home.token.read_text().strip()
        run_id = trainer.start_run({"steps": 2, "traceback_alive": False}, runner="echo")
        trainer.wait(run_id, timeout_s=30)
        for path in ("", "/spec", "/command", "/life", "/log", "/metrics", "/events"):
            heard = _bytes(trainer, f"/runs/{run_id}{path}")
            _without(heard, [*planted.values(), token], path)
        sent = "abcdefgh12345678"
        refused = {"runner": "echo", "environment": {"MY_TOKEN": sent}}
        asked = [
            ("/runs", {"spec": refused}),
            ("/preflight", {"spec": {**refused, "environment": {"PROXY": f"http://me:{sent}@host"}}}),
            ("/preflight", {"spec": {"runner": "echo", "config": {"wandb": {"api_key": sent}}}}),
            ("/preflight", {"spec": {"runner": "echo", "api_key": sent}}),
            (f"/runs/{run_id}/resume", {"changes": {"api_key": sent}, "checkpoint": f"http://me:{sent}@host"}),
            (f"/runs/{run_id}/stop", {"api_key": sent}),
        ]
        endpoint = find_service(home)
        for path, body in asked:
            answer = ask(endpoint.url, "POST", path, body, token=endpoint.token)
            assert answer.status == (200 if "config" in str(body) else 422), answer.body
            _without(answer.body, [sent], path)
        planted["sent"] = sent
        _without(_bytes(trainer, "/doctor"), [*planted.values(), token], "doctor")
    for path in home.path.rglob("*"):
        if path.is_file() and path != home.token:
            _without(path.read_bytes(), [*planted.values(), token], path)


def _bytes(trainer, path):
    endpoint = find_service(trainer.home)
    return ask(endpoint.url, "GET", path, token=endpoint.token).body


def _without(data, secrets, where):
    for secret in secrets:
        assert secret.encode() not in data, f"{secret} is in {where}"


def test_a_secret_that_a_trainer_prints_is_hidden_when_its_output_is_read(served, tmp_path):
    run_id = served.done()
    with open(served.home.run(run_id).attempt(1).stdout, "a") as output:
        output.write("login with hf_abcdefghijklmnopqrstuvwxyz\n")
    text = served.ask("GET", f"/runs/{run_id}/log").json["text"]
    assert "hf_abcdef" not in text
    assert "login with ***" in text
    assert b"hf_abcdef" not in served.ask("GET", f"/runs/{run_id}/log/stream").body


def test_nothing_listens_beyond_this_machine(served):
    inodes = set()
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        address, port = words[1].split(":")
        if int(port, 16) == int(served.url.rsplit(":", 1)[1]) and words[3] == "0A":
            inodes.add(address)
    assert inodes == {"0100007F"}
