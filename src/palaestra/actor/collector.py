"""`Collector`: acts and steps N environments T times and records the steps in a preallocated buffer.

It owns the state of the environments and the noise of the policy. After the last step it computes `next_value`: the
value of the next observation, of the final observation if the episode was truncated, and 0 if it terminated. Rewards
are recorded unmodified; a rollout carries the scale for learning (`RewardScale`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from palaestra.actor.compatibility import buffer_shape, check_spaces
from palaestra.actor.policy_actor import (
    Compiled,
    PolicyActor,
    build_actor,
    check_action_masks,
    has_rollout_kernel,
    run_rollout_kernel,
)
from palaestra.env.spaces import allocate_row, write_observation
from palaestra.env.vector import EpisodeEnd, Observation, Snapshot, StepRow, VectorEnv
from palaestra.errors import EnvironmentContractError, ExperienceError
from palaestra.experience.buffer import RolloutBuffer
from palaestra.experience.columns import NO_FINGERPRINT, map_column
from palaestra.policy.compiled import CompiledActorCritic, RowActor
from palaestra.policy.fingerprint import policy_fingerprint
from palaestra.policy.network import eval_mode
from palaestra.transport.ranks import Share
from palaestra.transport.source import EpisodeStats, SavedState

BeforeStep: TypeAlias = Callable[[int], int]
"""Called before each step of a segment with its index; may update the weights; returns their version."""


Moments: TypeAlias = tuple[float, float, float]
"""Mean, variance and count."""


class StopCollecting(Exception):
    """Raised by a `BeforeStep` to stop in the middle of a segment. Handled inside the actor package."""


_COLLECTORS = itertools.count()


def stream_base(seed: int) -> int:
    """First stream number of a collector: distinct for every seed and collector, also across processes.

    It is reproducible: the n-th collector of a process gets the same number for the same seed.
    """
    drawn = np.random.SeedSequence([seed, 4, next(_COLLECTORS)]).generate_state(1, np.uint64)[0]
    return (int(drawn) >> 21) << 20


def attempt_seed(seed: int, attempt: int) -> int:
    """The seed of the n-th collector of a run; the first has the run's seed."""
    return seed if attempt == 0 else int(np.random.SeedSequence([seed, 5, attempt]).generate_state(1)[0])


_COLLECTED_FOR: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


def default_seed(policy: nn.Module) -> int:
    """0 for the first trainer of a policy, and a different seed for each further one.

    With one default, several trainers of one policy would collect the same episodes.
    """
    number = _COLLECTED_FOR.get(policy, 0)
    _COLLECTED_FOR[policy] = number + 1
    return 0 if number == 0 else int(np.random.SeedSequence([0, 6, number]).generate_state(1)[0])


class RewardScale:
    """Running estimate of 1 / standard deviation of the discounted return of N environments.

    A rollout updates the estimate before it is learned from, so the first rollout is scaled as well.
    """

    def __init__(self, num_envs: int, discount: float) -> None:
        self._discount = discount
        self.running = np.zeros(num_envs, np.float64)
        """Discounted returns of the running episodes."""
        self.moments: Moments = (0.0, 1.0, 0.0)
        """Those of the returns so far."""
        self.latest: Moments = (0.0, 0.0, 0.0)
        """Those of the latest rollout."""
        self._before = self.moments

    def update(self, reward: NDArray[np.float32], ended: NDArray[np.bool_], valid: NDArray[np.bool_]) -> float:
        """Add `[T, N]` rewards and return the scale."""
        returns = reward.astype(np.float64)
        running, discount = self.running.copy(), self._discount
        # Few steps end an episode, and selecting environments takes longer than the rest.
        ends: list[bool] = np.any(ended, axis=1).tolist()
        for row, over, any_over in zip(returns, ended, ends, strict=True):
            running *= discount
            running += row
            row[:] = running
            if any_over:
                running[over] = 0.0
        self.running = running
        seen = returns[valid]
        self._before = self.moments
        self.latest = (float(seen.mean()), float(seen.var()), float(seen.size)) if seen.size else (0.0, 0.0, 0.0)
        return self.merge([self.latest])

    def merge(self, parts: Sequence[Moments]) -> float:
        """Count the latest rollout as the union of `parts`, those of all processes, and return the scale."""
        mean, variance, count = self._before
        for other_mean, other_variance, n in parts:
            if n:
                total, delta = count + n, other_mean - mean
                merged = variance * count + other_variance * n + delta * delta * count * n / total
                mean, variance, count = mean + delta * n / total, merged / total, total
        self.moments = (mean, variance, count)
        return self.scale

    @property
    def scale(self) -> float:
        """The factor for rewards."""
        return float(1.0 / np.sqrt(self.moments[1] + 1e-8))


