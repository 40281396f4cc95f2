"""Conformance checks of `VLAModelInterface`: run `check_vla_model` on a model before you train it.

A violated rule raises a `ConfigError` that says what to change. The model receives a few random observations of its
observation space, in eval mode, and is not changed. `build_policy` runs the checks before a run starts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from palaestra.errors import ConfigError
from palaestra.policy.network import eval_mode
from palaestra.policy.vla.policy import PLACE, as_tensordict, sample_actions

METHODS = {
    "forward": "forward(observations) -> actions [B, action_dim]",
    "get_value": "get_value(observations) -> values [B, 1]",
    "evaluate_actions": "evaluate_actions(observations, actions) -> (log_prob [B], entropy [B])",
}
BATCH = 3
DRAWS = 16
_EVALUATED = ("the log_prob of evaluate_actions", "the entropy of evaluate_actions", "what get_value returned")
_FAILURES = (TypeError, ValueError, LookupError, AttributeError, RuntimeError, AssertionError)


def check_vla_model(
    model: nn.Module, observation_space: gymnasium.Space[Any], action: spaces.Box | int, *, chunk: int = 1
) -> None:
    """Raise `ConfigError` for the first violated rule. `action` is the action space, or the size of an action.

    An action space of two axes `[k, d]` means chunks of k actions.
    """
    shape = (action,) if isinstance(action, int) else tuple(action.shape)
    if isinstance(action, int) and chunk != 1:
        shape = (chunk, action)
    check = _ModelCheck(model, observation_space, shape)
    with eval_mode(model), torch.random.fork_rng(devices=[]):
        for rule in _CHECKS:
            rule(check)


def random_observations(space: gymnasium.Space[Any], size: int, *, seed: int = 0) -> dict[str, Tensor]:
    """Random observations as rollouts store them: images as bytes, other numbers as float32, choices as int64."""
    parts: dict[str, Tensor] = {}
    for index, (name, part) in enumerate(_leaves(space, "")):
        seeded = copy.deepcopy(part)
        seeded.seed(seed + index)
        rows = np.stack([np.asarray(seeded.sample()) for _ in range(size)])
        if isinstance(part, spaces.Box) and part.dtype != np.uint8:
            # Float spaces are often unbounded; keep the numbers in a realistic range.
            rows = np.clip(np.clip(rows, -10, 10), part.low, part.high).astype(np.float32)
        elif isinstance(part, spaces.MultiBinary):
            rows = rows.astype(np.float32)
        parts[name] = torch.from_numpy(rows)
    return parts


def _leaves(space: gymnasium.Space[Any], name: str) -> list[tuple[str, gymnasium.Space[Any]]]:
    if not isinstance(space, spaces.Dict):
        return [(name or "observation", space)]
    leaves = []
    for key, part in space.spaces.items():
        leaves += _leaves(part, f"{name}/{key}" if name else key)
    return leaves


class _ModelCheck:
    """The model under test, its observations, and the actions it sampled."""

    def __init__(self, model: nn.Module, space: gymnasium.Space[Any], shape: tuple[int, ...]) -> None:
        self.model: Any = model
        self.shape, self.chunked = shape, len(shape) == 2
        parameters = list(model.parameters())
        if not parameters:
            raise self.violation("it has no parameters", "Hold the networks as attributes of the module")
        self.device = parameters[0].device
        self.trained = [p for p in parameters if p.requires_grad]
        parts = random_observations(space, BATCH)
        self.parts = {name: part.to(self.device) for name, part in parts.items()}
        self.action = torch.empty(0)

    def violation(self, reason: str, remedy: str) -> ConfigError:
        return ConfigError(f"{PLACE}.model_class", type(self.model).__qualname__, reason, remedy)

    def observations(self, rows: list[int] | None = None) -> Any:
        if rows is None:
            return as_tensordict(self.parts)
        chosen = torch.tensor(rows).to(self.device)
        return as_tensordict({name: part.index_select(0, chosen) for name, part in self.parts.items()})

    def call(self, name: str, *arguments: Any, gradients: bool = False) -> Any:
        return self.run(name, lambda: getattr(self.model, name)(*arguments), gradients=gradients)

    def evaluate(
        self, action: Tensor, rows: list[int] | None = None, *, gradients: bool = False
    ) -> tuple[Any, Any, Any]:
        """Log-probability, entropy and value of the actions, in the order of `_EVALUATED`."""
        observations = self.observations(rows)
        log_prob, entropy = self.call("evaluate_actions", observations, action, gradients=gradients)
        return log_prob, entropy, self.call("get_value", observations, gradients=gradients)

    def sample(
        self, seed: int, *, deterministic: bool = False, rows: list[int] | None = None, by: str = "forward"
    ) -> Any:
        method, observations = getattr(self.model, by), self.observations(rows)
        return self.run(by, lambda: sample_actions(method, observations, seed=seed, deterministic=deterministic))

    def run(self, name: str, function: Callable[[], Any], *, gradients: bool = False) -> Any:
        """Call the model; its exceptions become violations that list the observation keys."""
        try:
            with torch.set_grad_enabled(gradients):
                return function()
        except _FAILURES as error:
            keys = ", ".join(f"{name} {tuple(part.shape)}" for name, part in self.parts.items())
            message = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise self.violation(
                f"its {name} failed on {BATCH} observations ({message})", f"It was given {keys}"
            ) from error

    def check_tensor(self, what: str, tensor: Any, shape: tuple[int, ...], axes: str) -> None:
        """Require a finite floating-point tensor of this shape on the model's device."""
        if not isinstance(tensor, Tensor):
            raise self.violation(f"{what} is a {type(tensor).__name__}, not a tensor", f"Return a tensor {axes}")
        if tuple(tensor.shape) != shape:
            raise self.violation(
                f"{what} has shape {tuple(tensor.shape)} for {shape[0]} observations, {shape} is needed",
                f"Return {axes}" + self._hint(what, tensor),
            )
        if not tensor.is_floating_point():
            raise self.violation(
                f"{what} is {str(tensor.dtype).removeprefix('torch.')}", "Return floating-point numbers"
            )
        if tensor.device != self.device:
            raise self.violation(f"{what} is on {tensor.device}, the weights are on {self.device}", "Keep it there")
        if not bool(torch.isfinite(tensor).all()):
            raise self.violation(
                f"{what} is not finite",
                "Check the weights and how observations are scaled (uint8 pixels: divide by 255)",
            )

    def _hint(self, what: str, tensor: Tensor) -> str:
        if what != "what forward returned":
            return ""
        if tensor.ndim == 3 and not self.chunked:
            return f"; for chunks of {tensor.shape[1]} actions set env.action_chunk={tensor.shape[1]}"
        if tensor.ndim == 3 and self.chunked and tensor.shape[1] != self.shape[0]:
            return f"; the environment executes chunks of {self.shape[0]}: set env.action_chunk={tensor.shape[1]}"
        if tensor.shape[-1] != self.shape[-1]:
            return f"; an action of the environment has {self.shape[-1]} numbers, the model's has {tensor.shape[-1]}"
        return ""


