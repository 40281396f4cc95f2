"""A pretrained language model on screens: success before and after reinforcement, in trained and in other wordings.

`python -m benchmarks.ui_smollm2 --model DIRECTORY` takes the model that `palaestra tiny-vlm join` wrote through
configs/ui/smollm2.yaml. The model before and after training plays the same held-out seeds with the instructions of the
pages and with wordings that occur neither in the training on synthetic pages nor in reinforcement. The bar that shows
the instruction is hidden on all pages, so a model knows the instruction from its prompt only. `--other` measures a
further reading model, such as tiny-reader, on the same episodes without training it.

Results are written to benchmarks/results/ui_smollm2.json after each stage, and what is there is not measured again; the
table is beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from pathlib import Path

import torch

from benchmarks.machine import facts, load
from benchmarks.ui_runs import (
    format_share,
    format_table,
    list_checkpoints,
    read_training_steps,
    train_model,
    write_results,
)
from palaestra.config.file import read_config_file
from palaestra.evaluation.statistics import mcnemar
from palaestra.experience.trajectory import Outcome, Trajectory
from palaestra.policy.vlm import VLMPolicy
from palaestra.sessions.clients.provider import find_sessions
from palaestra.train.held_out import load_screen_policy, play_held_out
from palaestra.train.screen_config import ScreenRunConfig, screen_config_from

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "ui_smollm2.json"
CONFIG = ROOT / "configs" / "ui" / "smollm2.yaml"
HOME = ROOT / "var" / "ui-smollm2"
EPISODES, HELD_OUT = 60, 300_000
"""Held-out episodes per task and wording, and the first held-out seed."""
OWN = "the page's own"
WORDINGS: dict[str, dict[str, str]] = {
    "other words": {
        "miniwob/click-widget": "Could you hit any of the {1} controls here, please?",
        "miniwob/click-test-2": "There are two of them. Would you hit the one that says ONE, please?",
        "miniwob/click-collapsible": "Would you unfold the part of this page that is closed, and send it off then?",
    },
}
"""Other wordings by task; numbers stand for the quoted parts of the page's own instruction."""


def build_config(model: Path | str) -> dict:
    """The configuration of the training."""
    config = dict(read_config_file(CONFIG))
    return config | {"model": config["model"] | {"name": str(model)}}


def set_wording(config: ScreenRunConfig, wording: str) -> ScreenRunConfig:
    """The configuration with its tasks in another wording; tasks that do not have it are left out."""
    if wording == OWN:
        return config
    tasks = tuple(
        task.model_copy(update={"params": {**task.params, "instruction": WORDINGS[wording][task.task]}})
        for task in config.tasks
        if task.task in WORDINGS[wording]
    )
    return config.model_copy(update={"tasks": tasks})


def play(config: ScreenRunConfig, policy: VLMPolicy, episodes: int) -> dict[str, str]:
    """By task, a character per held-out seed in order: 1 solved, 0 not solved, - the session failed."""
    with ExitStack() as stack:
        actors = config.actor_pool.target_concurrent_actors
        address = find_sessions(config.environment, stack, actors=actors, session_type=config.actor.session_type)
        played = play_held_out(config, policy, address, episodes=episodes * len(config.tasks), first=HELD_OUT)
    outcomes: dict[str, str] = {}
    for one in sorted(played, key=lambda one: (one.task["task"], one.task["seed"])):
        outcomes[one.task["task"]] = outcomes.get(one.task["task"], "") + _character(one)
    return outcomes


def _character(trajectory: Trajectory) -> str:
    if trajectory.outcome is Outcome.ENVIRONMENT_FAILED:
        return "-"
    return "1" if trajectory.success else "0"


def load_results() -> dict:
    """The results so far."""
    if not RESULTS.exists():
        return {"machine": facts(), "wordings": WORDINGS, "held_out": HELD_OUT, "outcomes": {}}
    results = json.loads(RESULTS.read_text())
    if (results["wordings"], results["held_out"]) != (WORDINGS, HELD_OUT):
        raise SystemExit(f"{RESULTS} was measured with other wordings or seeds. Remove it to measure all again.")
    return results


