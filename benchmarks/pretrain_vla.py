"""Clones a trembling expert into `SmallVLA`: the modest checkpoints that reinforcement learning starts from.

`python -m benchmarks.pretrain_vla` writes `configs/vla/small_vla_reach.safetensors` (about a minute on one core), and
with `--chunk 4` the one that acts in chunks of four. Few demonstrations and few steps are the point: a policy that
finds the right block in some scenes and not in others is what pretrained models are in practice, and what leaves
something to improve. Everything follows from `--seed`; the file's metadata say how it was made and how well it does.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

import palaestra.env  # noqa: F401  registers the tables
from palaestra.env.table import expert_action
from palaestra.policy.vla.models import SmallVLA

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "configs" / "vla"
EVAL_SEED = 1_000_003


@dataclass(frozen=True)
class Recipe:
    """How one checkpoint is made."""

    env: str = "palaestra/TableReach-v0"
    chunk: int = 1
    demonstrations: int = 120
    """Episodes of the expert."""
    noise: float = 0.5
    """Standard deviation of its tremor; what is executed is what is imitated."""
    steps: int = 400
    batch_size: int = 128
    learning_rate: float = 1e-3
    log_std_init: float = -1.0
    """Stored with the weights: how far reinforcement learning explores at first."""
    seed: int = 1


def demonstrations(recipe: Recipe) -> dict[str, Tensor]:
    """Observations, the `chunk` actions that followed each, and how many of those were in the episode."""
    env, rng = gymnasium.make(recipe.env), np.random.default_rng(recipe.seed)
    rows: dict[str, list[Any]] = {"rgb": [], "proprio": [], "language": [], "action": [], "executed": []}
    for episode in range(recipe.demonstrations):
        seen, _ = env.reset(seed=recipe.seed if episode == 0 else None)
        actions: list[np.ndarray] = []
        over = False
        while not over:
            for key in ("rgb", "proprio", "language"):
                rows[key].append(seen[key])
            actions.append(expert_action(env, noise=recipe.noise, rng=rng))
            seen, _, terminated, truncated, _ = env.step(actions[-1])
            over = terminated or truncated
        padded = np.concatenate((np.array(actions), np.zeros((recipe.chunk, 2), np.float32)))
        for t in range(len(actions)):
            rows["action"].append(padded[t : t + recipe.chunk])
            rows["executed"].append(np.arange(t, t + recipe.chunk) < len(actions))
    return {key: torch.from_numpy(np.array(values)) for key, values in rows.items()}


def clone(recipe: Recipe) -> tuple[SmallVLA, float]:
    """A model trained to repeat the demonstrations, and its mean squared error at the end."""
    data = demonstrations(recipe)
    torch.manual_seed(recipe.seed)
    model = SmallVLA(chunk=recipe.chunk, log_std_init=recipe.log_std_init)
    optimizer = torch.optim.Adam(model.parameters(), recipe.learning_rate)
    order = torch.Generator().manual_seed(recipe.seed)
    errors: list[float] = []
    for _ in range(recipe.steps):
        chosen = torch.randint(len(data["action"]), (recipe.batch_size,), generator=order)
        batch = {key: part[chosen] for key, part in data.items()}
        mean = model(batch, deterministic=True).view(batch["action"].shape)
        error = (mean - batch["action"]).square().mean(-1)
        loss = (error * batch["executed"]).sum() / batch["executed"].sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        errors.append(float(loss.detach()))
    return model.eval(), float(np.mean(errors[-50:]))


@torch.inference_mode()
def success_rate(
    model: SmallVLA,
    env_id: str,
    *,
    chunk: int = 1,
    episodes: int = 400,
    deterministic: bool = True,
    seed: int = EVAL_SEED,
) -> float:
    """Share of episodes that the model solves; whole chunks are executed before it looks again."""
    envs = [gymnasium.make(env_id) for _ in range(min(episodes, 50))]
    generator = torch.Generator().manual_seed(seed)
    solved = played = 0
    while played < episodes:
        seen = [env.reset(seed=seed + played + i)[0] for i, env in enumerate(envs)]
        running = set(range(len(envs)))
        while running:
            alive = sorted(running)
            batch = {key: torch.from_numpy(np.stack([seen[i][key] for i in alive])) for key in seen[0]}
            actions = model(batch, deterministic=deterministic, generator=generator).reshape(len(alive), chunk, -1)
            for i, several in zip(alive, actions.clamp(-1, 1).numpy(), strict=True):
                for action in several:
                    seen[i], _, terminated, truncated, info = envs[i].step(action)
                    if terminated or truncated:
                        running.discard(i)
                        solved += info["is_success"]
                        break
        played += len(envs)
    return solved / played


def write(model: SmallVLA, recipe: Recipe, found: dict[str, float], path: Path) -> None:
    """The weights, with how they were made as metadata."""
    facts = {
        "made_by": "benchmarks/pretrain_vla.py",
        "class": "palaestra.policy.vla.models:SmallVLA",
        "recipe": asdict(recipe),
        "measured": found,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    # One entry: safetensors writes several in any order, and the same recipe should give the same bytes.
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, path, metadata={"palaestra": json.dumps(facts)})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pretrain_vla", description=__doc__.split("\n", 1)[0])
    defaults = Recipe()
    for name, value in asdict(defaults).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--out", type=Path, help="file to write (in configs/vla, named after the task)")
    given = vars(parser.parse_args())
    out = given.pop("out")
    recipe = Recipe(**given)
    torch.set_num_threads(1)
    began = time.perf_counter()
    model, error = clone(recipe)
    trained = time.perf_counter() - began
    found = {
        "mean_squared_error": round(error, 4),
        "episodes": 400,
        "success_greedy": success_rate(model, recipe.env, chunk=recipe.chunk),
        "success_sampled": success_rate(model, recipe.env, chunk=recipe.chunk, deterministic=False),
    }
    task = "reach" if "Reach" in recipe.env else "push"
    chunked = f"_chunk{recipe.chunk}" if recipe.chunk > 1 else ""
    path = out or FOLDER / f"small_vla_{task}{chunked}.safetensors"
    write(model, recipe, found, path)
    print(f"{path}: {path.stat().st_size / 1e3:.0f} kB, {trained:.0f} s, {json.dumps(found)}")


if __name__ == "__main__":
    main()
