"""Checkpoints of CORL scripts act in plays as they do in the evaluations of their script."""

import shutil
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
from tests.runs.runners.acting import Acting
from tests.runs.runners.corl_data import needs_pyrallis

from palaestra.errors import CheckpointError
from palaestra.runs.checkpoints.files import detect_format, digest_path
from palaestra.runs.checkpoints.pickle_scan import scan
from palaestra.runs.record import CheckpointRecord
from palaestra.runs.runner import PolicyRequest
from palaestra.runs.runners.conformance import check_runner
from palaestra.runs.runners.corl import CorlRunner


def _request(corl_run, name="checkpoint_99.pt", **options):
    spec, plan, _, _ = corl_run
    (path,) = plan.cwd.glob(f"models/*/{name}")
    digest = digest_path(path)
    record = CheckpointRecord(
        checkpoint_id=digest.sha256[:16],
        run_id=plan.paths.run_id,
        agent_id="corl/regression",
        env_id="Pendulum-v1",
        attempt=1,
        env_step=100,
        path=str(path),
        sha256=digest.sha256,
        size_bytes=digest.size_bytes,
        format=detect_format(path),
        created=0.0,
        offline_dataset=plan.offline_dataset,
    )
    facts = {"command": plan.to_redacted_dict(), "deterministic": True, "unsafe": scan(path).reason}
    return PolicyRequest(**{"checkpoint": record, "spec": spec, **facts, **options})


@needs_pyrallis
def test_a_checkpoint_reaches_the_return_that_its_script_reported(corl_home, corl_run, machine):
    plan = CorlRunner().plan_policy(_request(corl_run), machine)
    reported = [event.metrics["eval_return"] for event in corl_run[3] if "eval_return" in getattr(event, "metrics", {})]

    acting = Acting(plan)
    env = gymnasium.make("Pendulum-v1")
    returns = []
    try:
        assert acting.first["type"] == "ready", acting.first
        for seed in (3, None):
            observation, _ = env.reset(seed=seed)
            total, ended = 0.0, False
            while not ended:
                answer = acting.act(np.asarray(observation))
                observation, reward, terminated, truncated, _ = env.step(np.asarray(answer["action"], np.float32))
                total, ended = total + reward, terminated or truncated
            returns.append(total)
    finally:
        acting.process.close()
        env.close()

    assert not plan.foreign_code
    assert np.mean(returns) == pytest.approx(reported[-1], rel=1e-3)


@needs_pyrallis
def test_a_changed_script_needs_consent(corl_home, corl_run, machine, tmp_path):
    request = _request(corl_run)
    copy = shutil.copytree(request.spec.config["checkout"], tmp_path / "copy")
    with open(copy / "algorithms" / "offline" / "regression.py", "a") as file:
        file.write("# changed\n")
    spec = request.spec.model_copy(update={"config": {**request.spec.config, "checkout": str(copy)}})

    plan = CorlRunner().plan_policy(replace(request, spec=spec), machine)

    assert "regression.py, which has changed since the run" in plan.foreign_code


@needs_pyrallis
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"unsafe": "holds code"}, "holds code"),
        ({"spec": None}, "not in the directory of its run"),
        ({"command": {}}, "not in the directory of its run"),
    ],
)
def test_a_checkpoint_that_cannot_act_is_refused(corl_home, corl_run, machine, changes, words):
    with pytest.raises(CheckpointError, match=words):
        CorlRunner().plan_policy(replace(_request(corl_run), **changes), machine)


@needs_pyrallis
def test_a_script_without_a_network_that_acts_cannot_play(corl_home, corl_run, machine):
    request = _request(corl_run)
    config = {key: request.spec.config[key] for key in ("checkout", "dataset")}
    spec = request.spec.model_copy(update={"script": "epochs", "config": config})

    with pytest.raises(CheckpointError, match="has no network that acts on one observation"):
        CorlRunner().plan_policy(replace(request, spec=spec), machine)


@needs_pyrallis
def test_corl_keeps_the_rules(corl_home, corl_run, tmp_path):
    check_runner(CorlRunner, corl_run[0], tmp_path)
