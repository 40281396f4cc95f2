"""The rules of `VLAModelInterface`, executable: run `check_vla_model` on your model before you train it.

Each rule is one sentence; a broken one is raised as a `ConfigError` that says what to change. The model sees a few
random observations of the space it will be trained on, in eval mode, and is left as it was found. `build_policy` runs
this before a run is launched.
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
from palaestra.policy.vla.policy import as_tensordict, draw

__all__ = ["check_vla_model", "random_observations"]

METHODS = {
    "forward": "forward(observations) -> actions [B, action_dim]",
    "get_value": "get_value(observations) -> values [B, 1]",
    "evaluate_actions": "evaluate_actions(observations, actions) -> (log_prob [B], entropy [B])",
}
BATCH = 3
DRAWS = 16
_FAILURES = (TypeError, ValueError, LookupError, AttributeError, RuntimeError, AssertionError)


def check_vla_model(
    model: nn.Module,
    observation_space: gymnasium.Space[Any],
    action: spaces.Box | int,
    *,
    chunk: int = 1,
    seed: int = 0,
    place: str = "policy.vla_config.model_class",
) -> None:
    """Raise `ConfigError` with the first broken rule. `action` is the action space, or how many numbers an action has.

    An action space of two axes `[k, d]` means chunks of k actions.
    """
    shape = (action,) if isinstance(action, int) else tuple(action.shape)
    if isinstance(action, int) and chunk != 1:
        shape = (chunk, action)
    trial = _Trial(model, observation_space, shape, seed, place)
    with eval_mode(model), torch.random.fork_rng(devices=[]):
        for rule in _RULES:
            rule(trial)


def random_observations(space: gymnasium.Space[Any], size: int, *, seed: int = 0) -> dict[str, Tensor]:
    """A batch of observations as rollouts store them: images as bytes, other numbers as float32, choices as int64."""
    parts: dict[str, Tensor] = {}
    for index, (name, part) in enumerate(_leaves(space, "")):
        drawn = copy.deepcopy(part)
        drawn.seed(seed + index)
        rows = np.stack([np.asarray(drawn.sample()) for _ in range(size)])
        if isinstance(part, spaces.Box) and part.dtype != np.uint8:
            # Bounds of a float space are often "anything"; no network is meant to see 1e38.
            rows = np.clip(np.clip(rows, -10, 10), part.low, part.high).astype(np.float32)
        elif isinstance(part, spaces.MultiBinary):
            rows = rows.astype(np.float32)
        parts[name] = torch.from_numpy(rows)
    return parts


def _leaves(space: gymnasium.Space[Any], name: str) -> list[tuple[str, gymnasium.Space[Any]]]:
    if not isinstance(space, spaces.Dict):
        return [(name or "observation", space)]
    found = []
    for key, part in space.spaces.items():
        found += _leaves(part, f"{name}/{key}" if name else key)
    return found


class _Trial:
    """The model under test, what it is shown, and what it answered."""

    def __init__(
        self, model: nn.Module, space: gymnasium.Space[Any], shape: tuple[int, ...], seed: int, place: str
    ) -> None:
        self.model: Any = model
        self.shape, self.place = shape, place
        self.chunked = len(shape) == 2
        parameters = list(model.parameters())
        if not parameters:
            raise self.broken("it has no parameters", "Hold the networks as attributes of the module")
        self.device = parameters[0].device
        self.trained = [p for p in parameters if p.requires_grad]
        drawn = random_observations(space, BATCH, seed=seed)
        self.parts = {name: part.to(self.device) for name, part in drawn.items()}
        self.action = torch.empty(0)

    def broken(self, reason: str, remedy: str) -> ConfigError:
        return ConfigError(self.place, type(self.model).__qualname__, reason, remedy)

    def observations(self, rows: list[int] | None = None) -> Any:
        if rows is None:
            return as_tensordict(self.parts)
        chosen = torch.tensor(rows).to(self.device)
        return as_tensordict({name: part.index_select(0, chosen) for name, part in self.parts.items()})

    def call(self, name: str, *arguments: Any, gradients: bool = False) -> Any:
        return self.told(name, lambda: getattr(self.model, name)(*arguments), gradients=gradients)

    def drawn(
        self, seed: int, *, deterministic: bool = False, rows: list[int] | None = None, by: str = "forward"
    ) -> Any:
        method, observations = getattr(self.model, by), self.observations(rows)
        return self.told(by, lambda: draw(method, observations, seed=seed, deterministic=deterministic))

    def told(self, name: str, answer: Callable[[], Any], *, gradients: bool = False) -> Any:
        """What the model answers; its own failure is told with the keys it was given."""
        try:
            with torch.set_grad_enabled(gradients):
                return answer()
        except _FAILURES as error:
            keys = ", ".join(f"{name} {tuple(part.shape)}" for name, part in self.parts.items())
            said = " ".join(f"{type(error).__name__}: {error}".split())
            raise self.broken(
                f"its {name} failed on {BATCH} observations ({said[:200]})", f"It was given {keys}"
            ) from error

    def must_be(self, what: str, tensor: Any, shape: tuple[int, ...], axes: str) -> None:
        """Tensor of this shape, floating, on the model's device, finite."""
        if not isinstance(tensor, Tensor):
            raise self.broken(f"{what} is a {type(tensor).__name__}, not a tensor", f"Return a tensor {axes}")
        if tuple(tensor.shape) != shape:
            raise self.broken(
                f"{what} has shape {tuple(tensor.shape)} for {shape[0]} observations, {shape} is needed",
                f"Return {axes}" + self._hint(what, tensor),
            )
        if not tensor.is_floating_point():
            raise self.broken(f"{what} is {str(tensor.dtype).removeprefix('torch.')}", "Return floating-point numbers")
        if tensor.device != self.device:
            raise self.broken(f"{what} is on {tensor.device}, the weights are on {self.device}", "Keep it there")
        if not bool(torch.isfinite(tensor).all()):
            raise self.broken(
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


def _it_has_the_methods(trial: _Trial) -> None:
    for name, signature in METHODS.items():
        method = getattr(type(trial.model), name, None)
        if method is None or method is nn.Module.forward:
            raise trial.broken(f"it has no method {name}", f"Add {signature}")
    if not trial.trained:
        raise trial.broken("none of its parameters requires a gradient", "Leave requires_grad on for what should learn")


def _forward_gives_actions(trial: _Trial) -> None:
    axes = "[B, chunk, action_dim]" if trial.chunked else "[B, action_dim]"
    trial.action = trial.drawn(1)
    trial.must_be("what forward returned", trial.action, (BATCH, *trial.shape), axes)


def _draws_follow_the_random_numbers_given(trial: _Trial) -> None:
    if not torch.equal(trial.action, trial.drawn(1)):
        raise trial.broken(
            "forward gives other actions for the same random numbers",
            "Draw from the generator it is handed, or from torch's global one",
        )


def _forward_explores(trial: _Trial) -> None:
    if any(not torch.equal(trial.action, trial.drawn(seed)) for seed in (2, 3, 4)):
        return
    raise trial.broken(
        "forward gives the same actions whatever the random numbers", "Draw a sample (GaussianHead adds normal noise)"
    )


def _deterministic_means_it(trial: _Trial) -> None:
    if torch.equal(trial.drawn(1, deterministic=True), trial.drawn(1, deterministic=False)):
        return  # it takes no such keyword, or every draw is the same
    if not torch.equal(trial.drawn(1, deterministic=True), trial.drawn(2, deterministic=True)):
        raise trial.broken("forward(deterministic=True) depends on random numbers", "Return the mean or the mode")


def _value_is_one_number_per_row(trial: _Trial) -> None:
    value = trial.call("get_value", trial.observations())
    trial.must_be("what get_value returned", value, (BATCH, 1), "[B, 1]")


def _evaluation_is_one_number_per_action(trial: _Trial) -> None:
    pair = trial.call("evaluate_actions", trial.observations(), trial.action)
    if not (isinstance(pair, tuple) and len(pair) == 2):
        raise trial.broken(f"evaluate_actions returned a {type(pair).__name__}", "Return (log_prob, entropy)")
    shape = (BATCH, trial.shape[0]) if trial.chunked else (BATCH,)
    axes = "[B, chunk], one per action" if trial.chunked else "[B], summed over the numbers of the action"
    for name, tensor in zip(("log_prob", "entropy"), pair, strict=True):
        trial.must_be(f"the {name} of evaluate_actions", tensor, shape, axes)


def _evaluation_repeats_itself(trial: _Trial) -> None:
    first, second = (trial.call("evaluate_actions", trial.observations(), trial.action) for _ in range(2))
    values = [trial.call("get_value", trial.observations()) for _ in range(2)]
    for name, one, two in (
        ("the log_prob of evaluate_actions", first[0], second[0]),
        ("the entropy of evaluate_actions", first[1], second[1]),
        ("what get_value returned", *values),
    ):
        if not torch.allclose(one, two, rtol=1e-5, atol=1e-6):
            raise trial.broken(
                f"{name} differs between two calls with the same input",
                "Switch dropout off in eval mode (F.dropout needs training=self.training), and draw nothing there",
            )


def _rows_do_not_see_each_other(trial: _Trial) -> None:
    whole = trial.call("evaluate_actions", trial.observations(), trial.action)[0]
    alone = trial.call("evaluate_actions", trial.observations([0]), trial.action[:1])[0]
    values = trial.call("get_value", trial.observations()), trial.call("get_value", trial.observations([0]))
    for name, one, two in (("log_prob", whole[:1], alone), ("value", values[0][:1], values[1])):
        if not _close(one, two):
            raise trial.broken(
                f"the {name} of the first of {BATCH} rows is not that of the row by itself",
                "Normalise within a row, not over the batch, and never reshape rows into each other",
            )


def _input_stays_as_it_is(trial: _Trial) -> None:
    before = {name: part.clone() for name, part in trial.parts.items()}
    actions = trial.action.clone()
    given = trial.observations()
    keys = set(given.keys(True, True))
    for name, arguments in (("forward", ()), ("get_value", ()), ("evaluate_actions", (trial.action,))):
        trial.call(name, given, *arguments)
        changed = [key for key, part in trial.parts.items() if not _same(part, before[key])]
        if not _same(trial.action, actions):
            changed.append("actions")
        if set(given.keys(True, True)) != keys:
            changed.append("the set of keys")
        if changed:
            for key, part in before.items():
                trial.parts[key].copy_(part)
            raise trial.broken(
                f"{name} changed its input ({', '.join(changed)})",
                "Work on copies: observations are the memory the rollout is stored in",
            )


def _close(one: Tensor, other: Tensor) -> bool:
    # Rows of a batch and single rows take different routes through a matrix product; more than that is a mistake.
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-3, atol=1e-4)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def _gradients_arrive(trial: _Trial) -> None:
    log_prob = trial.call("evaluate_actions", trial.observations(), trial.action, gradients=True)[0]
    value = trial.call("get_value", trial.observations(), gradients=True)
    for name, tensor in (("the log_prob of evaluate_actions", log_prob), ("what get_value returned", value)):
        reached = []
        if tensor.requires_grad:
            found = torch.autograd.grad(tensor.sum(), trial.trained, allow_unused=True)
            reached = [g for g in found if g is not None and bool(g.abs().max() > 0)]
        if not reached:
            raise trial.broken(
                f"no gradient of {name} reaches a trainable parameter",
                "Compute it without torch.no_grad, detach or .item(), from parameters that are not frozen",
            )
        if not all(bool(torch.isfinite(g).all()) for g in reached):
            raise trial.broken(
                f"the gradient of {name} is not finite", "Bound what is divided by and what goes into log"
            )