def measure(results: dict, name: str, config: ScreenRunConfig, policy: VLMPolicy, episodes: int) -> None:
    """Let a model play every wording that it has not played yet."""
    outcomes = results["outcomes"].setdefault(name, {})
    for wording in (OWN, *WORDINGS):
        if wording not in outcomes:
            raise_if_unequal(results, episodes)
            outcomes[wording] = play(set_wording(config, wording), policy, episodes)
            solved = {task: one.count("1") for task, one in outcomes[wording].items()}
            print(f"{name}, {wording}: {solved} of {episodes}", flush=True)
            write_results(RESULTS, results)


def raise_if_unequal(results: dict, episodes: int) -> None:
    """Exit if the results have another number of episodes per task: pairs would be dropped without a word."""
    played = {len(one) for model in results["outcomes"].values() for tasks in model.values() for one in tasks.values()}
    if played - {episodes}:
        raise SystemExit(f"{RESULTS} has {max(played)} episodes per task. Use --episodes {max(played)}.")


def draw_table(outcomes: dict[str, dict[str, dict[str, str]]]) -> str:
    """Success by task and wording, and the exact McNemar p of the model after training against before."""
    names = list(outcomes)
    rows = [["task", "wording", *(f"{name}, %" for name in names), "p"]]
    tasks = list(outcomes[names[0]][OWN])
    for task in tasks:
        for wording in (OWN, *WORDINGS):
            if wording != OWN and task not in WORDINGS[wording]:
                continue
            played = {name: outcomes[name].get(wording, {}).get(task, "") for name in names}
            shares = [format_share((one.count("1"), len(one.replace("-", "")))) for one in played.values()]
            before, after = played.get("before", ""), played.get("after", "")
            pairs = list(zip(before, after, strict=False))
            p_value = mcnemar(pairs.count(("0", "1")), pairs.count(("1", "0"))) if after else None
            rows.append([task, wording, *shares, "" if p_value is None else f"{p_value:.2g}"])
    return format_table(rows)


def main(arguments: list[str] | None = None) -> None:
    """Train and measure what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="directory that 'palaestra tiny-vlm join' wrote")
    parser.add_argument("--other", default="", help="another reading model to play the same episodes")
    parser.add_argument("--episodes", type=int, default=EPISODES)
    parser.add_argument("--seed", type=int, default=1, help="seed of the training")
    parser.add_argument("--home", type=Path, default=HOME, help="directory of the runs")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    given.home.mkdir(parents=True, exist_ok=True)
    results = load_results()
    document = build_config(given.model.resolve())
    config = screen_config_from(document)
    if "run" not in results:
        run = train_model(document, given.seed, given.home.resolve())
        steps = read_training_steps(run)
        keys = sorted({key for step in steps for key in step if key.startswith("success_rate/")})
        results["run"] = {
            "seed": given.seed,
            "load": load(),
            "checkpoint": str(list_checkpoints(run)[-1].relative_to(given.home.resolve())),
            "curves": {key: [round(step[key], 3) if key in step else None for step in steps] for key in keys},
        }
        write_results(RESULTS, results)
    if len(results["outcomes"].get("before", {})) <= len(WORDINGS):
        measure(results, "before", config, VLMPolicy.from_config(config.model), given.episodes)
    if len(results["outcomes"].get("after", {})) <= len(WORDINGS):
        _, policy = load_screen_policy(given.home.resolve() / results["run"]["checkpoint"])
        measure(results, "after", config, policy, given.episodes)
    if given.other:
        model = config.model.model_copy(update={"name": given.other, "dtype": "float32", "max_new_tokens": 40})
        name = "tiny-reader" if given.other == "tiny-reader" else Path(given.other).name
        measure(results, name, config, VLMPolicy.from_config(model), given.episodes)
    table = draw_table(results["outcomes"])
    RESULTS.with_suffix(".md").write_text(table)
    sys.stdout.write(table)


if __name__ == "__main__":
    main()
