"""The small vision-language-action model: its numbers by hand, its parts by name, and the checkpoints beside it."""

import json
import math
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from safetensors import safe_open

from palaestra.env.table import TableReach
from palaestra.errors import ConfigError
from palaestra.policy.build import build_policy
from palaestra.policy.config import PolicyConfig
from palaestra.policy.vla.conformance import check_vla_model, random_observations
from palaestra.policy.vla.models import SmallVLA
from palaestra.train import load_config

ROOT = Path(__file__).parents[2]
SPACE = TableReach().observation_space
LOG_2PI = math.log(2 * math.pi)


def _model(**settings):
    torch.manual_seed(3)
    return SmallVLA(**settings).eval()


def _observations(size=5):
    return random_observations(SPACE, size)


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("depth", [False, True])
def test_it_keeps_the_rules_of_a_trainable_model(chunk, depth):
    space = TableReach(depth=depth).observation_space
    check_vla_model(_model(chunk=chunk, depth=depth), space, 2, chunk=chunk)


def test_the_log_density_is_that_of_a_normal_distribution():
    model, seen = _model(log_std_init=math.log(0.5)), _observations()
    mean = model(seen, deterministic=True)
    # One and two standard deviations beside the mean: -z²/2 is -1/2 and -2, and each number adds -log 0.5 - log(2π)/2.
    action = mean + torch.tensor([0.5, 1.0])
    log_prob, entropy = model.evaluate_actions(seen, action)
    assert log_prob.tolist() == pytest.approx([-0.5 - 2.0 + 2 * math.log(2) - LOG_2PI] * 5, abs=1e-5)
    assert entropy.tolist() == pytest.approx([1.0 + LOG_2PI - 2 * math.log(2)] * 5, abs=1e-5)


def test_each_action_of_a_chunk_has_a_log_density_of_its_own():
    model, seen = _model(chunk=4), _observations()
    action = model(seen, deterministic=True)
    at_the_mean, entropy = model.evaluate_actions(seen, action)
    assert action.shape == (5, 4, 2)
    assert at_the_mean.shape == entropy.shape == (5, 4)
    moved = action.clone()
    moved[:, 2] += model.gaussian.log_std.exp()
    change = model.evaluate_actions(seen, moved)[0] - at_the_mean
    assert change.tolist() == pytest.approx(np.tile([0.0, 0.0, -1.0, 0.0], (5, 1)), abs=1e-5)
    whole = torch.distributions.Normal(action, model.gaussian.log_std.exp().expand_as(action)).log_prob(moved)
    assert model.evaluate_actions(seen, moved)[0].sum(-1).tolist() == pytest.approx(
        whole.sum((1, 2)).tolist(), abs=1e-4
    )


def test_drawing_follows_the_generator_and_the_mean_does_not():
    model, seen = _model(), _observations()
    one, two = (model(seen, generator=torch.Generator().manual_seed(7)) for _ in range(2))
    other = model(seen, generator=torch.Generator().manual_seed(8))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert torch.equal(model(seen, deterministic=True), model(seen, deterministic=True))
    draws = torch.stack([model(seen, generator=torch.Generator().manual_seed(i)) for i in range(400)])
    assert (draws - model(seen, deterministic=True)).std(0).mean().item() == pytest.approx(math.exp(-1.0), rel=0.05)


def test_one_pass_gives_what_three_give():
    model, seen = _model(), _observations()
    action, log_prob, value = model.act(seen, generator=torch.Generator().manual_seed(1))
    assert torch.equal(action, model(seen, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(log_prob, model.evaluate_actions(seen, action)[0])
    assert torch.equal(value, model.get_value(seen))
    assert value.shape == (5, 1)
    assert torch.equal(model.evaluate(seen, action)[2], value)


def test_other_words_move_the_action_in_the_same_picture():
    model, seen = _model(), _observations(1)
    words = torch.tensor([[1, 3, 7, 4, 0, 0, 0, 0]])
    others = torch.tensor([[1, 3, 9, 4, 0, 0, 0, 0]])
    red, blue = (model({**seen, "language": w}, deterministic=True) for w in (words, others))
    assert not torch.allclose(red, blue, atol=1e-5)
    longer = torch.tensor([[1, 3, 7, 4, 0, 0, 0, 0, 0, 0]])
    assert torch.allclose(red, model({**seen, "language": longer}, deterministic=True))


def test_parts_have_the_usual_names_and_vision_can_be_frozen():
    model = _model(freeze_vision_encoder=True)
    parts = {name.split(".")[0] for name, _ in model.named_parameters()}
    assert {"vision_encoder", "language_encoder", "action_head", "value_head"} <= parts
    assert not any(p.requires_grad for p in model.vision_encoder.parameters())
    assert all(p.requires_grad for p in model.action_head.parameters())
    assert 100_000 < sum(p.numel() for p in model.parameters()) < 300_000
    with pytest.raises(ConfigError, match="multiple of 4"):
        SmallVLA(image_size=50)


# ---------------------------------------------------------------- what comes along


def _share_solved(policy, chunk, episodes):
    env, solved = gymnasium.make("palaestra/TableReach-v0"), 0
    for seed in range(episodes):
        seen, _ = env.reset(seed=seed)
        over = False
        while not over:
            batch = {key: torch.from_numpy(part).unsqueeze(0) for key, part in seen.items()}
            with torch.inference_mode():
                actions = policy.act(batch, None).action.reshape(chunk, 2)
            for action in actions.clamp(-1, 1).numpy():
                seen, _, ended, cut, info = env.step(action)
                over = ended or cut
                if over:
                    break
        solved += info["is_success"]
    return solved / episodes


@pytest.mark.parametrize(("name", "chunk"), [("small_vla_reach", 1), ("small_vla_reach_chunk4", 4)])
def test_the_checkpoints_leave_something_to_learn(name, chunk):
    path = ROOT / "configs" / "vla" / f"{name}.safetensors"
    with safe_open(path, framework="pt") as file:
        facts = json.loads(file.metadata()["palaestra"])
    assert path.stat().st_size < 1_000_000
    assert facts["recipe"]["chunk"] == chunk
    assert 0.3 <= facts["measured"]["success_greedy"] <= 0.6
    settings = {"model_class": facts["class"], "model_path": str(path)}
    actions = gymnasium.spaces.Box(-1, 1, (2,) if chunk == 1 else (chunk, 2), np.float32)
    policy = build_policy(PolicyConfig(name="vla", action_dim=2, vla_config=settings), SPACE, actions)
    assert _share_solved(policy, chunk, 60) == pytest.approx(facts["measured"]["success_greedy"], abs=0.2)


def test_the_configuration_for_it_is_valid():
    config = load_config(ROOT / "configs" / "vla" / "table_reach.yaml")
    assert config.env.id == "palaestra/TableReach-v0"
    assert config.policy.vla_config.settings["image_size"] == 48
    assert (ROOT / config.policy.vla_config.model_path).is_file()