def _check_methods(check: _ModelCheck) -> None:
    for name, signature in METHODS.items():
        method = getattr(type(check.model), name, None)
        if method is None or method is nn.Module.forward:
            raise check.violation(f"it has no method {name}", f"Add {signature}")
    if not check.trained:
        raise check.violation(
            "none of its parameters requires a gradient", "Leave requires_grad on for what should learn"
        )


def _check_forward(check: _ModelCheck) -> None:
    axes = "[B, chunk, action_dim]" if check.chunked else "[B, action_dim]"
    check.action = check.sample(1)
    check.check_tensor("what forward returned", check.action, (BATCH, *check.shape), axes)


def _check_reproducible_samples(check: _ModelCheck) -> None:
    if not torch.equal(check.action, check.sample(1)):
        raise check.violation(
            "forward gives other actions for the same random numbers",
            "Draw from the generator it is handed, or from torch's global one",
        )


def _check_exploration(check: _ModelCheck) -> None:
    if any(not torch.equal(check.action, check.sample(seed)) for seed in (2, 3, 4)):
        return
    raise check.violation(
        "forward gives the same actions for different random numbers", "Draw a sample (GaussianHead adds normal noise)"
    )


def _check_deterministic(check: _ModelCheck) -> None:
    if torch.equal(check.sample(1, deterministic=True), check.sample(1, deterministic=False)):
        return  # it takes no such keyword, or all samples are equal
    if not torch.equal(check.sample(1, deterministic=True), check.sample(2, deterministic=True)):
        raise check.violation("forward(deterministic=True) depends on random numbers", "Return the mean or the mode")


def _check_value(check: _ModelCheck) -> None:
    value = check.call("get_value", check.observations())
    check.check_tensor("what get_value returned", value, (BATCH, 1), "[B, 1]")


def _check_evaluation(check: _ModelCheck) -> None:
    pair = check.call("evaluate_actions", check.observations(), check.action)
    if not (isinstance(pair, tuple) and len(pair) == 2):
        raise check.violation(f"evaluate_actions returned a {type(pair).__name__}", "Return (log_prob, entropy)")
    shape = (BATCH, check.shape[0]) if check.chunked else (BATCH,)
    axes = "[B, chunk], one per action" if check.chunked else "[B], summed over the numbers of the action"
    for name, tensor in zip(("log_prob", "entropy"), pair, strict=True):
        check.check_tensor(f"the {name} of evaluate_actions", tensor, shape, axes)


def _check_reproducible_evaluation(check: _ModelCheck) -> None:
    first, second = check.evaluate(check.action), check.evaluate(check.action)
    for name, one, two in zip(_EVALUATED, first, second, strict=True):
        if not torch.allclose(one, two, rtol=1e-5, atol=1e-6):
            raise check.violation(
                f"{name} differs between two calls with the same input",
                "Switch dropout off in eval mode (F.dropout needs training=self.training), and draw nothing there",
            )


