"""Which details decide CartPole, and why? Value clipping x truncation x gradient clipping, then interventions.

Every run is CleanRL's classic-control setting on `compiled/CartPole-v1`; its score is the mean return of the last 50
training episodes. Results go to `results/ablation.json` after every run, and a run that is stored is not repeated.
`python -m benchmarks.ablation` runs what is missing and prints the table; `results/ablation.md` says what it means.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.learning import IMAGES, RESULTS, ROOT, interval
from palaestra.env import make_env
from palaestra.experience.columns import Columns
from palaestra.learner.batch import TrainBatch
from palaestra.learner.ppo import PPO
from palaestra.policy.build import build_policy
from palaestra.policy.flat_parameters import FlatParameters
from palaestra.train import load_config
from palaestra.train.trainer import Trainer

BINS = 25
"""Points per stored diagnostic: each the mean over one twenty-fifth of the training."""
DIAGNOSTICS = (
    "episode_return", "approx_kl", "clip_fraction", "explained_variance", "actor_grad_norm", "critic_grad_norm",
    "value_loss", "value_mean", "advantage_std", "value_moved", "value_moved_std", "saturated", "slope",
    "failed_by_position", "explained_when_failing",
)  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """One row: what is set, and what is altered between collecting and learning."""

    settings: dict[str, Any] = field(default_factory=dict)
    truncation_ends: bool = False
    """Learn as if the time limit were a failure."""
    reward_factor: float = 1.0
    critic_pace: float = 1.0
    """Fraction of each update of the critic that is kept."""
    advantage_floor: float | None = None
    """Divide advantages by their spread over the rollout, but never by less than this."""
    bias_follows: bool = False
    """Shift the critic's output after each update so that its mean over the rollout is the mean target."""
    policy: dict[str, Any] = field(default_factory=dict)
    normalize_reward: bool = False


def _cells() -> dict[str, Variant]:
    cells = {}
    for clip, ends, norm in product((0.2, None), (False, True), ("separate", "global")):
        value = f"clip {clip}" if clip else "no clip"
        name = f"{value}, {'truncation ends' if ends else 'bootstrapped'}, {norm}"
        cells[name] = Variant({"value_clip": clip, "grad_clip": norm}, truncation_ends=ends)
    return cells


CELLS = _cells()
_FREE = {"value_clip": None}
INTERVENTIONS = {
    "rewards x 0.01": Variant(_FREE, reward_factor=0.01),
    "normalize_reward": Variant(_FREE, normalize_reward=True),
    "critic's bias follows the mean target": Variant(_FREE, bias_follows=True),
    "relu instead of tanh": Variant(_FREE, policy={"activation": "relu"}),
    "gae_lambda 0.99": Variant(_FREE | {"gae_lambda": 0.99}),
    "advantages divided by at least 1": Variant(_FREE | {"normalize_advantage": False}, advantage_floor=1.0),
    "critic keeps 1/4 of each update": Variant(_FREE, critic_pace=0.25),
    "no gradient clipping": Variant(_FREE | {"max_grad_norm": None}),
}
"""Each without value clipping, bootstrapped, separate: the cell that fails although two of the details are right."""
VARIANTS = CELLS | INTERVENTIONS


class AlteredPPO(PPO):
    """PPO that edits copies of its experience as a variant says."""

    variant = Variant()
    mean_target = torch.zeros(())

    def prepare(self, rollout: Columns, *given: Any) -> TrainBatch:
        v, seen = self.variant, dict(rollout)
        if v.truncation_ends:
            seen["terminated"] = seen["terminated"] | seen["truncated"]
        seen["reward"] = seen["reward"] * v.reward_factor
        batch = super().prepare(seen, *given)
        self.mean_target = batch["target"].mean()
        if v.advantage_floor is not None:
            advantage = batch["advantage"]
            batch["advantage"] = (advantage - advantage.mean()) / max(float(advantage.std()), v.advantage_floor)
        return batch


