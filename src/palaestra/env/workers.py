"""Environments shared out over processes, for those whose step costs more than a message.

Each worker hosts an `InProcessEnv` over its share; actions, observations, rewards and flags lie in anonymous shared
memory (no name, so nothing can be left behind), and a pipe per worker carries one word per step. Environments are
seeded by their global number: the data is the same, bit for bit, as without workers, and so are snapshots.
A worker that raises, dies or stops answering surfaces as an `EnvironmentFault` that names it, with its traceback or
exit code, and takes the others down with it. Refuses recipes that cannot be pickled.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import gymnasium
import numpy as np
from numpy.typing import NDArray

from palaestra.env.in_process import InProcessEnv
from palaestra.env.preflight import EnvFacts, inspect_env
from palaestra.env.spaces import ActionLayout, empty_observation, write_observation
from palaestra.env.vector import Ended, Observation, Snapshot, StepRow
from palaestra.errors import ConfigError, EnvironmentFault, PalaestraError

__all__ = ["WorkerEnv", "is_picklable"]

_ALIGN = 64
_GRACE_S = 5.0
"""How long a worker may take to close its environments before it is killed."""


@dataclass(slots=True)
class _Worker:
    number: int
    share: slice
    process: Any
    pipe: Connection

    def __str__(self) -> str:
        return f"worker {self.number} (environments {self.share.start} to {self.share.stop - 1})"


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a worker needs to know to lay the same arrays over the shared memory as its parent."""

    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]
    num_envs: int
    mask_size: int

    def arrays(self) -> Iterator[tuple[str, tuple[int, ...], np.dtype[Any]]]:
        n = self.num_envs
        for name, array in _by_name(empty_observation(self.observation_space, (n,))).items():
            yield f"observation/{name}", array.shape, array.dtype
        actions = ActionLayout(self.action_space)
        yield "action", (n, *actions.shape), actions.dtype
        yield "reward", (n,), np.dtype(np.float32)
        for flag in ("terminated", "truncated", "valid"):
            yield flag, (n,), np.dtype(np.bool_)
        if self.mask_size:
            yield "action_mask", (n, self.mask_size), np.dtype(np.bool_)

    def size(self) -> int:
        return sum(_padded(shape, dtype) for _, shape, dtype in self.arrays())

    def lay_over(self, memory: Any) -> tuple[NDArray[Any], StepRow]:
        """The shared action batch and the shared row."""
        view, offset, found = memoryview(memory).cast("B"), 0, {}
        for name, shape, dtype in self.arrays():
            count = int(np.prod(shape, dtype=np.int64))
            found[name] = np.frombuffer(view, dtype, count, offset).reshape(shape)
            offset += _padded(shape, dtype)
        parts = {name.partition("/")[2]: array for name, array in found.items() if name.startswith("observation/")}
        observation: Observation = parts if isinstance(self.observation_space, gymnasium.spaces.Dict) else parts[""]
        flags = (found["terminated"], found["truncated"], found["valid"])
        return found["action"], StepRow(observation, found["reward"], *flags, found.get("action_mask"))


