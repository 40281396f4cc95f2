"""The preflight of a machine: what it says is what is so."""

import os
import signal

import pytest
from tests.runs.serving import service

from palaestra.files.atomic import read_json
from palaestra.runs.runners import registry
from palaestra.runs.service.doctor import examine
from palaestra.runs.supervisor.orchestrator import TrainerOrchestrator


@pytest.fixture
def findings(home, monkeypatch):
    """Findings by their check, the last of each; without runners, whose interpreters take their time to answer."""
    monkeypatch.setattr("palaestra.runs.service.doctor.registered_runners", dict)
    return lambda: {one.check: one for one in examine(home)}


def test_a_service_that_was_killed_is_not_told_as_running(home, findings):
    assert findings()["service"].text == "not running; starting a run starts it"
    with service(home) as said:
        assert findings()["service"].text == f"{said['url']} (process {said['pid']})"
        os.kill(said["pid"], signal.SIGKILL)
        os.waitid(os.P_PID, said["pid"], os.WEXITED | os.WNOWAIT)
        assert read_json(home.endpoint)["pid"] == said["pid"]
        assert findings()["service"].text.startswith("not running (the last one was killed)")


def test_who_holds_the_directory_without_serving_is_named(home, findings):
    with TrainerOrchestrator(home):
        assert f"process {os.getpid()} holds" in findings()["service"].text


def test_a_service_that_cannot_be_spoken_to_is_a_finding(home, findings):
    with service(home):
        home.token.unlink()
        found = findings()["service"]
    assert (found.level, "palaestra serve --stop" in found.remedy) == ("warning", True)


def test_settings_that_let_the_network_in_unencrypted_are_a_finding(home, findings):
    home.path.mkdir(parents=True)
    (home.path / "service.yaml").write_text("host: 0.0.0.0\nport: 8710\n")
    assert "ssh -L 8710:127.0.0.1:8710 HOST" in findings()["network"].text
    (home.path / "service.yaml").write_text("host: 127.0.0.1\n")
    assert "network" not in findings()


def test_settings_with_which_no_service_starts_are_a_finding(home, findings):
    home.path.mkdir(parents=True)
    (home.path / "service.yaml").write_text("max_runing: 3\n")
    found = findings()["settings"]
    assert found.level == "refused"
    assert "Did you mean 'max_running'?" in found.text
    (home.path / "service.yaml").write_text("max_running: 3\n")
    assert findings()["settings"].level == "ok"
    with service(home) as said:
        changed = home.path / "service.yaml"
        os.utime(changed, (2**31, 2**31))
        found = findings()["settings"]
        assert (found.level, "was changed after the service started" in found.text) == ("warning", True), said


def test_a_registry_that_cannot_be_opened_is_a_finding(home, findings):
    home.registry.mkdir(parents=True)
    found = findings()["registry"]
    assert (found.level, "Move it away" in found.remedy) == ("refused", True)


def test_variables_in_which_service_and_shell_differ_are_told_and_secrets_are_not(home, findings, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    monkeypatch.delenv("PALAESTRA_CLEANRL", raising=False)
    with service(home):
        assert "environment" not in findings()
        monkeypatch.setenv("PALAESTRA_CLEANRL", "/checkouts/cleanrl")
        found = findings()["environment"]
        assert found.text == "PALAESTRA_CLEANRL is not set for the service and '/checkouts/cleanrl' here"
        monkeypatch.delenv("PALAESTRA_CLEANRL")
        monkeypatch.delenv("WANDB_API_KEY")
        found = findings()["environment"]
        assert found.text == "WANDB_API_KEY is set for the service and not set here"
        assert "palaestra serve --stop" in found.remedy


def test_a_gpu_that_torch_cannot_use_is_a_finding(home, findings, monkeypatch):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("torch uses the GPUs of this machine")
    assert "cuda" not in findings()
    monkeypatch.setenv("PALAESTRA_GPUS", "0")
    found = findings()["cuda"]
    assert (found.level, "pip install torch" in found.remedy) == ("warning", True)


def test_runners_are_looked_at_as_they_are(home):
    names = {one.check for one in examine(home)}
    assert {f"runner:{name}" for name in registry.registered_runners()} <= names
    assert "uv" in names