def _log_prob_is_that_of_the_draws(trial: _Trial) -> None:
    """Gibbs' inequality: on average no shifted copy of a density is larger on its own draws than the density itself."""
    rows = [0] * DRAWS
    actions = trial.drawn(5, rows=rows)
    step = 2.0 * actions.std(0, keepdim=True)
    seen = trial.observations(rows)
    here, above, below = (trial.call("evaluate_actions", seen, actions + s)[0] for s in (0.0, step, -step))
    if torch.equal(here, above) and torch.equal(here, below):
        raise trial.broken(
            "the log_prob of evaluate_actions does not depend on the actions", "Evaluate those it is given"
        )
    for moved in (above, below):
        if bool(torch.isfinite(moved).all()) and float(moved.sum()) > float(here.sum()):
            raise trial.broken(
                "the log_prob of evaluate_actions is higher beside what forward drew than there",
                "Evaluate the distribution that forward draws from (is the sign right, the log taken?)",
            )


def _later_actions_do_not_count_for_earlier_ones(trial: _Trial) -> None:
    if not trial.chunked or trial.shape[0] == 1:
        return
    other = trial.action.clone()
    other[:, -1] += 0.5
    one, two = (trial.call("evaluate_actions", trial.observations(), a)[0] for a in (trial.action, other))
    if not _close(one[:, :-1], two[:, :-1]):
        raise trial.broken(
            "the log_prob of an action depends on a later one of its chunk",
            "Let each depend on earlier ones only: a chunk may be cut short, and what was not executed does not count",
        )


