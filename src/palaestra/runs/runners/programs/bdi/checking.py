"""Checks plans, environment and a checkpoint before a run, and prints one JSON object: `{"problems": [...], ...}`."""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from .actions import PlanActions
from .agent import Body, LogCapture, PlanError, build_agent
from .checkpoint import BadCheckpoint, load_checkpoint
from .skills import QLearning, SkillLibrary
from .training import CannotTrain, find_plans, read_plans
from .worlds import World, find_family, load_module, make_env

_PACKAGES = ("spade", "spade-bdi", "agentspeak", "pyjabber", "gymnasium", "numpy")


def check(args: argparse.Namespace) -> dict[str, Any]:
    """Everything that would stop a run: `problems` are triples of check, text and remedy."""
    answer: dict[str, Any] = {"problems": [], "env": {}, "plans": [], "versions": _versions()}

    def refuse(name: str, text: str, remedy: str) -> dict[str, Any]:
        answer["problems"].append([name, text, remedy])
        return answer

    try:
        env = make_env(args.env, json.loads(args.env_kwargs))
        world = World(env, find_family(args.env))
    except Exception as error:  # noqa: BLE001 - any failure is the answer
        remedy = "Use FrozenLake-v1, CliffWalking-v1, Taxi-v4 or palaestra/GridWorld-v0, and check env_kwargs"
        return refuse("env", f"{args.env} cannot be used: {error}", remedy)
    answer["env"] = load_module("probe", "runs", "process", "probe.py").signature(env, args.env)
    library = SkillLibrary(world.states, world.actions, QLearning(), 0)
    body = Body(world, library, episodes=1, seed=0, threshold=1.0)
    try:
        path = find_plans(args.asl, world.family)
        actions = PlanActions(body).add_to()
        # spade-bdi adds it when the agent logs in.
        actions.add(".send", 3)(lambda agent, term, intention: iter([None]))
        agent = build_agent(read_plans(path), path, body, actions, LogCapture(), [])
        answer["plans"] = agent.labels
    except CannotTrain as error:
        return refuse("asl", error.args[0], error.args[1])
    except PlanError as error:
        return refuse("asl", str(error), "Correct the line; docs/bdi.md lists beliefs and actions")
    if args.load:
        try:
            load_checkpoint(args.load, library, args.env)
        except BadCheckpoint as error:
            return refuse("warm_start", error.args[0], error.args[1])
    return answer


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return versions


def main(argv: list[str]) -> int:
    """Print the answer as the last line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--env", required=True)
    parser.add_argument("--env-kwargs", default="{}", help="JSON")
    parser.add_argument("--asl", default="")
    parser.add_argument("--load", default="")
    answer = check(parser.parse_args(argv))
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0
