"""`RolloutLearner`: improves a policy from rollouts with any `RolloutAlgorithm`, in compiled kernels where possible.

It owns the optimiser, the shuffles and the version. An update that produces a non-finite number, or is interrupted,
restores weights and optimiser.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from palaestra.errors import CheckpointError, CollectorFailed, ConfigError, ExperienceError, NonFiniteError
from palaestra.experience.buffer import RolloutBuffer
from palaestra.experience.columns import NO_FINGERPRINT, UNKNOWN_VERSION, Columns, RolloutSpec, check_columns
from palaestra.learner.adam import Adam
from palaestra.learner.algorithm import CompiledUpdate, RolloutAlgorithm
from palaestra.learner.batch import TrainBatch, concatenate_batches, move_columns, num_samples, read_columns
from palaestra.learner.divided_batch import DividedBatch
from palaestra.learner.update import locate_failure, run_epochs
from palaestra.policy.actor_critic import ActorCritic
from palaestra.policy.compiled import CompiledActorCritic, why_not_compiled
from palaestra.policy.fingerprint import policy_fingerprint
from palaestra.policy.flat_parameters import FlatParameters
from palaestra.policy.weight_sync import LiveWeights
from palaestra.processes.memory import keep_freed_memory
from palaestra.transport.ranks import ALONE, Ranks
from palaestra.transport.source import SavedState


class RolloutLearner:
    """Trains one policy with one algorithm on rollouts."""

    def __init__(
        self,
        policy: nn.Module,
        algorithm: RolloutAlgorithm,
        spec: RolloutSpec,
        *,
        seed: int = 0,
        compiled: bool = True,
        scaled_rewards: bool = False,
        progress: Callable[[int], float] = lambda samples: 0.0,
        ranks: Ranks = ALONE,
        has_spare_core: Callable[[], bool] = lambda: True,
    ) -> None:
        """`spec`: shapes and types of the policy's rollouts; `scaled_rewards`: report their reward scale.

        `progress` maps the number of samples of an update to the share of the training before it, for schedules.
        `ranks`: the processes that learn together, each from its own rollouts. The compiled update is for one process.
        `has_spare_core`: whether an update may use a second core; asked before every update.
        """
        self.policy, self.algorithm = policy, algorithm
        self.version = 0
        self._spec, self._compiled, self._scaled_rewards, self._progress = spec, compiled, scaled_rewards, progress
        self._ranks = ranks
        if ranks.size > 1:
            _check_statistics(policy)
        self._has_spare_core = has_spare_core
        self._shuffle = np.random.default_rng(np.random.SeedSequence([seed, 2]))
        self._adam: Adam | None = None
        self._fast: CompiledUpdate | None = None
        self._fast_algorithm: RolloutAlgorithm | None = None
        self._weights: LiveWeights | None = None

    def update(self, experience: RolloutBuffer | Any, *, poll: Callable[[], None] | None = None) -> dict[str, float]:
        """Learn from a rollout that is not used again."""
        return self.learn([experience], poll=poll, only_once=True)

    def learn(
        self, rollouts: Sequence[Any], *, poll: Callable[[], None] | None = None, only_once: bool = False
    ) -> dict[str, float]:
        """Learn from several rollouts together; advantages are computed for each separately.

        Stale experience updates the observation statistics only if it is learned from `only_once`: otherwise it may
        have been counted before.
        """
        columns, stale, batch = self._ranks.run(partial(self._prepare, rollouts, only_once))
        flat = FlatParameters.of(self.policy)
        divided = DividedBatch(self._ranks, columns, batch) if self._ranks.size > 1 else None
        size = num_samples(batch) if divided is None else divided.size
        if size == 0:
            raise ExperienceError("learn: the rollout holds no valid step.")
        progress = self._progress(size)
        rate, clip_range = self.algorithm.learning_rate(progress), self.algorithm.clip_range(progress)
        plain = partial(run_epochs, self.policy, self.algorithm, self.optimizer(flat), poll=poll, divided=divided)
        run = self._compiled_update(columns, flat) or plain
        if run is plain:
            keep_freed_memory()
        undo, order = self._undo_point(flat), self._draw_shuffles(size)
        try:
            metrics = run(batch, order.to(flat.vector.device), rate=rate, clip_range=clip_range)
        except CollectorFailed:
            undo()
            raise
        except NonFiniteError as error:
            failure = locate_failure(self.policy, batch, str(error))
            undo()
            raise failure from None
        every = batch if divided is None else batch | divided.whole
        metrics |= {"learning_rate": rate, "clip_range": clip_range, **self.algorithm.extra_metrics(every, metrics)}
        if self._scaled_rewards and "reward_scale" in columns[-1]:
            metrics["reward_scale"] = float(columns[-1]["reward_scale"].reshape(-1)[-1])
        metrics |= staleness_metrics(columns, self.version, stale)
        self.version += 1
        update_statistics = getattr(self.policy, "update_statistics", None)
        if update_statistics is not None and (only_once or all(one is None for one in stale)):
            # Statistics change between rollouts, never within one, and count no experience twice.
            merge = {} if divided is None else {"gather": self._ranks.gather}
            update_statistics(batch["observation"], **merge)
        return metrics

    def _prepare(
        self, rollouts: Sequence[Any], only_once: bool
    ) -> tuple[list[Columns], list[Tensor | None], TrainBatch]:
        """The checked rollouts on the policy's device, their stale steps, and the training samples."""
        columns = [read_columns(rollout) for rollout in rollouts]
        flat = FlatParameters.refresh(self.policy)
        for one in columns:
            check_columns(one, self._spec)
        columns = [move_columns(one, flat.vector.device) for one in columns]
        stale: list[Tensor | None] = [None] * len(columns)
        if not (only_once and all(getattr(rollout, "is_fresh", False) for rollout in rollouts)):
            fingerprint = policy_fingerprint(self.policy)
            stale = [stale_steps(one, self.version, fingerprint) for one in columns]
        prepare = partial(self.algorithm.prepare_batch, self.policy, compiled=self._compiled)
        batch = concatenate_batches([prepare(one, steps) for one, steps in zip(columns, stale, strict=True)])
        return columns, stale, batch

    def sync_ranks(self) -> None:
        """Give all processes the weights of the first one."""
        self._ranks.copy_from_first([FlatParameters.refresh(self.policy).vector, *self.policy.buffers()])

    def weights(self) -> LiveWeights:
        """The trained weights and statistics of the policy, not copied."""
        if self._weights is None:
            self._weights = LiveWeights(self.policy)
        return self._weights

    def state(self) -> SavedState:
        """Optimiser, shuffles and version."""
        adam = self.optimizer()
        tensors = {"adam.first": adam.first.cpu(), "adam.second": adam.second.cpu()}
        facts = {"n_updates": self.version, "adam_steps": adam.steps, "shuffle": self._shuffle.bit_generator.state}
        return SavedState(tensors, facts)

    def load_state(self, state: SavedState) -> None:
        """Continue from `state`."""
        adam, facts = self.optimizer(), state.facts
        adam.first.copy_(state.tensors["adam.first"])
        adam.second.copy_(state.tensors["adam.second"])
        adam.steps = {name: int(steps) for name, steps in facts["adam_steps"].items()}
        self.version = int(facts["n_updates"])
        self._shuffle.bit_generator.state = facts["shuffle"]

    def check_state(self, state: SavedState, *, place: str) -> None:
        """Raise `CheckpointError` if the state belongs to another policy."""
        adam, first = self.optimizer(), state.tensors["adam.first"]
        if first.shape != adam.first.shape or set(state.facts["adam_steps"]) != set(adam.steps):
            reason = f"has {first.numel()} trained numbers, this policy has {adam.first.numel()}"
            raise CheckpointError("checkpoint", place, reason, "Use the configuration it was trained with")

    def optimizer(self, flat: FlatParameters | None = None) -> Adam:
        """Adam for the current layout of the policy's parameters."""
        flat = FlatParameters.of(self.policy) if flat is None else flat
        if self._adam is None:
            self._adam = Adam(flat, self.algorithm.config.adam_eps, compiled=self._compiled)
        elif self._adam.flat is not flat:
            self._adam = self._adam.rebuild(flat)
        self._adam.eps = self.algorithm.config.adam_eps  # the algorithm may have been replaced
        return self._adam

    def _compiled_update(self, columns: list[Columns], flat: FlatParameters) -> Callable[..., dict[str, float]] | None:
        """The algorithm's update in compiled kernels; None if they do not support this policy or these columns."""
        if not self._compiled or self._ranks.size > 1 or why_not_compiled(self.policy) is not None:
            return None
        if any("action_mask" in one for one in columns):
            return None
        assert isinstance(self.policy, ActorCritic)
        known = self._fast
        if known is None or known.net.flat is not flat or self._fast_algorithm is not self.algorithm:
            self._fast_algorithm = self.algorithm
            self._fast = self.algorithm.compiled_update(CompiledActorCritic(self.policy), self.optimizer(flat))
        if self._fast is None:
            return None
        self._fast.parallel = self._has_spare_core()
        return self._fast.learn

    def _draw_shuffles(self, size: int) -> Tensor:
        epochs = range(self.algorithm.config.n_epochs)
        return torch.from_numpy(np.stack([self._shuffle.permutation(size) for _ in epochs]))

    def _undo_point(self, flat: FlatParameters) -> Callable[[], None]:
        """A function that restores the present weights, optimiser state and shuffles."""
        adam = self.optimizer(flat)
        vectors = (flat.vector, adam.first, adam.second)
        copies, steps = [vector.clone() for vector in vectors], dict(adam.steps)
        shuffle = self._shuffle.bit_generator.state

        def undo() -> None:
            for vector, copy in zip(vectors, copies, strict=True):
                vector.copy_(copy)
            adam.steps = steps
            self._shuffle.bit_generator.state = shuffle

        return undo


