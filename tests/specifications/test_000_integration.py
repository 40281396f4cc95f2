"""Specification 000, "Integration Summary": its usage example and its batches, with our import lines."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tests.experience.episodes import episode, turn

from palaestra import collate_trajectories

pytestmark = pytest.mark.timeout(120)


def test_usage_example(ui_env_url, tmp_path, monkeypatch):
    from palaestra.specifications import RejectionSampling, VLMWrapper, train_with_orchestration

    YourVLMModel = partial(VLMWrapper, "tiny", history=0)
    monkeypatch.chdir(tmp_path)

    # Define your VLM model
    model = YourVLMModel()

    # Configure algorithm
    algorithm = RejectionSampling(reward_threshold=0.0)

    # Run training; a thousand updates of 32 episodes would take hours
    train_with_orchestration(
        model=model,
        ui_env_url=ui_env_url,
        task_prompt="Click the login button",
        algorithm=algorithm,
        num_training_steps=1,
        batch_size=2,
        checkpoint_every=100,
        checkpoint_dir=Path("checkpoints"),
        data_dir=Path("trajectories"),
    )
    assert list(Path("checkpoints").rglob("update_00000001/manifest.json"))
    assert list(Path("trajectories").iterdir())
    assert model.policy.config.name == "tiny"


def test_collate_trajectories():
    two = episode(turn(tokens=(5, 6), reward=0.5), turn(tokens=(7,), reward=-0.25, unreadable="no action"))
    one = episode(turn(tokens=(8, 9, 3), reward=1.0, prompt_ids=[4, 4]))
    batch = collate_trajectories([two, one])
    assert batch["images"].shape == (3, 120, 160, 3)
    assert batch["images"][0, 30, 40].tolist() == [40, 110, 200]
    assert batch["actions"] == [{"kind": "click", "at": [60, 35]}, None, {"kind": "click", "at": [60, 35]}]
    assert batch["rewards"].tolist() == [0.5, -0.25, 1.0]
    assert batch["prompts"] == ["Click the blue box."] * 3
    assert batch["generated_texts"] == ["click"] * 3
    assert batch["trajectory_lengths"].tolist() == [2, 1]
    assert batch["trajectory_indices"].tolist() == [0, 0, 1]
    assert batch["token_ids"].tolist() == [[5, 6, 0], [7, 0, 0], [8, 9, 3]]
    assert batch["token_mask"].sum(1).tolist() == [2, 1, 3]
    assert np.array_equal(batch["log_probs"], -0.5 * batch["token_mask"])
    assert batch["prompt_ids"].tolist() == [[1, 2, 2, 2, 3], [1, 2, 2, 2, 3], [0, 0, 0, 4, 4]]
    assert batch["prompt_mask"][2].tolist() == [False, False, False, True, True]
    assert two.total_reward() == 0.25