def _shortcuts_give_the_same_numbers(trial: _Trial) -> None:
    seen, model = trial.observations(), trial.model
    if hasattr(model, "evaluate"):
        _must_agree(trial, "evaluate", trial.call("evaluate", seen, trial.action), trial.action)
    if hasattr(model, "act"):
        acted = trial.drawn(1, by="act")
        if not (isinstance(acted, tuple) and len(acted) == 3):
            raise trial.broken("act returned something else", "Return (actions, log_prob, value)")
        trial.must_be("the action of act", acted[0], (BATCH, *trial.shape), "the actions as forward does")
        _must_agree(trial, "act", (acted[1], None, acted[2]), acted[0])


def _must_agree(trial: _Trial, method: str, found: Any, action: Tensor) -> None:
    if not (isinstance(found, tuple) and len(found) == 3):
        raise trial.broken(f"{method} returned something else", "Return (log_prob, entropy, value)")
    seen = trial.observations()
    wanted = (*trial.call("evaluate_actions", seen, action), trial.call("get_value", seen))
    for name, one, two in zip(("log_prob", "entropy", "value"), found, wanted, strict=True):
        if one is None:
            continue
        if not _close(one, two):
            raise trial.broken(
                f"the {name} of {method} is not that of evaluate_actions and get_value",
                f"Compute both alike, or leave {method} out",
            )


_RULES = (
    _it_has_the_methods,
    _forward_gives_actions,
    _value_is_one_number_per_row,
    _evaluation_is_one_number_per_action,
    _input_stays_as_it_is,
    _evaluation_repeats_itself,
    _draws_follow_the_random_numbers_given,
    _forward_explores,
    _deterministic_means_it,
    _gradients_arrive,
    _rows_do_not_see_each_other,
    _log_prob_is_that_of_the_draws,
    _later_actions_do_not_count_for_earlier_ones,
    _shortcuts_give_the_same_numbers,
)