class AlteredTrainer(Trainer):
    """A trainer that changes and watches the critic as a variant says."""

    variant = Variant()

    def learn(self, rollout: Any) -> dict[str, float]:
        flat = FlatParameters.of(self.policy)
        critic = flat.vector[flat.groups["critic"]]
        before = critic.clone()
        observation = rollout["observation"].flatten(0, 1).clone()
        old = rollout["value"].reshape(-1).clone()
        failures = observation[rollout["terminated"].reshape(-1)]
        metrics = super().learn(rollout)
        if self.variant.critic_pace != 1.0:
            critic.copy_(before + self.variant.critic_pace * (critic - before))
        network: Any = self.policy.critic
        with torch.no_grad():
            hidden = network[:-1](observation)
            value = network[-1](hidden).squeeze(-1)
            if self.variant.bias_follows:
                network[-1].bias += self.algorithm.mean_target - value.mean()
        moved = value - old
        metrics |= {"value_moved": float(moved.abs().mean()), "value_moved_std": float(moved.std())}
        metrics["saturated"] = float((hidden.abs() > 0.99).float().mean())
        metrics["slope"] = float((1 - hidden.square()).mean())
        if len(failures):
            # The last observation before the fall: the cart leaves the track at 2.4.
            metrics["explained_when_failing"] = metrics["explained_variance"]
            metrics["failed_by_position"] = float((failures[:, 0].abs() > 2.3).float().mean())
        return metrics


def run_once(variant: Variant, seed: int) -> dict[str, Any]:
    """One training: its score, how often it fell back, and its diagnostics."""
    settings = [f"algorithm.{key}={'null' if v is None else v}" for key, v in variant.settings.items()]
    settings += [f"policy.{key}={v}" for key, v in variant.policy.items()]
    config = load_config(ROOT / "configs" / "ppo" / "cartpole.yaml", ["env.id=compiled/CartPole-v1", *settings])
    env = make_env(config.env)
    policy = build_policy(config.policy, env.observation_space, env.action_space, seed=seed)
    algorithm = AlteredPPO(**{key: value for key, value in config.algorithm.items() if key != "name"})
    trainer = AlteredTrainer(policy, env, algorithm, seed=seed, normalize_reward=variant.normalize_reward)
    trainer.variant = algorithm.variant = variant
    returns: list[float] = []
    history = trainer.train(
        config.total_timesteps,
        config.rollout_length,
        callback=lambda trainer, _: returns.extend(e.episode_return for e in trainer.last_episodes),
    )
    parts = np.array_split(np.arange(len(history)), BINS)
    diagnostics = {
        name: [_mean([history[i][name] for i in part if name in history[i]]) for part in parts] for name in DIAGNOSTICS
    }
    return {"score": float(np.mean(returns[-50:])), "relapses": relapses(returns), "diagnostics": diagnostics}


def relapses(returns: list[float], window: int = 20) -> int:
    """How often the mean of 20 episodes fell below 400 after having reached 475."""
    if len(returns) < window:
        return 0
    count, solved = 0, False
    for mean in np.convolve(returns, np.full(window, 1 / window), mode="valid"):
        if solved and mean < 400:
            count, solved = count + 1, False
        elif mean >= 475:
            solved = True
    return count


def _mean(numbers: list[float]) -> float | None:
    return float(f"{np.mean(numbers):.4g}") if numbers else None


