"""Acts in a play with a checkpoint of a CORL script. A program.

Runs by path in an interpreter that has the packages of the script; `policy_program.py` beside it reads and writes the
messages. Python 3.8+. The network comes from the script of the run, which is executed only if its hash is the given
one; weights are read without unpickling. A checkpoint does not say how observations were normalised, so that the run
wrote it down beside them (`--observations`). Actions are scaled back from -1 … 1 to the range of the environment.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import json
import os
import sys
from typing import Any


def load_program(name: str) -> Any:
    """The module in a file beside this one, without importing the packages around it."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{name}.py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


protocol = load_program("policy_program")


class CorlPolicy:
    """The actor of a CORL script."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._torch = importlib.import_module("torch")
        self._numpy = importlib.import_module("numpy")
        saved = protocol.load_weights(self._torch, args.checkpoint)
        weights = saved.get("actor") if isinstance(saved, dict) else None
        if not isinstance(weights, dict):
            raise protocol.CannotAct("it holds no weights of an actor", "Use a file that a script of CORL saved")
        settings = json.loads(os.environ["PALAESTRA_OFFLINE"])
        gymnasium = importlib.import_module("gymnasium")
        limit = settings.get("max_episode_steps")
        env = gymnasium.make(args.env, max_episode_steps=limit, **settings.get("env_kwargs", {}))
        self._spaces = protocol.describe_spaces(env)
        self._action_space = env.action_space
        env.close()
        self._range = settings.get("action_range")
        self._scale, self._offset = self._read_normalization(args.observations)
        module = protocol.import_script(args.script, [args.script], args.script_sha256)
        values = {"max_action": 1.0, **json.loads(args.values), "state_dim": env.observation_space.shape[0]}
        values["action_dim"] = values["act_dim"] = self._action_space.shape[0]
        self._actor = self._build(module, weights, values)
        # The actors of CORL sample in training and take the likeliest action in evaluations.
        self._actor.train(args.sample)

    def describe(self) -> dict[str, Any]:
        """The spaces of its environment."""
        return {**self._spaces, "notes": []}

    def begin(self, seed: int) -> None:
        """Seed the sampling of actions."""
        self._torch.manual_seed(seed)

    def act(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """The action for an observation, as the script's own evaluation computes it."""
        observation = self._numpy.asarray(arrays.get("", arrays), self._numpy.float64)
        state = (observation * self._scale + self._offset).astype(self._numpy.float32)
        with self._torch.no_grad():
            action = self._numpy.asarray(self._actor.act(state, "cpu"), self._numpy.float64).reshape(-1)
        if self._range is not None:
            low, high = (self._numpy.asarray(bound) for bound in self._range)
            action = low + (self._numpy.clip(action, -1.0, 1.0) + 1.0) * 0.5 * (high - low)
        return {"action": action.reshape(self._action_space.shape).tolist(), "outputs": {}}

    def _read_normalization(self, path: str) -> tuple[Any, Any]:
        """Scale and offset of the observations."""
        try:
            with open(path, encoding="utf-8") as file:
                data = json.load(file)
            return self._numpy.asarray(data["scale"]), self._numpy.asarray(data["offset"])
        except (OSError, ValueError, KeyError) as error:
            text = f"the normalisation of its observations cannot be read from {path} ({error})"
            raise protocol.CannotAct(text, "Use a checkpoint in the directory of its run") from None

    def _build(self, module: Any, weights: dict[str, Any], values: dict[str, Any]) -> Any:
        """The network of the script that can act and has these weights."""
        for network_class in vars(module).values():
            is_network = inspect.isclass(network_class) and self._torch.nn.Module in inspect.getmro(network_class)
            if not is_network or not hasattr(network_class, "act") or network_class.__module__ != module.__name__:
                continue
            parameters = list(inspect.signature(network_class).parameters.values())
            known = {p.name: _find_value(p.name, values) for p in parameters if _find_value(p.name, values) is not None}
            if any(p.default is p.empty and p.name not in known for p in parameters):
                continue
            network = network_class(**known)
            if set(network.state_dict()) == set(weights):
                protocol.load_strictly(network, weights)
                return network
        text = f"no network of {os.path.basename(module.__file__)} that can act has its weights"
        raise protocol.CannotAct(text, "Use the script that saved it")


def _find_value(name: str, values: dict[str, Any]) -> Any:
    """The value of an argument of a network; some fields of the scripts have a prefix: `actor_dropout` is `dropout`."""
    return values.get(name, values.get(f"actor_{name}", values.get(f"policy_{name}")))


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--sha256", required=True, help="of the checkpoint")
    parser.add_argument("--env", required=True, help="the environment whose spaces the networks have")
    parser.add_argument("--script", required=True)
    parser.add_argument("--script-sha256", required=True)
    parser.add_argument("--values", default="{}", help="JSON: the configuration of the run")
    parser.add_argument("--observations", required=True, help="JSON file with scale and offset of observations")
    parser.add_argument("--sample", action="store_true", help="sample actions instead of taking the likeliest")
    return parser.parse_args(argv)


if __name__ == "__main__":
    # Libraries print to standard output; only messages may reach the play.
    with os.fdopen(os.dup(1), "wb") as messages:
        os.dup2(2, 1)
        sys.exit(protocol.serve(parse_args(sys.argv[1:]), CorlPolicy, sys.stdin.buffer, messages))