def _check_independent_rows(check: _ModelCheck) -> None:
    whole, alone = check.evaluate(check.action), check.evaluate(check.action[:1], [0])
    for name, place in (("log_prob", 0), ("value", 2)):
        if not _close(whole[place][:1], alone[place]):
            raise check.violation(
                f"the {name} of the first of {BATCH} rows differs from that of the same row alone",
                "Normalise within a row, not over the batch, and never reshape rows into each other",
            )


def _check_input_unchanged(check: _ModelCheck) -> None:
    before = {name: part.clone() for name, part in check.parts.items()}
    actions = check.action.clone()
    given = check.observations()
    keys = set(given.keys(True, True))
    for name, arguments in (("forward", ()), ("get_value", ()), ("evaluate_actions", (check.action,))):
        check.call(name, given, *arguments)
        changed = [key for key, part in check.parts.items() if not _same(part, before[key])]
        if not _same(check.action, actions):
            changed.append("actions")
        if set(given.keys(True, True)) != keys:
            changed.append("the set of keys")
        if changed:
            for key, part in before.items():
                check.parts[key].copy_(part)
            raise check.violation(
                f"{name} changed its input ({', '.join(changed)})",
                "Work on copies: observations are the memory the rollout is stored in",
            )


def _close(one: Tensor, other: Tensor) -> bool:
    # A matrix product rounds differently for a batch and for a single row.
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-3, atol=1e-4)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def _check_gradients(check: _ModelCheck) -> None:
    evaluated = check.evaluate(check.action, gradients=True)
    for name, tensor in ((_EVALUATED[place], evaluated[place]) for place in (0, 2)):
        reached = []
        if tensor.requires_grad:
            gradients = torch.autograd.grad(tensor.sum(), check.trained, allow_unused=True)
            reached = [g for g in gradients if g is not None and bool(g.abs().max() > 0)]
        if not reached:
            raise check.violation(
                f"no gradient of {name} reaches a trainable parameter",
                "Compute it without torch.no_grad, detach or .item(), from parameters that are not frozen",
            )
        if not all(bool(torch.isfinite(g).all()) for g in reached):
            raise check.violation(
                f"the gradient of {name} is not finite", "Bound what is divided by and what goes into log"
            )


def _check_log_prob_of_samples(check: _ModelCheck) -> None:
    """Gibbs' inequality: on its own samples the average log-density is at least that of a shifted copy."""
    rows = [0] * DRAWS
    actions = check.sample(5, rows=rows)
    step = 2.0 * actions.std(0, keepdim=True)
    observations = check.observations(rows)
    here, above, below = (check.call("evaluate_actions", observations, actions + s)[0] for s in (0.0, step, -step))
    if torch.equal(here, above) and torch.equal(here, below):
        raise check.violation(
            "the log_prob of evaluate_actions does not depend on the actions", "Evaluate those it is given"
        )
    for moved in (above, below):
        if bool(torch.isfinite(moved).all()) and float(moved.sum()) > float(here.sum()):
            raise check.violation(
                "the log_prob of evaluate_actions is higher next to the samples of forward than at the samples",
                "Evaluate the distribution that forward draws from (is the sign right, the log taken?)",
            )


def _check_causal_chunks(check: _ModelCheck) -> None:
    if not check.chunked or check.shape[0] == 1:
        return
    other = check.action.clone()
    other[:, -1] += 0.5
    one, two = (check.evaluate(action)[0] for action in (check.action, other))
    if not _close(one[:, :-1], two[:, :-1]):
        raise check.violation(
            "the log_prob of an action depends on a later one of its chunk",
            "Let each depend on earlier ones only: a chunk may be cut short, and what was not executed does not count",
        )


def _check_shortcuts(check: _ModelCheck) -> None:
    observations, model = check.observations(), check.model
    if hasattr(model, "evaluate"):
        _check_agreement(check, "evaluate", check.call("evaluate", observations, check.action), check.action)
    if hasattr(model, "act"):
        result = check.sample(1, by="act")
        if not (isinstance(result, tuple) and len(result) == 3):
            raise check.violation("act returned something else", "Return (actions, log_prob, value)")
        check.check_tensor("the action of act", result[0], (BATCH, *check.shape), "the actions as forward does")
        _check_agreement(check, "act", (result[1], None, result[2]), result[0])


def _check_agreement(check: _ModelCheck, method: str, result: Any, action: Tensor) -> None:
    if not (isinstance(result, tuple) and len(result) == 3):
        raise check.violation(f"{method} returned something else", "Return (log_prob, entropy, value)")
    for name, one, two in zip(("log_prob", "entropy", "value"), result, check.evaluate(action), strict=True):
        if one is not None and not _close(one, two):
            raise check.violation(
                f"the {name} of {method} is not that of evaluate_actions and get_value",
                f"Compute both alike, or leave {method} out",
            )


_CHECKS = (
    _check_methods,
    _check_forward,
    _check_value,
    _check_evaluation,
    _check_input_unchanged,
    _check_reproducible_evaluation,
    _check_reproducible_samples,
    _check_exploration,
    _check_deterministic,
    _check_gradients,
    _check_independent_rows,
    _check_log_prob_of_samples,
    _check_causal_chunks,
    _check_shortcuts,
)