def markdown(found: dict[str, Any]) -> str:
    """A row per variant: scores; KL and critic's gradient norm in the first fifth of training; explained variance of
    updates that saw a failure (20k to 160k steps); slope of the critic's last tanh layer (20k to 60k steps); share of
    the failures of the second half that were the cart leaving the track.
    """
    lines = [
        "| variant | runs | last 50 episodes | at 500 | worst | relapses | KL x 1000 | critic gradient | "
        "explained variance | critic's slope | fell off the track |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, variant in VARIANTS.items():
        runs = list(found.get(name, {}).values())
        if not runs:
            continue
        scores = [run["score"] for run in runs]
        mean, half = interval(scores)
        slope = "–" if "activation" in variant.policy else f"{_typical(runs, 'slope', slice(1, 3)):.1g}"
        early = slice(0, BINS // 5)
        left = _typical(runs, "failed_by_position", slice(BINS // 2, None))
        lines.append(
            f"| {name} | {len(runs)} | {mean:.0f} ± {half:.0f} | {sum(s >= 499.5 for s in scores)} | {min(scores):.0f} "
            f"| {np.mean([run['relapses'] for run in runs]):.1f} | {1000 * _typical(runs, 'approx_kl', early):.2f} "
            f"| {_typical(runs, 'critic_grad_norm', early):.2g} "
            f"| {_typical(runs, 'explained_when_failing', slice(1, 8)):.2f} | {slope} "
            f"| {'no failure' if np.isnan(left) else f'{left:.2f}'} |"
        )
    return "\n".join(lines) + "\n"


def _typical(runs: list[dict[str, Any]], key: str, part: slice) -> float:
    """Median over runs of the mean over a part of the training."""
    parts = [[x for x in run["diagnostics"][key][part] if x is not None] for run in runs]
    return float(np.median([np.mean(numbers) for numbers in parts if numbers] or [np.nan]))


def picture(found: dict[str, Any]) -> None:
    """Every score, and beside them how the critic of three variants goes blind, or does not."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(11, 5.2), dpi=130, layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1.25, 1))
    axes = left.subplots()
    names = [name for name in VARIANTS if found.get(name)]
    for place, name in enumerate(names):
        scores = np.array([run["score"] for run in found[name].values()])
        colour = "#b5532b" if name in INTERVENTIONS else "#3467a8"
        axes.plot(scores, np.full(len(scores), place), "o", color=colour, alpha=0.45, markersize=5)
        axes.plot(scores.mean(), place, "|", color="black", markersize=14, markeredgewidth=2)
    axes.set(yticks=range(len(names)), yticklabels=names, xlabel="mean return of the last 50 training episodes")
    axes.set_title("every run, and the mean (|)\nbelow: no clip, bootstrapped, separate, and one change", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.invert_yaxis()
    shown = {"clip 0.2, bootstrapped, separate": "#3467a8", "no clip, bootstrapped, separate": "#222222",
             "rewards x 0.01": "#b5532b"}  # fmt: skip
    panels = {"episode_return": "return (mean)", "slope": "slope of the critic's last tanh layer (median)"}
    for below, (key, label) in zip(right.subplots(len(panels), 1, sharex=True), panels.items(), strict=True):
        for name, colour in shown.items():
            curves = [run["diagnostics"][key] for run in found.get(name, {}).values()]
            for curve in curves:
                below.plot(_steps(), curve, color=colour, alpha=0.2, linewidth=0.8)
            middle = np.median if key == "slope" else np.mean
            below.plot(_steps(), middle(curves, axis=0), color=colour, linewidth=2, label=name)
        below.set_ylabel(label, fontsize=8)
        below.tick_params(labelsize=8)
        below.spines[["top", "right"]].set_visible(False)
        below.grid(alpha=0.25)
    below.set_yscale("log")
    below.set_xlabel("thousand environment steps", fontsize=8)
    below.legend(frameon=False, fontsize=8, loc="upper right", bbox_to_anchor=(1.0, 0.93))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    figure.savefig(IMAGES / "cartpole_ablation.png")
    pyplot.close(figure)


def _steps() -> Any:
    return (np.arange(BINS) + 0.5) * 500 / BINS


def main() -> None:
    """Run what is missing, seed by seed, so that stopping early leaves rows of equal length."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ablation", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", action="append", choices=VARIANTS, help="this variant (may be repeated)")
    parser.add_argument("--seeds", type=int, default=10, help="runs per variant (10)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where to write")
    parser.add_argument("--render", action="store_true", help="only print the table and draw the picture again")
    arguments = parser.parse_args()
    stored = arguments.results / "ablation.json"
    found: dict[str, Any] = json.loads(stored.read_text()) if stored.exists() else {}
    for seed, name in [] if arguments.render else product(range(arguments.seeds), arguments.only or VARIANTS):
        if str(seed) in found.setdefault(name, {}):
            continue
        run = run_once(VARIANTS[name], seed)
        found[name][str(seed)] = run
        stored.write_text(json.dumps(found) + "\n")
        print(f"seed {seed}, {name}: {run['score']:.1f}, {run['relapses']} relapses", flush=True)
    if arguments.results == RESULTS:
        picture(found)
    print(markdown(found))


if __name__ == "__main__":
    main()