class Collector:
    """Runs one vector environment with one policy."""

    def __init__(
        self,
        env: VectorEnv,
        policy: nn.Module,
        *,
        seed: int,
        compiled: Compiled = "auto",
        discount: float | None = None,
        first_stream: int | None = None,
        share: Share | None = None,
    ) -> None:
        """`discount`: discount of the return for reward scaling; None: no scaling.

        `first_stream`: stream number of the first environment, for a collector that replaces another one. `share`: the
        places of these environments among those of all processes. The collector draws the noise of all of them and
        uses its part, so that the processes act together as one process with all environments.
        """
        check_spaces(policy, env)
        self.env, self.policy = env, policy
        self.episodes: list[EpisodeStats] = []
        self.truncated: list[tuple[int, EpisodeEnd]] = []
        """Episodes that the last segment truncated, each with its step."""
        self.num_steps = 0
        self.reward_scale = None if discount is None else RewardScale(env.num_envs, discount)
        self._seed = self._first_seed = seed
        self._compiled: Compiled = compiled
        self.rng = np.random.default_rng(np.random.SeedSequence([seed, 1]))
        self._share = share or Share(0, env.num_envs, env.num_envs)
        self._first_stream = stream_base(seed) + self._share.first if first_stream is None else first_stream
        self._started = False
        self._row = allocate_row(env.observation_space, env.num_envs, env.mask_size)
        self._shape = buffer_shape(env, policy)
        self._ended = np.zeros(env.num_envs, np.bool_)  # environments whose last step ended an episode
        self._acting: PolicyActor | None = None
        if compiled == "on":  # raise now if it is impossible
            self._get_acting()

    def replace_policy(self, policy: nn.Module) -> None:
        """Use another policy with the same spaces from the next segment on."""
        check_spaces(policy, self.env)
        self.policy, self._acting = policy, None

    def shape(self) -> dict[str, Any]:
        """Arguments of `RolloutBuffer` for this environment and policy, except its length."""
        return dict(self._shape)

    def collect(
        self,
        num_steps: int,
        buffer: RolloutBuffer | None = None,
        *,
        policy_version: int = 0,
        before_step: BeforeStep | None = None,
    ) -> RolloutBuffer:
        """Take `num_steps` steps in every environment and record them.

        If `before_step` raises `StopCollecting`, the environments keep their position and the exception propagates.
        """
        if buffer is None or buffer.num_steps != num_steps:
            buffer = RolloutBuffer(num_steps, **self._shape)
        elif buffer.made_for != self._shape:
            raise ExperienceError(
                f"collect: the buffer was made for {buffer.made_for}, and this collector writes {self._shape}. "
                "Leave it out, or make one with RolloutBuffer(num_steps, **collector.shape())."
            )
        current = self._current_row()
        buffer.reset()
        write_observation(_at(buffer.observation, 0), ..., current.observation)
        if buffer.action_mask is not None:
            buffer.action_mask[0] = current.action_mask
        self.episodes = []
        acting = self._get_acting()
        buffer.policy_version[:] = policy_version
        if before_step is None:
            buffer.policy_fingerprint[:] = policy_fingerprint(self.policy)
        if buffer.duration is not None:
            buffer.duration[:] = buffer.chunk
        try:
            # Compiled kernels have no dropout.
            with nullcontext() if isinstance(acting, CompiledActorCritic) else eval_mode(self.policy):
                self.truncated = self._run(buffer, acting, before_step)
                buffer.position = num_steps
                if buffer.duration is not None:
                    _sum_chunk_log_probs(buffer)
                _check_finite(buffer)
                _fill_next_values(buffer, acting, self.truncated)
        except StopCollecting:
            self._set_position(buffer, buffer.position)
            raise
        buffer.first_stream = self._first_stream
        buffer.first_env_step = self.num_steps
        if self.reward_scale is not None:
            ended = buffer.terminated | buffer.truncated
            buffer.reward_scale = self.reward_scale.update(buffer.reward, ended, buffer.valid)
        self._set_position(buffer, num_steps)
        return buffer

    def _set_position(self, buffer: RolloutBuffer, t: int) -> None:
        """Continue after `t` steps of the segment."""
        self.num_steps += t
        write_observation(self._row.observation, ..., _at(buffer.observation, t))
        if buffer.action_mask is not None:
            assert self._row.action_mask is not None
            self._row.action_mask[:] = buffer.action_mask[t]

    def _get_acting(self) -> PolicyActor:
        """The actor; rebuilt if the policy's weights have moved to other memory."""
        if self._acting is None or not self._acting.is_current():
            self._acting = build_actor(self.policy, self._compiled, masked=self.env.mask_size > 0)
        return self._acting

    def _run(
        self, buffer: RolloutBuffer, acting: PolicyActor, before_step: BeforeStep | None
    ) -> list[tuple[int, EpisodeEnd]]:
        """Fill the buffer; returns the truncated episodes, each with its step."""
        distribution: Any = self.policy.distribution
        uniform = distribution.noise_kind == "uniform"
        draw: Callable[..., NDArray[np.float32]] = self.rng.random if uniform else self.rng.standard_normal
        noise = draw((buffer.num_steps, self._share.total, distribution.noise_size), dtype=np.float32)
        noise = np.ascontiguousarray(noise[:, self._share.part])
        if has_rollout_kernel(self.env, acting):
            assert isinstance(acting, CompiledActorCritic)
            if before_step is not None:
                buffer.policy_version[:] = before_step(0)
                buffer.policy_fingerprint[:] = policy_fingerprint(self.policy)
            ends = run_rollout_kernel(self.env, acting, buffer, noise)
        elif (
            isinstance(acting, CompiledActorCritic)
            and buffer.chunk == 1
            and RowActor.fits(buffer.observation, noise, buffer.action, buffer.log_prob, buffer.value)
        ):
            ends = self._run_compiled_steps(buffer, acting, noise, before_step)
        else:
            ends = self._run_steps(buffer, acting, noise, before_step)
        for t, ended in ends:
            at = (self.num_steps + t + 1) * self._share.total
            if buffer.duration is not None and ended.executed is not None:
                buffer.duration[t, ended.index] = ended.executed
            index = self._share.first + ended.index
            self.episodes.append(EpisodeStats(at, index, ended.episode_return, ended.length, ended.success))
        return [(t, ended) for t, ended in ends if not buffer.terminated[t, ended.index]]

    def _run_compiled_steps(
        self,
        buffer: RolloutBuffer,
        acting: CompiledActorCritic,
        noise: NDArray[np.float32],
        before_step: BeforeStep | None,
    ) -> list[tuple[int, EpisodeEnd]]:
        """The hot loop for compiled policies: vector observations, no masks, no chunks."""
        observations: Any = buffer.observation
        actor = RowActor(acting, observations, noise, buffer.action, buffer.log_prob, buffer.value)
        distribution: Any = self.policy.distribution
        act, step, to_env, clipped = actor.act, self.env.step, distribution.to_env, actor.env_action
        row = StepRow(observations[0], buffer.reward[0], buffer.terminated[0], buffer.truncated[0], buffer.valid[0])
        ends: list[tuple[int, EpisodeEnd]] = []
        version: int | None = None
        env_actions = buffer.action if clipped is None else clipped
        rows = (observations[1:], buffer.reward, buffer.terminated, buffer.truncated, buffer.valid, env_actions)
        # Iterating makes the views of a step faster than indexing.
        for t, row.observation, row.reward, row.terminated, row.truncated, row.valid, action in zip(
            range(buffer.num_steps), *rows, strict=True
        ):
            if before_step is not None:
                buffer.position = t
                now = before_step(t)
                if now != version:
                    version = now
                    actor.refresh()
                    buffer.policy_version[t:] = now
                    buffer.policy_fingerprint[t:] = policy_fingerprint(self.policy)
            act(t)
            ended = step(to_env(action) if clipped is None else action, row)
            if ended:
                ends += [(t, end) for end in ended]
        return ends

    def _run_steps(
        self, buffer: RolloutBuffer, acting: PolicyActor, noise: NDArray[np.float32], before_step: BeforeStep | None
    ) -> list[tuple[int, EpisodeEnd]]:
        """The hot loop."""
        distribution: Any = self.policy.distribution
        act_into, step, to_env = acting.act_into, self.env.step, distribution.to_env
        observations, masks = buffer.observation, buffer.action_mask
        actions, values = buffer.action, buffer.value
        log_probs = buffer.log_prob if buffer.chunk_log_prob is None else buffer.chunk_log_prob
        row = StepRow(None, buffer.reward[0], buffer.terminated[0], buffer.truncated[0], buffer.valid[0])  # type: ignore[arg-type]
        nested = isinstance(observations, dict)
        here = _at(observations, 0)
        ends: list[tuple[int, EpisodeEnd]] = []
        fingerprint, ended_envs = NO_FINGERPRINT, self._ended
        for t in range(buffer.num_steps):
            row.observation = _at(observations, t + 1) if nested else observations[t + 1]
            row.reward, row.terminated = buffer.reward[t], buffer.terminated[t]
            row.truncated, row.valid = buffer.truncated[t], buffer.valid[t]
            action, mask = actions[t], None
            if masks is not None:
                mask, row.action_mask = masks[t], masks[t + 1]
                # After the end of an episode the next action is ignored, so its mask may forbid every action.
                check_action_masks(distribution, masks[t], ended_envs)
            if before_step is not None:
                buffer.position = t
                buffer.policy_version[t] = before_step(t)
                if t == 0 or buffer.policy_version[t] != buffer.policy_version[t - 1]:
                    fingerprint = policy_fingerprint(self.policy)
                buffer.policy_fingerprint[t] = fingerprint
            act_into(here, noise[t], mask, action, log_probs[t], values[t])
            for ended in step(to_env(action), row):
                ends.append((t, ended))  # noqa: PERF401  almost always empty
            here = row.observation
            if masks is not None:
                ended_envs = row.terminated | row.truncated
                check_action_masks(distribution, masks[t], ~row.valid)
        self._ended = ended_envs
        return ends

    def _current_row(self) -> StepRow:
        """The present observation; resets the environment the first time."""
        if not self._started:
            self.env.reset(self._seed, self._row)
            self._ended[:] = False
            self._started = True
        return self._row

    def start_new_episodes(self, attempt: int) -> None:
        """Reset before the next segment, with seeds of this attempt and a new stream."""
        self._started = False
        self._first_stream = stream_base(self._first_seed) + self._share.first
        self._seed = attempt_seed(self._first_seed, attempt)
        self.rng = np.random.default_rng(np.random.SeedSequence([self._seed, 1]))
        if self.reward_scale is not None:
            self.reward_scale.running[:] = 0.0

    def state(self) -> SavedState:
        """Everything needed to continue; `facts["exact"]` is False if the environment cannot be restored."""
        inner = self.env.snapshot() if self._started else None
        arrays = {f"env/{key}": value for key, value in inner.arrays.items()} if inner else {}
        facts: dict[str, Any] = {
            "started": self._started,
            "exact": inner is not None or not self._started,
            "num_steps": self.num_steps,
            "rng": self.rng.bit_generator.state,
            "env": inner.facts if inner else {},
        }
        if self.reward_scale is not None:
            facts["reward_scale"] = list(self.reward_scale.moments)
            arrays["reward_scale/running"] = self.reward_scale.running
        return SavedState({name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}, facts)

    def load_state(self, state: SavedState) -> bool:
        """Continue from `state`; False if the environment could not be restored and starts new episodes."""
        facts, arrays = state.facts, {name: tensor.numpy() for name, tensor in state.tensors.items()}
        self.num_steps = int(facts["num_steps"])
        self.rng.bit_generator.state = facts["rng"]
        exact = self._restore_env(facts, arrays)
        self._ended[:] = True  # unknown; masks are checked from the second step on
        if self.reward_scale is not None and "reward_scale" in facts:
            self.reward_scale.moments = tuple(facts["reward_scale"])
            # Returns of running episodes continue only where those episodes do.
            known = exact and "reward_scale/running" in arrays
            running = arrays["reward_scale/running"].copy() if known else np.zeros(self.env.num_envs)
            self.reward_scale.running = running
        return exact

    def _restore_env(self, facts: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> bool:
        if not (facts["started"] and facts["exact"]):
            self._started = False
            return not facts["started"]
        inner = Snapshot({k[4:]: v for k, v in arrays.items() if k.startswith("env/")}, facts["env"])
        return self.env.restore(inner, self._current_row())


def _sum_chunk_log_probs(buffer: RolloutBuffer) -> None:
    """Sum the log-probabilities of the executed actions of each chunk."""
    assert buffer.duration is not None
    assert buffer.chunk_log_prob is not None
    executed = np.arange(buffer.chunk) < buffer.duration[..., None]
    np.sum(buffer.chunk_log_prob, axis=-1, where=executed, out=buffer.log_prob)


def _fill_next_values(buffer: RolloutBuffer, acting: PolicyActor, truncated: list[tuple[int, EpisodeEnd]]) -> None:
    buffer.next_value[:-1] = buffer.value[1:]
    buffer.next_value[-1] = acting.value(_at(buffer.observation, buffer.num_steps))
    fill_final_values(buffer, acting, truncated)
    buffer.next_value[buffer.terminated] = 0.0


def fill_final_values(buffer: RolloutBuffer, acting: PolicyActor, truncated: list[tuple[int, EpisodeEnd]]) -> None:
    """Write the values of the final observations of truncated episodes, each with its step."""
    for start in range(0, len(truncated), 64):
        some = truncated[start : start + 64]
        final = acting.value(_stack([ended.observation for _, ended in some]))
        for value, (t, ended) in zip(final, some, strict=True):
            buffer.next_value[t, ended.index] = value


def _at(observation: Any, t: int) -> Any:
    return map_column(observation, lambda part: part[t])


def _stack(observations: list[Any]) -> Observation:
    first = observations[0]
    if isinstance(first, dict):
        return {name: np.stack([one[name] for one in observations]) for name in first}
    return np.stack(observations)


def _check_finite(buffer: RolloutBuffer) -> None:
    """Raise if the environment returned a non-finite number, before it reaches a gradient."""
    T = buffer.num_steps
    parts = buffer.observation if isinstance(buffer.observation, dict) else {"observation": buffer.observation}
    checked = {"reward": buffer.reward, **{name: part[1:] for name, part in parts.items() if part.dtype.kind == "f"}}
    for name, array in checked.items():
        # Fast check: a finite sum has finite terms. A sum that overflows is checked exactly below.
        with np.errstate(over="ignore", invalid="ignore"):
            if np.isfinite(array.sum()):
                continue
        broken = np.argwhere(~np.isfinite(array.reshape(T, buffer.num_envs, -1)).all(-1))
        if len(broken):
            t, n = (int(i) for i in broken[0])
            raise EnvironmentContractError(
                f"environment {n} returned a {name} that is not finite ({array[t, n]}) at step {t + 1} of a rollout. "
                "Nothing was learned from it. Fix the environment, or clip what it returns."
            )
