"""Checkpoints and tools over HTTP, with what the service finds by itself."""

import json
import os
import select
import time
import urllib.request
from pathlib import Path

import pytest
from tests.runs.checkpoints.own import own_checkpoint
from tests.runs.serving import service, service_thread

from palaestra.errors import ConfigError
from palaestra.files.home import Home
from palaestra.runs.checkpoints.files import verify
from palaestra.runs.checkpoints.import_checkpoint import Provenance, copy_out_of_run
from palaestra.runs.client.connect import find_service
from palaestra.runs.config import service_config

torch = pytest.importorskip("torch")


def test_checkpoints_of_a_run_are_found_verified_and_found_damaged(served):
    run_id = served.done(steps=20, checkpoint_every=10)
    found = served.ask("GET", f"/checkpoints?run={run_id}").json
    assert [row["env_step"] for row in found] == [200, 100]
    assert served.ask("GET", f"/checkpoints?run={run_id[:-1]}").json == found
    answer = served.ask("GET", "/checkpoints?run=nobody")
    assert (answer.status, answer.json["error"]["reason"]) == (404, "no such run")
    answer = served.ask("POST", f"/checkpoints/{found[0]['checkpoint_id']}/verify")
    assert (answer.status, answer.json["fits"]) == (200, True)
    with open(found[0]["path"], "ab") as file:
        file.write(b"x")
    answer = served.ask("POST", f"/checkpoints/{found[0]['checkpoint_id']}/verify")
    assert (answer.json["fits"], answer.json["checkpoint"]["verified"] < 0) == (False, True)
    assert served.ask("POST", "/checkpoints/ffff/verify").json["error"]["reason"] == "no such checkpoint"
    assert found[0]["checkpoint_id"] in {row.checkpoint_id for row in served.trainer.checkpoints(run=run_id)}


def test_weights_are_imported_and_code_is_not(served, tmp_path):
    weights = tmp_path / "weights.pt"
    torch.save({"layer": torch.zeros(3)}, weights)
    answer = served.ask("POST", "/checkpoints/import", {"path": str(weights), "agent_id": "mine", "env_id": "X-v0"})
    assert (answer.status, answer.json["agent_id"], answer.json["profile"]) == (201, "mine", "managed")
    assert served.ask("GET", f"/checkpoints/{answer.json['checkpoint_id'][:6]}").json == answer.json
    canary = tmp_path / "canary"

    class Evil:
        def __reduce__(self):
            return open, (str(canary), "w")

    evil = tmp_path / "evil.pt"
    torch.save({"layer": Evil()}, evil)
    answer = served.ask("POST", "/checkpoints/import", {"path": str(evil)})
    assert answer.status == 422
    assert not canary.exists()
    assert served.ask("POST", "/checkpoints/ffff/deploy", {}).json["error"]["reason"] == "no such checkpoint"


def test_names_that_are_no_names_are_refused(served):
    for odd in ("a\0b", "a\ud800b", "a\nb"):
        for body in ({"path": odd}, {"path": "/x", "env_id": odd}, {"path": "/x", "agent_id": odd}):
            answer = served.ask("POST", "/checkpoints/import", body)
            assert (answer.status, answer.json["error"]["code"]) == (422, "bad_request"), body
            assert answer.json["error"]["reason"].startswith(("is not valid UTF-8", "holds a control character")), body
        for path in ("/checkpoints/ffff/deploy", "/deployments/back"):
            assert served.ask("POST", path, {"env_id": odd}).status == 422


def test_what_is_imported_for_an_environment_knows_its_spaces_acts_there_and_goes_again(served, tmp_path):
    own_checkpoint(tmp_path / "own")
    body = {"path": str(tmp_path / "own"), "env_id": "CartPole-v1"}
    record = served.ask("POST", "/checkpoints/import", body).json
    assert record["env_signature"]["max_episode_steps"] == 500
    answer = served.ask("POST", f"/checkpoints/{record['checkpoint_id']}/deploy", {"env_id": "Pendulum-v1"})
    assert "Switch to CartPole-v1" in answer.json["error"]["text"]
    assert served.ask("GET", "/deployments").json == []
    now = served.ask("POST", f"/checkpoints/{record['checkpoint_id']}/deploy", {}).json
    assert (now["path"], now["env_id"]) == (record["path"], "CartPole-v1")
    assert served.ask("GET", "/deployments").json == [now]
    answer = served.ask("POST", "/deployments/back", {"env_id": "CartPole-v1"})
    assert (answer.status, answer.json) == (200, None)
    assert served.ask("GET", "/deployments").json == []
    answer = served.ask("POST", "/deployments/back", {"env_id": "CartPole-v1"})
    assert (answer.status, answer.json["error"]["reason"]) == (422, "nothing is deployed there")


