"""Unmodified scripts of CORL, from the checkout that PALAESTRA_CORL names."""

import math
import os

import pytest
from tests.runs.runners.conftest import run
from tests.runs.runners.corl_data import DATASET, needs_pyrallis, read_events

from palaestra.runs.runners.corl import CorlRunner
from palaestra.runs.spec import RunSpec
from palaestra.telemetry import CheckpointSaved, TrainingStep

pytestmark = [
    pytest.mark.slow,
    needs_pyrallis,
    pytest.mark.skipif("PALAESTRA_CORL" not in os.environ, reason="PALAESTRA_CORL names no checkout"),
]


def test_td3_bc_learns_from_a_local_dataset_and_reports_losses_scores_and_checkpoints(corl_home, paths, machine):
    config = {"dataset": DATASET, "max_timesteps": 50, "eval_freq": 25, "n_episodes": 1, "metrics_every": 10}
    spec = RunSpec(runner="corl", script="td3_bc", seed=1, config=config)

    refused = [finding for finding in CorlRunner().preflight(spec, machine) if finding.level == "refused"]
    plan = CorlRunner().plan(spec, paths, machine)
    code, output = run(plan)

    assert refused == []
    assert code == 0, output[-2000:]
    events = read_events(plan)
    steps = [event for event in events if isinstance(event, TrainingStep)]
    losses = {step.env_step: step.metrics["critic_loss"] for step in steps if "critic_loss" in step.metrics}
    evaluations = {step.env_step: step.metrics for step in steps if "eval_return" in step.metrics}
    assert {10, 20, 30, 40, 50} <= losses.keys()
    assert all(math.isfinite(loss) for loss in losses.values())
    assert list(evaluations) == [25, 50]
    # The random score of the dataset is -1000, its expert score 0.
    assert evaluations[50]["eval_normalized_score"] == pytest.approx(100 + evaluations[50]["eval_return"] / 10)
    assert [event.env_step for event in events if isinstance(event, CheckpointSaved)] == [25, 50]