class WorkerEnv:
    """N environments over `num_workers` processes, as a `VectorEnv`."""

    def __init__(
        self,
        make: Callable[[], gymnasium.Env[Any, Any]],
        num_envs: int,
        num_workers: int,
        *,
        facts: EnvFacts | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        """Start the workers; `timeout_s` is how long any answer may take before a worker counts as hung."""
        if not 1 <= num_workers <= num_envs:
            reason = f"must lie between 1 and env.num_envs ({num_envs})"
            raise ConfigError("env.num_workers", num_workers, reason, "Use one worker per core or fewer")
        try:
            pickle.dumps(make)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            reason = f"it cannot be sent to a worker process ({error})"
            remedy = "Use an importable function, or env.vectorization = 'in_process'"
            raise ConfigError("env.id", make, reason, remedy) from error
        facts = facts or inspect_env(make)
        self.num_envs, self.mask_size = num_envs, facts.mask_size
        self.observation_space, self.action_space = facts.observation_space, facts.action_space
        self._timeout_s = timeout_s
        # Spawned, not forked: a fork copies the locks of the parent's threads in whatever state they are.
        context = multiprocessing.get_context("spawn")
        plan = _Plan(facts.observation_space, facts.action_space, num_envs, facts.mask_size)
        memory = context.RawArray("B", plan.size())
        self._action, self._row = plan.lay_over(memory)
        self._workers: list[_Worker] = []
        edges = np.linspace(0, num_envs, num_workers + 1).round().astype(int).tolist()
        for number, (start, stop) in enumerate(itertools.pairwise(edges)):
            ours, theirs = context.Pipe()
            args = (theirs, make, memory, plan, slice(start, stop))
            process = context.Process(target=_work, args=args, daemon=True, name=f"palaestra-env-{number}")
            process.start()
            theirs.close()
            self._workers.append(_Worker(number, slice(start, stop), process, ours))
        self._gather()

    def reset(self, seed: int, row: StepRow) -> None:
        """Start fresh episodes everywhere."""
        self._ask("reset", seed)
        self._copy_seen(row)

    def step(self, action: NDArray[Any], row: StepRow) -> list[Ended]:
        """Act in every environment, all workers at once."""
        if action.shape != self._action.shape:
            raise EnvironmentFault(f"action has shape {action.shape}, expected {self._action.shape}.")
        self._action[...] = action
        answers = self._ask("step")
        self._copy_seen(row)
        row.reward[:] = self._row.reward
        row.terminated[:] = self._row.terminated
        row.truncated[:] = self._row.truncated
        row.valid[:] = self._row.valid
        return [
            ended._replace(index=ended.index + worker.share.start)
            for worker, answer in zip(self._workers, answers, strict=True)
            for ended in answer
        ]

    def snapshot(self) -> Snapshot | None:
        """As `InProcessEnv` would give it: it restores there and here, with any number of workers."""
        parts = self._ask("snapshot")
        if any(part is None for part in parts):
            return None
        arrays = {key: np.concatenate([part.arrays[key] for part in parts]) for key in parts[0].arrays}
        facts = dict(parts[0].facts)
        for key in ("seeds", "starts"):
            facts[key] = [item for part in parts for item in part.facts[key]]
        return Snapshot(arrays, facts)

    def restore(self, snapshot: Snapshot, row: StepRow) -> bool:
        """Every worker replays its share; one that fails makes all start afresh."""
        same = snapshot.facts.get("kind") == "replay" and len(snapshot.facts["starts"]) == self.num_envs
        if same:
            shares = [(_share_of(snapshot, worker.share),) for worker in self._workers]
            same = all(self._ask_each("restore", shares))
        if not same:
            self._ask_each("restore", [(Snapshot(),)] * len(self._workers))
        self._copy_seen(row)
        return same

    def call(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of each environment where it lives; arguments and answers are pickled."""
        return [answer for part in self._ask("call", name, args, kwargs) for answer in part]

    def close(self) -> None:
        """Stop every worker: asked first, killed if it does not listen."""
        workers, self._workers = self._workers, []
        for worker in workers:
            with contextlib.suppress(OSError, ValueError):
                worker.pipe.send(("close",))
        deadline = time.monotonic() + _GRACE_S
        for worker in workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.process.close()
            worker.pipe.close()

    def _copy_seen(self, row: StepRow) -> None:
        write_observation(row.observation, ..., self._row.observation)
        if row.action_mask is not None and self._row.action_mask is not None:
            row.action_mask[...] = self._row.action_mask

    def _ask(self, *message: Any) -> list[Any]:
        return self._ask_each(message[0], [message[1:]] * len(self._workers))

    def _ask_each(self, word: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        if not self._workers:
            raise EnvironmentFault(f"{word} was asked of an environment that is closed. Make a new one.")
        for worker, rest in zip(self._workers, arguments, strict=True):
            try:
                worker.pipe.send((word, *rest))
            except OSError:
                self._give_up(worker, None)
        return self._gather()

    def _gather(self) -> list[Any]:
        """One answer of every worker, in order; whichever dies is noticed whatever the others are doing."""
        answers: dict[int, Any] = {}
        waiting = {worker.pipe: worker for worker in self._workers}
        deadline = time.monotonic() + self._timeout_s
        while waiting:
            ready = wait(list(waiting), timeout=deadline - time.monotonic())
            if not ready:
                stuck = next(iter(waiting.values()))
                self._kill()
                raise EnvironmentFault(f"{stuck} did not answer within {self._timeout_s:g} s and was killed.")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                worker = waiting.pop(pipe)
                try:
                    kind, answer = pipe.recv()
                except (EOFError, OSError):
                    self._give_up(worker, None)
                if kind != "done":
                    self._give_up(worker, answer)
                answers[worker.number] = answer
        return [answers[worker.number] for worker in self._workers]

    def _give_up(self, worker: _Worker, report: tuple[BaseException | None, str] | None) -> NoReturn:
        cause: BaseException | None = None
        if report is None:
            worker.process.join(1.0)
            text = f"{worker} died ({_exit_reason(worker.process.exitcode)}) without a traceback."
        else:
            cause, trace = report
            text = f"{worker} failed: {cause or trace.strip().splitlines()[-1]}\n{trace}"
        self._kill()
        if isinstance(cause, ConfigError):
            raise cause
        raise EnvironmentFault(text) from cause

    def _kill(self) -> None:
        """After a fault nobody can be asked nicely: the answers to come belong to a step that has failed."""
        for worker in self._workers:
            worker.process.kill()
        self.close()


def _work(pipe: Connection, make: Callable[[], Any], memory: Any, plan: _Plan, share: slice) -> None:
    """The life of a worker: make the environments, then answer one message at a time until told to stop."""
    # A terminal's Ctrl-C reaches the whole group; stopping the workers is the parent's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    env: InProcessEnv | None = None
    try:
        action, shared = plan.lay_over(memory)
        mine = _part_of(shared, share)
        count = share.stop - share.start
        env = InProcessEnv(make, count, first_index=share.start, mask_size=plan.mask_size)
        answer: Any = None
        while True:
            pipe.send(("done", answer))
            word, *rest = pipe.recv()
            if word == "close":
                break
            answer = _obey(env, word, rest, action[share], mine)
    except EOFError:
        pass  # the parent is gone, and nobody is left to tell
    except BaseException as error:  # noqa: BLE001  an exit of the environment's is a fault like any other
        cause = error if isinstance(error, PalaestraError) and is_picklable(error) else None
        with contextlib.suppress(OSError):
            pipe.send(("failed", (cause, traceback.format_exc())))
    finally:
        if env is not None:
            env.close()


def _obey(env: InProcessEnv, word: str, rest: list[Any], action: NDArray[Any], row: StepRow) -> Any:
    if word == "step":
        return env.step(action, row)
    if word == "reset":
        return env.reset(rest[0], row)
    if word == "snapshot":
        return env.snapshot()
    if word == "restore":
        return env.restore(rest[0], row)
    name, args, kwargs = rest
    return env.call(name, *args, **kwargs)


def _part_of(row: StepRow, share: slice) -> StepRow:
    seen = row.observation
    observation: Observation = {k: v[share] for k, v in seen.items()} if isinstance(seen, dict) else seen[share]
    mask = None if row.action_mask is None else row.action_mask[share]
    flags = (row.terminated[share], row.truncated[share], row.valid[share])
    return StepRow(observation, row.reward[share], *flags, mask)


def _share_of(snapshot: Snapshot, share: slice) -> Snapshot:
    """The part of a snapshot that one worker's environments need."""
    lengths = snapshot.arrays["lengths"]
    edges = np.concatenate([[0], np.cumsum(lengths)])
    arrays = {key: array[share] for key, array in snapshot.arrays.items() if key != "actions"}
    arrays["actions"] = snapshot.arrays["actions"][edges[share.start] : edges[share.stop]]
    facts = dict(snapshot.facts)
    for key in ("seeds", "starts"):
        facts[key] = facts[key][share]
    return Snapshot(arrays, facts)


def _by_name(observation: Observation) -> dict[str, NDArray[Any]]:
    return observation if isinstance(observation, dict) else {"": observation}


def _padded(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return -(-size // _ALIGN) * _ALIGN


def _exit_reason(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by signal {-code}, {signal.Signals(-code).name}"
    return f"exit code {code}"


def is_picklable(error: BaseException) -> bool:
    """Whether an error comes out of another process as it went in."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  an error that cannot travel is told as text instead
        return False
    return True
