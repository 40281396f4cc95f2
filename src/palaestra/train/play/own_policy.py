"""The policy process of a checkpoint of palaestra, for vector environments and for screens.

`python -m palaestra.train.play.own_policy CHECKPOINT [--sample]`; the protocol is in `policies.py`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import torch

from palaestra.actor.agent import Dialogue, VlmAgent
from palaestra.env.spaces import ObservationLayout
from palaestra.errors import ConfigError, PalaestraError
from palaestra.files.checkpoint import checkpoint_kind
from palaestra.policy.distribution import Categorical, EpsilonGreedy
from palaestra.policy.network import eval_mode
from palaestra.policy.tabular import TabularPolicy
from palaestra.policy.vlm.sampler import LocalSampler, ReplyRequest, SampledReply
from palaestra.runs.play.protocol import Message, MessageBuffer, pack
from palaestra.runs.process.probe import space_json
from palaestra.sessions.action import encode
from palaestra.sessions.screen import Screenshot
from palaestra.sessions.task import TaskSpec
from palaestra.train.evaluation import load_vector_policy
from palaestra.train.held_out import load_screen_policy
from palaestra.train.play.policies import read_arrays

_READ_BYTES = 1 << 20
_MAX_PROBABILITIES = 64


class CheckpointPolicy(Protocol):
    """A loaded checkpoint that acts."""

    def describe(self) -> dict[str, Any]:
        """The spaces it was trained in, and notes for the user."""

    def begin(self, instruction: str, seed: int) -> None:
        """Begin an episode."""

    def act(self, message: Message) -> dict[str, Any]:
        """The action for an observation, and what the policy thinks of it."""


class VectorPolicy:
    """A policy that was trained in vector environments."""

    def __init__(self, path: Path, *, deterministic: bool) -> None:
        loaded = load_vector_policy(path)
        self._policy: Any = loaded.policy
        self._layout = ObservationLayout(loaded.observation_space)
        self._spaces = {
            "observation_space": space_json(loaded.observation_space),
            "action_space": space_json(loaded.action_space),
        }
        self._is_chunk = loaded.config.env.action_chunk > 1
        if self._is_chunk:
            # The play performs one action at a time.
            box = self._spaces["action_space"]
            box["shape"] = box["shape"][1:]
            box["low"], box["high"] = _first_row(box["low"], box["shape"]), _first_row(box["high"], box["shape"])
        self._deterministic = deterministic
        self._rng = np.random.default_rng(0)

    def describe(self) -> dict[str, Any]:
        """The spaces of its environment."""
        # Observations are stored as float32, so the environment's own dtype is not known here.
        about = {"action_space": self._spaces["action_space"], "notes": []}
        return about | ({"q_table": self._policy.array.tolist()} if isinstance(self._policy, TabularPolicy) else {})

    def begin(self, instruction: str, seed: int) -> None:
        """Seed the sampling of actions."""
        self._rng = np.random.default_rng(seed)

    def act(self, message: Message) -> dict[str, Any]:
        """Act on one observation."""
        distribution = self._policy.distribution
        observation = self._read_observation(read_arrays(message))
        mask = message.header.get("action_mask")
        noise = None
        if not self._deterministic:
            draw: Any = self._rng.random if distribution.noise_kind == "uniform" else self._rng.standard_normal
            noise = torch.from_numpy(draw((1, distribution.noise_size), dtype=np.float32))
        with torch.inference_mode(), eval_mode(self._policy):
            masks = None if mask is None else torch.tensor([mask], dtype=torch.bool)
            acted = self._policy.act(observation, noise, mask=masks)
            outputs: dict[str, Any] = {"value": float(acted.value[0]), "log_prob": float(acted.log_prob.sum())}
            if isinstance(distribution, Categorical) and distribution.num_parameters <= _MAX_PROBABILITIES:
                parameters = distribution.apply_mask(self._policy(observation)[0], masks)
                outputs["probabilities"] = parameters.softmax(-1)[0].tolist()
            elif isinstance(distribution, EpsilonGreedy) and distribution.num_parameters <= _MAX_PROBABILITIES:
                outputs["q_values"] = self._policy(observation)[0][0].tolist()
        action = np.asarray(distribution.to_env(acted.action.numpy()))[0].tolist()
        return {"action": action, "chunk": self._is_chunk, "outputs": outputs}

    def _read_observation(self, arrays: dict[str, Any]) -> Any:
        row = self._layout.empty((1,))
        if not isinstance(row, dict):
            _write(row, arrays[""], "the observation")
            return torch.from_numpy(row)
        for name, target in row.items():
            _write(target, arrays[name], f"observation[{name!r}]")
        return {name: torch.from_numpy(target) for name, target in row.items()}


class ScreenPolicy:
    """A vision-language model that was trained on screens."""

    def __init__(self, path: Path, *, deterministic: bool) -> None:
        config, policy = load_screen_policy(path, device="cpu")
        sampler = LocalSampler(policy, threads=config.inference.torch_threads)
        temperature = 0.0 if deterministic else config.actor.temperature

        async def sample(request: ReplyRequest) -> SampledReply:
            return sampler.sample([request], temperature=temperature)[0]

        self._agent = VlmAgent(sample, policy.grammar, temperature=temperature)
        self._dialogue: Dialogue | None = None
        self._instruction, self._seed = "", 0

    def describe(self) -> dict[str, Any]:
        """Nothing: a model acts on any screen."""
        return {"notes": []}

    def begin(self, instruction: str, seed: int) -> None:
        """Begin a conversation with the next screen."""
        self._instruction, self._seed, self._dialogue = instruction, seed, None

    def act(self, message: Message) -> dict[str, Any]:
        """Reply to a screen."""
        screen = Screenshot.of(message.payload)
        if self._dialogue is None:
            spec = TaskSpec("play", "task", self._seed, {}, self._instruction, 1, screen.size)
            self._dialogue = self._agent.begin(spec, seed=self._seed)
        reply = asyncio.run(self._dialogue.reply(screen))
        outputs = {"text": reply.text, "log_prob": float(sum(reply.log_probs))}
        if reply.action is None:
            # An unreadable reply is a step that does nothing, as in training.
            outputs["unreadable"] = reply.unreadable
            return {"action": {"kind": "wait", "seconds": 0.1}, "outputs": outputs}
        return {"action": encode(reply.action), "outputs": outputs}


def load_policy(path: Path, *, deterministic: bool) -> CheckpointPolicy:
    """The policy of a checkpoint; `CheckpointError` when it is damaged."""
    kind: Callable[..., CheckpointPolicy] = ScreenPolicy if checkpoint_kind(path) == "screens" else VectorPolicy
    return kind(path, deterministic=deterministic)


def serve(path: Path, *, deterministic: bool, source: BinaryIO, target: BinaryIO) -> int:
    """Load the policy and answer messages until the source ends; returns the exit code."""

    def send(header: dict[str, Any]) -> None:
        target.write(pack(header))
        target.flush()

    try:
        policy = load_policy(path, deterministic=deterministic)
    except PalaestraError as error:
        send({"type": "failed", "text": str(error), "remedy": getattr(error, "remedy", "")})
        return 1
    send({"type": "ready", **policy.describe()})
    buffer = MessageBuffer()
    while data := os.read(source.fileno(), _READ_BYTES):
        for message in buffer.add(data):
            if message.type == "begin":
                policy.begin(str(message.header.get("instruction", "")), int(message.header.get("seed", 0)))
            elif message.type == "act":
                try:
                    send({"type": "action", **policy.act(message)})
                except (PalaestraError, KeyError) as error:
                    send({"type": "failed", "text": f"It cannot act on this observation ({error})."})
                    return 1
    return 0


def _write(target: Any, array: Any, name: str) -> None:
    if target[0].shape != array.shape:
        reason = f"has shape {array.shape}, the policy was trained with {target[0].shape}"
        raise ConfigError(name, list(array.shape), reason)
    target[0] = array


def _first_row(bound: Any, shape: list[int]) -> Any:
    count = int(np.prod(shape))
    return bound[:count] if isinstance(bound, list) else bound


def main(words: list[str]) -> int:
    """Serve the checkpoint that the arguments name."""
    torch.set_num_threads(1)
    # Libraries print to standard output; only messages may reach the worker.
    with os.fdopen(os.dup(1), "wb") as target:
        os.dup2(2, 1)
        return serve(Path(words[0]), deterministic="--sample" not in words, source=sys.stdin.buffer, target=target)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