def test_tracking_says_that_there_is_none(served):
    run_id = served.done()
    assert served.ask("GET", f"/runs/{run_id}/tracking").json["state"] == "off"


def test_tensorboard_shows_a_run_and_is_used_again(served):
    pytest.importorskip("tensorboard")
    run_id = served.done()
    first = served.ask("POST", "/tools/tensorboard", {"run_ids": [run_id]}).json["url"]
    assert served.ask("POST", "/tools/tensorboard", {"run_ids": [run_id[:-2]]}).json["url"] == first
    with urllib.request.urlopen(f"{first.rstrip('/')}/data/runs", timeout=60) as answer:
        assert json.load(answer) == [run_id]
    assert served.ask("POST", "/tools/tensorboard", {"run_ids": ["nobody"]}).status == 404
    shown = [{"url": first, "run_ids": [run_id]}]
    assert served.ask("GET", "/tools/tensorboard").json == shown
    other = served.done()
    assert served.ask("DELETE", f"/tools/tensorboard?run={other}").json == []
    assert served.ask("DELETE", f"/tools/tensorboard?run={run_id}").json == shown
    assert served.ask("GET", "/tools/tensorboard").json == []
    with pytest.raises(OSError, match=r"refused|reset"):
        urllib.request.urlopen(first, timeout=60)


def test_samples_of_the_machine_are_answered(served):
    run_id = served.done()
    samples = served.ask("GET", f"/runs/{run_id}/system?last=5").json
    assert all(sample["rss_mb"] >= 0 for sample in samples)


def test_the_doctor_looks_at_this_machine(served):
    found = {finding["check"]: finding for finding in served.ask("GET", "/doctor").json}
    assert found["dependency:torch"]["level"] == "ok"
    assert found["service"]["text"].startswith(served.url)
    assert {"python", "disk", "gpu", "registry", "runner:echo", "runner:cleanrl"} <= set(found)


def test_settings_of_the_state_directory_hold_for_a_service_that_starts_by_itself(tmp_path):
    home = Home(tmp_path / "var" / "training")
    home.path.mkdir(parents=True)
    (home.path / "service.yaml").write_text("max_running: 3\nretention: {keep_last: 7}\n")
    config = service_config(home, {"port": 0, "max_running": 4})
    assert (config.max_running, config.retention.keep_last) == (4, 7)
    (home.path / "service.yaml").write_text("max_runing: 3\n")
    with pytest.raises(ConfigError, match="Did you mean 'max_running'"):
        service_config(home, {})


def test_an_idle_service_leaves_by_itself_and_looking_whether_it_is_there_does_not_keep_it(home):
    watched = None
    with service(home, idle_exit_s=0.5) as told:
        watched = os.pidfd_open(told["pid"])
        deadline = time.monotonic() + 60
        while not select.select([watched], [], [], 0.1)[0]:
            assert time.monotonic() < deadline
            find_service(home)
        os.close(watched)
    assert not home.endpoint.exists()
    assert "idle; shutting down" in (home.service / "service.log").read_text()


def test_a_service_that_starts_gives_linked_checkpoints_files_of_their_own(home, tmp_path):
    run = tmp_path / "checkpoint"
    sha256 = own_checkpoint(run)
    kept = copy_out_of_run(home, run, sha256, Provenance())
    weights = Path(kept.path) / "policy.safetensors"
    weights.unlink()
    weights.hardlink_to(run / weights.name)  # as an earlier version did

    with service_thread(home):
        pass

    assert weights.stat().st_nlink == 1
    assert verify(kept).fits
