"""Acts in a play with a checkpoint of Stable-Baselines3 or CleanRL. A program.

Runs by path in an interpreter that has the trainer's packages. Of ours it loads only `checkpoints/sb3_zip.py`, by path
as well. Python 3.8+. It reads messages from standard input and writes messages to standard output, as
`train/play/policies.py` describes.

Weights are read without unpickling. The network of an SB3 zip is rebuilt from the plain JSON in it; only with
`--unpickle` the library loads the whole file. The network of a CleanRL file comes from the script of its run, which is
executed only if its hash is the given one.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import io
import json
import math
import os
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

LENGTHS = struct.Struct("<II")
MAX_PROBABILITIES = 64
MAX_BOUNDS = 64


class CannotAct(Exception):
    """Why a checkpoint cannot act; the second argument is the remedy."""


# ---------------------------------------------------------------------- Stable-Baselines3


class Sb3Policy:
    """A policy of Stable-Baselines3."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._torch = importlib.import_module("torch")
        gymnasium = importlib.import_module("gymnasium")
        base = importlib.import_module("stable_baselines3.common.base_class").BaseAlgorithm
        try:
            self._zip = load_zip_reader().Sb3Zip(args.checkpoint)
        except ValueError as error:
            raise CannotAct(str(error), "Use another checkpoint") from None
        env = gymnasium.make(args.env, **json.loads(args.env_kwargs))
        self._spaces = describe_spaces(env)
        # Also moves the channels of images to the front, as in training.
        self._env = base._wrap_env(env, 0, False)
        self._policy = self._unpickle(args) if args.unpickle else self._build(args.checkpoint)
        self._policy.set_training_mode(False)
        self._normalizer: Any = None
        self._notes = self._load_statistics(args)
        self._deterministic = not args.sample
        self._epsilon = 0.0 if self._deterministic else self._zip.exploration_rate

    def describe(self) -> dict[str, Any]:
        """The spaces of its environment, and what differs from training."""
        return {**self._spaces, "notes": self._notes}

    def begin(self, seed: int) -> None:
        """Seed the sampling of actions."""
        self._torch.manual_seed(seed)
        self._env.action_space.seed(seed)
        if getattr(self._policy, "use_sde", False):
            self._policy.reset_noise()

    def act(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """The action for an observation, as the library's `predict` computes it."""
        observation = arrays.get("", arrays)
        if self._normalizer is not None:
            observation = self._normalizer.normalize_obs(observation)
        if self._epsilon and float(self._torch.rand(())) < self._epsilon:
            action = self._env.action_space.sample()
        else:
            action, _ = self._policy.predict(observation, deterministic=self._deterministic)
        with self._torch.no_grad():
            outputs = self._find_outputs(self._policy.obs_to_tensor(observation)[0], action)
        return {"action": action.tolist(), "outputs": outputs}

    def _build(self, path: str) -> Any:
        """The network that the JSON describes, with the weights of the zip."""
        if self._zip.serialized:
            text = "it needs what only unpickling gives: " + "; ".join(self._zip.serialized)
            raise CannotAct(text, "Agree to load the whole file")
        kwargs = dict(self._zip.kwargs)
        layers = importlib.import_module("stable_baselines3.common.torch_layers")
        for name, module in (("activation_fn", self._torch.nn), ("features_extractor_class", layers)):
            if name in kwargs:
                kwargs[name] = getattr(module, kwargs[name])
        policy_class = getattr(importlib.import_module(self._zip.module), self._zip.class_name)
        if self._zip.uses_sde and "use_sde" in inspect.signature(policy_class).parameters:
            kwargs["use_sde"] = True
        policy = policy_class(self._env.observation_space, self._env.action_space, lambda _: 0.0, **kwargs)
        with zipfile.ZipFile(path) as archive:
            weights = load_weights(self._torch, io.BytesIO(archive.read("policy.pth")))
        load_strictly(policy, weights)
        return policy

    def _unpickle(self, args: argparse.Namespace) -> Any:
        module, _, name = args.unpickle.partition(":")
        return getattr(importlib.import_module(module), name).load(args.checkpoint, device="cpu").policy

    def _load_statistics(self, args: argparse.Namespace) -> list[str]:
        """Load the statistics of VecNormalize, if the user agreed to it; returns notes."""
        if args.statistics:
            check_hash([args.statistics], args.statistics_sha256)
            self._normalizer = importlib.import_module("stable_baselines3.common.vec_env").VecNormalize.load(
                args.statistics, self._env
            )
            self._normalizer.training = False
        if self._normalizer is not None or not self._zip.is_normalized:
            return []
        return ["It was trained on observations that VecNormalize normalised. Here they are not normalised."]

    def _find_outputs(self, tensor: Any, action: Any) -> dict[str, Any]:
        """What the networks say of an observation."""
        policy = self._policy
        if hasattr(policy, "predict_values"):
            outputs = {"value": float(policy.predict_values(tensor))}
            distribution = getattr(policy.get_distribution(tensor), "distribution", None)
            return {**outputs, **list_probabilities(self._torch, distribution)}
        if hasattr(policy, "q_net"):
            return {"q_values": policy.q_net(tensor)[0].tolist()}
        if hasattr(policy, "quantile_net"):
            return {"q_values": policy.quantile_net(tensor).mean(dim=1)[0].tolist()}
        if hasattr(policy, "critic"):
            scaled = self._torch.as_tensor(policy.scale_action(action)).reshape(1, -1)
            estimates = policy.critic(tensor, scaled)
            # Several critics estimate the same value; TQC has a tensor of their quantiles.
            is_tuple = isinstance(estimates, tuple)
            return {"value": float(self._torch.cat(estimates).min() if is_tuple else estimates.mean())}
        return {}


# ---------------------------------------------------------------------- CleanRL

NETWORKS = ("Agent", "Actor", "QNetwork")
NEUTRAL_WRAPPERS = frozenset(
    "OrderEnforcing PassiveEnvChecker TimeLimit Autoreset AutoResetWrapper RecordEpisodeStatistics RecordVideo "
    "NormalizeReward TransformReward ClipReward ClipAction".split()
)
"""Wrappers of scripts that do not change observations. A play clips actions itself."""
OBSERVATION_WRAPPERS = frozenset(("FlattenObservation", "NormalizeObservation", "TransformObservation"))


class CleanrlPolicy:
    """A network of a CleanRL script."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._torch = importlib.import_module("torch")
        self._gymnasium = importlib.import_module("gymnasium")
        self._deterministic = not args.sample
        saved = load_weights(self._torch, args.checkpoint)
        self._values = json.loads(args.values)
        if isinstance(saved, dict) and set(saved) == {"model_weights", "args"}:
            self._values.update(saved["args"])
            saved = saved["model_weights"]
        weights = saved[0] if isinstance(saved, (tuple, list)) and saved else saved
        if not isinstance(weights, dict):
            raise CannotAct("it holds no weights that are known here", "Use a file that CleanRL saved")
        module = import_script(args.script, [args.script, *args.imported], args.script_sha256)
        self._envs = self._make_envs(module, args.env, weights)
        self._wrappers = self._list_observation_wrappers()
        self._network = self._build(module, weights)
        self._network.eval()

    def describe(self) -> dict[str, Any]:
        """The spaces of its environment, and what differs from training."""
        notes = []
        if "NormalizeObservation" in {type(wrapper).__name__ for wrapper in self._wrappers}:
            notes.append(
                "The script normalises observations and does not save the statistics. They are estimated anew while it "
                "plays, so that its first steps are worse."
            )
        return {**describe_spaces(self._envs.envs[0].unwrapped), "notes": notes}

    def begin(self, seed: int) -> None:
        """Seed the sampling of actions."""
        self._torch.manual_seed(seed)
        self._envs.single_action_space.seed(seed)

    def act(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """The action for an observation, as the script's own evaluation computes it."""
        observation = arrays.get("", arrays)
        for wrapper in self._wrappers:
            observation = transform_observation(wrapper, observation)
        with self._torch.no_grad():
            action, outputs = self._act(self._torch.Tensor(observation).unsqueeze(0))
        space = self._envs.single_action_space
        return {"action": action.reshape((-1, *space.shape))[0].tolist(), "outputs": outputs}

    def _act(self, x: Any) -> Any:
        network, torch = self._network, self._torch
        if hasattr(network, "actor_mean"):
            action = network.actor_mean(x) if self._deterministic else network.get_action_and_value(x)[0]
            return action, {"value": float(network.get_value(x))}
        if hasattr(network, "actor"):
            distribution = torch.distributions.Categorical(logits=network.actor(x))
            action = distribution.probs.argmax(-1) if self._deterministic else distribution.sample()
            return action, {"value": float(network.get_value(x)), **list_probabilities(torch, distribution)}
        if type(network).__name__ == "QNetwork":
            return self._act_greedily(x)
        if hasattr(network, "get_action"):
            return network.get_action(x)[2 if self._deterministic else 0], {}
        action = network(x)
        if not self._deterministic:
            action = action + torch.normal(0, network.action_scale * float(self._values.get("exploration_noise", 0.1)))
        return action, {}

    def _act_greedily(self, x: Any) -> Any:
        network, torch = self._network, self._torch
        if hasattr(network, "atoms"):
            masses = torch.softmax(network.network(x).view(1, -1, network.n_atoms), dim=2)
            q_values = (masses * network.atoms).sum(2)
        else:
            q_values = network(x)
        action = q_values.argmax(-1)
        if not self._deterministic and float(torch.rand(())) < float(self._values.get("end_e", 0.05)):
            action = torch.as_tensor([self._envs.single_action_space.sample()])
        return action, {"q_values": q_values[0].tolist()}

    def _make_envs(self, module: Any, env_id: str, weights: dict[str, Any]) -> Any:
        """The vector environment of the script, from which its networks take their shapes."""
        known = {"env_id": env_id, "seed": 0, "idx": 0, "capture_video": False, "run_name": "play", "gamma": 0.99}
        make_env = getattr(module, "make_env", None)
        if make_env is None:
            thunk = lambda: self._gymnasium.make(env_id)  # noqa: E731
        else:
            parameters = inspect.signature(make_env).parameters.values()
            unknown = [p.name for p in parameters if p.name not in known and p.default is p.empty]
            if unknown:
                raise CannotAct(f"make_env of its script takes {unknown[0]}", "Use a script of CleanRL")
            thunk = make_env(**{p.name: known[p.name] for p in parameters if p.name in known})
        # DDPG stores the scale of the actions of all environments of its training.
        shape: Any = getattr(weights.get("action_scale"), "shape", ())
        count = shape[0] if len(shape) == 2 else 1
        return self._gymnasium.vector.SyncVectorEnv([thunk] * count)

    def _list_observation_wrappers(self) -> list[Any]:
        """The wrappers of the script that change observations, innermost first."""
        wrappers: list[Any] = []
        env = self._envs.envs[0]
        while isinstance(env, self._gymnasium.Wrapper):
            name = type(env).__name__
            if name in OBSERVATION_WRAPPERS:
                wrappers.insert(0, env)
            elif name not in NEUTRAL_WRAPPERS:
                text = f"its script plays in the wrapper {name}, which a play does not have"
                raise CannotAct(text, "Use a script without it")
            env = env.env
        return wrappers

    def _build(self, module: Any, weights: dict[str, Any]) -> Any:
        """The network of the script that has these weights."""
        for name in NETWORKS:
            network_class: Any = getattr(module, name, None)
            if network_class is None or self._torch.nn.Module not in inspect.getmro(network_class):
                continue
            parameters = list(inspect.signature(network_class).parameters)[1:]
            network = network_class(self._envs, **{p: self._values[p] for p in parameters if p in self._values})
            if set(network.state_dict()) == set(weights):
                if hasattr(network, "network") and name == "Agent":
                    text = "its agent shares layers between policy and value, as those for Atari do"
                    raise CannotAct(text, "Use a script without shared layers")
                load_strictly(network, weights)
                return network
        text = f"no network of {os.path.basename(module.__file__)} ({', '.join(NETWORKS)}) has its weights"
        raise CannotAct(text, "Use the script that saved it")


class VerifiedLoader(importlib.machinery.SourceFileLoader):
    """Executes the bytes whose hash was checked, and not what the file or a cache holds later."""

    def __init__(self, name: str, path: str, source: bytes) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> Any:
        """The code of those bytes."""
        return self.source_to_code(self._source, self.path)


def import_script(path: str, files: list[str], sha256: str) -> Any:
    """Import a script that has the given hash; its part for `__main__` does not run."""
    source = check_hash(files, sha256)
    loader = VerifiedLoader("trained_script", path, source)
    spec = importlib.util.spec_from_loader("trained_script", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["trained_script"] = module  # dataclasses look their module up
    loader.exec_module(module)
    return module


def transform_observation(wrapper: Any, observation: Any) -> Any:
    """The observation as a wrapper passes it on."""
    if hasattr(type(wrapper), "observation"):
        return wrapper.observation(observation)
    return wrapper.normalize(observation[None])[0]  # Gymnasium 0.29


# ---------------------------------------------------------------------- both


def check_hash(files: list[str], sha256: str) -> bytes:
    """Compare the SHA-256 of files, one after the other, with the expected one; returns the bytes of the first."""
    contents = []
    for name in files:
        with open(name, "rb") as file:
            contents.append(file.read())
    if hashlib.sha256(b"".join(contents)).hexdigest() != sha256:
        raise CannotAct(f"{files[0]} was changed meanwhile", "Load it again")
    return contents[0]


def load_weights(torch: Any, source: Any) -> Any:
    """Tensors and plain data; anything else in the file is an error."""
    try:
        return torch.load(source, map_location="cpu", weights_only=True)
    except TypeError:
        text = f"torch {torch.__version__} cannot read weights without unpickling"
        raise CannotAct(text, "Install torch 1.13 or newer there") from None


def load_strictly(network: Any, weights: Any) -> None:
    """Load weights that fit exactly."""
    try:
        network.load_state_dict(weights, strict=True)
    except RuntimeError as error:
        text = f"its weights do not fit the network ({' '.join(str(error).split())[:300]})"
        raise CannotAct(text, "Use it in the environment it was trained in") from None


def list_probabilities(torch: Any, distribution: Any) -> dict[str, Any]:
    """The probabilities of a choice among a few actions."""
    is_choice = isinstance(distribution, torch.distributions.Categorical)
    if not is_choice or distribution.probs.shape[-1] > MAX_PROBABILITIES:
        return {}
    return {"probabilities": distribution.probs[0].tolist()}


def describe_spaces(env: Any) -> dict[str, Any]:
    """The spaces of an environment; without the bounds of observations, which differ between versions of Gymnasium."""
    return {
        "observation_space": space_json(env.observation_space, with_bounds=False),
        "action_space": space_json(env.action_space),
    }


def space_json(space: Any, with_bounds: bool = True) -> dict[str, Any]:
    """A space as plain JSON, in the form of `runs/process/probe.py`."""
    kind = type(space).__name__
    if kind == "Box":
        bounds = {"low": bounds_json(space.low), "high": bounds_json(space.high)} if with_bounds else {}
        return {"type": kind, "shape": list(space.shape), "dtype": str(space.dtype), **bounds}
    if kind == "Discrete":
        return {"type": kind, "n": int(space.n), "start": int(getattr(space, "start", 0))}
    if kind == "MultiDiscrete":
        return {"type": kind, "nvec": space.nvec.tolist()}
    if kind == "MultiBinary":
        return {"type": kind, "shape": list(space.shape)}
    if kind == "Dict":
        parts = {str(key): space_json(inner, with_bounds) for key, inner in space.spaces.items()}
        return {"type": kind, "spaces": parts}
    if kind == "Tuple":
        return {"type": kind, "spaces": [space_json(inner, with_bounds) for inner in space.spaces]}
    return {"type": kind, "repr": str(space)}


def bounds_json(numbers: Any) -> Any:
    """The bounds of a space, as one number if they are equal."""
    flat = [n if math.isfinite(n) else ("inf" if n > 0 else "-inf") for n in numbers.reshape(-1).tolist()]
    if len(set(flat)) == 1:
        return flat[0]
    return flat if len(flat) <= MAX_BOUNDS else [float(numbers.min()), float(numbers.max())]


def pack(header: dict[str, Any]) -> bytes:
    """A message as bytes: the lengths of header and payload, and the header."""
    text = json.dumps(header).encode()
    return LENGTHS.pack(len(text), 0) + text


def read_messages(source: BinaryIO) -> Iterator[Any]:
    """The messages of a stream, as pairs of header and payload."""
    while True:
        lengths = source.read(LENGTHS.size)
        if len(lengths) < LENGTHS.size:
            return
        header_bytes, payload_bytes = LENGTHS.unpack(lengths)
        yield json.loads(source.read(header_bytes)), source.read(payload_bytes)


def read_arrays(header: dict[str, Any], payload: bytes) -> dict[str, Any]:
    """The arrays of an observation."""
    numpy = importlib.import_module("numpy")
    arrays, offset = {}, 0
    for entry in header.get("arrays") or ():
        kind, shape = numpy.dtype(entry["dtype"]), tuple(entry["shape"])
        count = int(numpy.prod(shape, dtype=numpy.int64))
        arrays[str(entry["name"])] = numpy.frombuffer(payload, kind, count, offset).reshape(shape).copy()
        offset += count * kind.itemsize
    return arrays


def load_zip_reader() -> Any:
    """The module `runs/checkpoints/sb3_zip.py`, without importing the packages around it."""
    runs = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    spec = importlib.util.spec_from_file_location("sb3_zip", os.path.join(runs, "checkpoints", "sb3_zip.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def serve(args: argparse.Namespace, build: Callable[[Any], Any], source: BinaryIO, target: BinaryIO) -> int:
    """Build the policy and answer messages until the source ends; returns the exit code."""

    def send(header: dict[str, Any]) -> None:
        target.write(pack(header))
        target.flush()

    try:
        check_hash([args.checkpoint], args.sha256)
        importlib.import_module("torch").set_num_threads(1)
        policy = build(args)
    except CannotAct as error:
        send({"type": "failed", "text": f"It cannot act: {error.args[0]}.", "remedy": error.args[1]})
        return 1
    except Exception as error:
        text = f"It cannot be loaded in {sys.executable} ({type(error).__name__}: {error})."
        send({"type": "failed", "text": text[:2000], "remedy": "The log of the play has the details"})
        raise
    send({"type": "ready", **policy.describe()})
    for header, payload in read_messages(source):
        if header.get("type") == "begin":
            policy.begin(int(header.get("seed", 0)))
        elif header.get("type") == "act":
            try:
                answer = policy.act(read_arrays(header, payload))
            except Exception as error:
                text = f"It cannot act on this observation ({type(error).__name__}: {error})."
                send({"type": "failed", "text": text[:2000]})
                raise
            send({"type": "action", **answer})
    return 0


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=("sb3", "cleanrl"))
    parser.add_argument("checkpoint")
    parser.add_argument("--sha256", required=True, help="of the checkpoint")
    parser.add_argument("--env", required=True, help="the environment whose spaces the networks have")
    parser.add_argument("--sample", action="store_true", help="sample actions instead of taking the likeliest")
    sb3 = parser.add_argument_group("sb3")
    sb3.add_argument("--env-kwargs", default="{}", help="JSON")
    sb3.add_argument("--unpickle", default="", help="class whose load reads the whole file: stable_baselines3:PPO")
    sb3.add_argument("--statistics", default="", help="pickle of VecNormalize")
    sb3.add_argument("--statistics-sha256", default="")
    cleanrl = parser.add_argument_group("cleanrl")
    cleanrl.add_argument("--script", default="")
    cleanrl.add_argument("--imported", nargs="*", default=[], help="modules of the checkout that the script imports")
    cleanrl.add_argument("--script-sha256", default="", help="of the script and those modules")
    cleanrl.add_argument("--values", default="{}", help="JSON: the arguments of the run")
    return parser.parse_args(argv)


if __name__ == "__main__":
    # Libraries print to standard output; only messages may reach the play.
    with os.fdopen(os.dup(1), "wb") as messages:
        os.dup2(2, 1)
        namespace = parse_args(sys.argv[1:])
        kind: Any = Sb3Policy if namespace.kind == "sb3" else CleanrlPolicy
        sys.exit(serve(namespace, kind, sys.stdin.buffer, messages))