def _check_statistics(policy: nn.Module) -> None:
    """Raise `ConfigError` if the statistics of a policy cannot be merged between processes."""
    update = getattr(policy, "update_statistics", None)
    if update is not None and "gather" not in inspect.signature(update).parameters:
        reason = "its update_statistics has no argument gather, which merges the statistics of several processes"
        remedy = "Add it (see palaestra.policy.network.ObservationNormalizer), or train in one process"
        raise ConfigError("policy", type(policy).__name__, reason, remedy)


def stale_steps(rollout: Columns, version: int, fingerprint: int = NO_FINGERPRINT) -> Tensor | None:
    """Mask `[T, N]` of the steps taken by weights other than `fingerprint`; None if there are none.

    Steps without a recorded fingerprint are compared by version; steps without a version count as fresh.
    """
    recorded = rollout.get("policy_fingerprint")
    if recorded is not None and fingerprint != NO_FINGERPRINT and bool((recorded == fingerprint).all()):
        return None
    stale: Tensor = (rollout["policy_version"] != version) & (rollout["policy_version"] != UNKNOWN_VERSION)
    if recorded is not None and fingerprint != NO_FINGERPRINT:
        stale = torch.where(recorded == NO_FINGERPRINT, stale, recorded != fingerprint)
    return stale if bool(stale.any()) else None


def staleness_metrics(rollouts: Sequence[Columns], version: int, stale: Sequence[Tensor | None]) -> dict[str, float]:
    """The age of the acting weights in updates, given the `stale_steps` of each rollout.

    Fresh steps have age 0, regardless of their version. A stale step whose version is not older than the current
    weights is foreign (another trainer's); it counts as one update old.
    """
    if all(steps is None for steps in stale):
        return {"staleness": 0.0, "staleness_max": 0.0}
    lags, foreign = [], []
    for rollout, steps in zip(rollouts, stale, strict=True):
        lag = (version - rollout["policy_version"]).reshape(-1)
        old = torch.zeros_like(lag, dtype=torch.bool) if steps is None else steps.reshape(-1)
        lags.append(torch.where(old, lag.clamp(min=1), 0))
        foreign.append(old & (lag <= 0))
    lag = torch.cat(lags)
    metrics = {"staleness": float(lag.double().mean()), "staleness_max": float(lag.max())}
    share = float(torch.cat(foreign).double().mean())
    return metrics | ({"foreign_steps": share} if share else {})
