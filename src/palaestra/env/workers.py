"""Environments shared out over processes: this one and worker processes step a share each, at the same time.

Every process hosts an `InProcessEnv` over its share. Actions, observations, rewards and flags lie in anonymous shared
memory, and `WorkerSignals` says when to step; a pipe per worker carries the rest: ended episodes, calls, snapshots,
tracebacks. Environments are seeded by their global number: the data is the same, bit for bit, as in one process, and so
are snapshots. A worker that raises, dies or stops answering surfaces as an `EnvironmentContractError` that names it,
with its traceback or exit code, and takes the others down with it. Refuses recipes that cannot be pickled.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import gymnasium
import numpy as np
from numpy.typing import NDArray

from palaestra.env.in_process import InProcessEnv
from palaestra.env.preflight import EnvFacts, inspect_env
from palaestra.env.spaces import ActionLayout, empty_observation, write_observation
from palaestra.env.vector import Ended, MethodForwarding, Observation, Snapshot, StepRow
from palaestra.env.worker_signals import WorkerSignals
from palaestra.errors import ConfigError, EnvironmentContractError, PalaestraError
from palaestra.processes.shared_memory import SharedArrays, allocate_shared_block

__all__ = ["UNGUARDED_EXIT", "UNGUARDED_REMEDY", "WorkerEnv", "is_picklable", "start_process", "usable_cores"]

_ALIGN = 64
_GRACE_S = 5.0
"""How long a worker may take to close its environments before it is killed."""
_ALIVE_CHECK_S = 0.1
"""Seconds between two checks of a waiting parent whether its workers are alive."""
_PARENT_CHECK_S = 2.0
"""Seconds between two checks of an idle worker whether its parent is alive."""
UNGUARDED_EXIT = 97
"""Exit code of a child that would start children while it imports the script of its parent."""
UNGUARDED_REMEDY = (
    "Put what the script does under `if __name__ == '__main__':`, because every child process imports the script"
)


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def start_process(process: Any) -> None:
    """Start a child; one that is itself still importing its parent's script ends instead, with `UNGUARDED_EXIT`."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        # multiprocessing would raise here, and its traceback would come before the parent's message.
        raise SystemExit(UNGUARDED_EXIT)
    process.start()


@dataclass(slots=True)
class _Worker:
    number: int
    share: slice
    process: Any
    pipe: Connection
    signals: WorkerSignals
    last_read: int = -1
    """The last question whose answer was read."""

    def __str__(self) -> str:
        return f"worker {self.number} (environments {self.share.start} to {self.share.stop - 1})"


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a worker needs to know to lay the same arrays over the shared memory as its parent."""

    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]
    num_envs: int
    mask_size: int

    def allocate(self, memory: SharedArrays) -> tuple[NDArray[Any], StepRow]:
        """The action batch and the row, over memory that both processes see."""
        n, actions = self.num_envs, ActionLayout(self.action_space)
        like = _by_name(empty_observation(self.observation_space, (n,)))
        parts = {name: memory(array.shape, array.dtype) for name, array in like.items()}
        observation: Observation = parts if isinstance(self.observation_space, gymnasium.spaces.Dict) else parts[""]
        action, reward = memory((n, *actions.shape), actions.dtype), memory((n,), np.float32)
        terminated, truncated, valid = (memory((n,), np.bool_) for _ in range(3))
        mask = memory((n, self.mask_size), np.bool_) if self.mask_size else None
        return action, StepRow(observation, reward, terminated, truncated, valid, mask)


class WorkerEnv(MethodForwarding):
    """N environments over `num_processes` processes, this one among them, as a `VectorEnv`."""

    def __init__(
        self,
        make: Callable[[], gymnasium.Env[Any, Any]],
        num_envs: int,
        num_processes: int,
        *,
        facts: EnvFacts | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        """Start the workers; `timeout_s` is how long any answer may take before a worker counts as hung."""
        if not 1 <= num_processes <= num_envs:
            reason = f"must lie between 1 and env.num_envs ({num_envs})"
            raise ConfigError("env.num_workers", num_processes, reason, "Use one per core or fewer")
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
        self._asked = 0
        self._closed = False
        # Spawned, not forked: a fork copies the locks of the parent's threads in whatever state they are.
        context = multiprocessing.get_context("spawn")
        plan = _Plan(facts.observation_space, facts.action_space, num_envs, facts.mask_size)
        memory = allocate_shared_block(plan.allocate)
        self._action, self._row = plan.allocate(SharedArrays(memory))
        self._workers: list[_Worker] = []
        edges = np.linspace(0, num_envs, num_processes + 1).round().astype(int).tolist()
        own, *others = [slice(start, stop) for start, stop in itertools.pairwise(edges)]
        spin = num_processes <= usable_cores()
        for number, share in enumerate(others, start=1):
            ours, theirs = context.Pipe()
            signals = WorkerSignals(context, spin=spin)
            args = (theirs, make, memory, plan, share, signals, os.getpid())
            process = context.Process(target=_work, args=args, daemon=True, name=f"palaestra-env-{number}")
            start_process(process)
            theirs.close()
            self._workers.append(_Worker(number, share, process, ours, signals))
        self._own_action, self._own_row = self._action[own], _part_of(self._row, own)
        try:
            self._own = InProcessEnv(make, own.stop, mask_size=facts.mask_size)
        except BaseException:
            self._kill()
            raise
        self._gather()

    def reset(self, seed: int, row: StepRow) -> None:
        """Start fresh episodes everywhere."""
        self._ask("reset", seed)
        self._copy_seen(row)

    def step(self, action: NDArray[Any], row: StepRow) -> list[Ended]:
        """Act in every environment, all processes at once."""
        if action.shape != self._action.shape:
            raise EnvironmentContractError(f"action has shape {action.shape}, expected {self._action.shape}.")
        self._action[...] = action
        answers = self._ask("step")
        self._copy_seen(row)
        row.reward[:] = self._row.reward
        row.terminated[:] = self._row.terminated
        row.truncated[:] = self._row.truncated
        row.valid[:] = self._row.valid
        ended: list[Ended] = answers[0]
        for worker, answer in zip(self._workers, answers[1:], strict=True):
            if answer:
                ended += [one._replace(index=one.index + worker.share.start) for one in answer]
        return ended

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
        """Every process replays its share; one that fails makes all start afresh."""
        same = snapshot.facts.get("kind") == "replay" and len(snapshot.facts["starts"]) == self.num_envs
        shares = [slice(0, self._own.num_envs), *(worker.share for worker in self._workers)]
        if same:
            same = all(self._ask_each("restore", [(_share_of(snapshot, share),) for share in shares]))
        if not same:
            self._ask_each("restore", [(Snapshot(),)] * len(shares))
        self._copy_seen(row)
        return same

    def call(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of each environment where it lives; arguments and answers are pickled."""
        return [answer for part in self._ask("call", name, args, kwargs) for answer in part]

    def has_method(self, name: str) -> bool:
        """Whether the environments have a method of this name; those of this process speak for all."""
        return self._own.has_method(name)

    def close(self) -> None:
        """Stop every worker: asked first, killed if it does not listen."""
        if self._closed:
            return
        self._closed = True
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.signals.ask(self._asked + 1, message=True)
            with contextlib.suppress(OSError, ValueError):
                worker.pipe.send(("close",))
        if hasattr(self, "_own"):
            self._own.close()
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
        return self._ask_each(message[0], [message[1:]] * (1 + len(self._workers)))

    def _ask_each(self, word: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        """Answers of every process, this one first, which does its share while the others do theirs."""
        if self._closed:
            raise EnvironmentContractError(f"{word} was asked of an environment that is closed. Make a new one.")
        if any(worker.last_read != self._asked for worker in self._workers):
            self._gather()  # an interrupt came before the last answers were read
        self._asked += 1
        for worker, rest in zip(self._workers, arguments[1:], strict=True):
            worker.signals.ask(self._asked, message=word != "step")
            if word != "step":
                try:
                    worker.pipe.send((word, *rest))
                except OSError:
                    self._give_up(worker, None)
        try:
            mine = _obey(self._own, word, arguments[0], self._own_action, self._own_row)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # an exit of the environment's is a fault like any other
            self._kill()
            if isinstance(error, PalaestraError):
                raise
            what = f"{type(error).__name__}: {error}"
            raise EnvironmentContractError(
                f"environments 0 to {self._own.num_envs - 1}, in this process: {what}."
            ) from error
        return [mine, *self._gather()]

    def _gather(self) -> list[Any]:
        """What the workers answered to the last question, in order; without answers that were read before."""
        deadline = time.monotonic() + self._timeout_s
        return [self._answer(worker, deadline) for worker in self._workers if worker.last_read != self._asked]

    def _answer(self, worker: _Worker, deadline: float) -> Any:
        while not worker.signals.wait_for_answer(self._asked, _ALIVE_CHECK_S):
            for each in self._workers:
                # Whichever dies is noticed, whatever the others are doing.
                if not each.process.is_alive() and each.signals.answered != self._asked:
                    self._give_up(each, None)
            if time.monotonic() > deadline:
                self._kill()
                raise EnvironmentContractError(f"{worker} did not answer within {self._timeout_s:g} s and was killed.")
        if worker.signals.silent:
            worker.last_read = self._asked
            return None
        try:
            kind, answer = worker.pipe.recv()
        except (EOFError, OSError):
            self._give_up(worker, None)
        worker.last_read = self._asked
        if kind != "done":
            self._give_up(worker, answer)
        return answer

    def _give_up(self, worker: _Worker, report: tuple[BaseException | None, str] | None) -> NoReturn:
        cause: BaseException | None = None
        if report is None:
            worker.process.join(1.0)
            cause = _unguarded_error(worker.process.exitcode)
            text = f"{worker} died ({_exit_reason(worker.process.exitcode)}) without a traceback."
            if self._asked == 0:
                text += (
                    " It never started: look at its output above. The script must be a file, not standard input, and "
                    "what makes an environment must be importable, not defined in a notebook."
                )
        else:
            cause, trace = report
            text = f"{worker} failed: {cause or trace.strip().splitlines()[-1]}\n{trace}"
        self._kill()
        if isinstance(cause, ConfigError):
            raise cause
        raise EnvironmentContractError(text) from cause

    def _kill(self) -> None:
        """After a fault nobody can be asked nicely: the answers to come belong to a step that has failed."""
        for worker in self._workers:
            worker.process.kill()
        self.close()


def _work(
    pipe: Connection,
    make: Callable[[], Any],
    memory: Any,
    plan: _Plan,
    share: slice,
    signals: WorkerSignals,
    parent: int,
) -> None:
    """The life of a worker: make the environments, then answer one question at a time until told to stop."""
    # A terminal's Ctrl-C reaches the whole group; stopping the workers is the parent's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    env: InProcessEnv | None = None
    asked = 0
    try:
        action, shared = plan.allocate(SharedArrays(memory))
        mine, actions = _part_of(shared, share), action[share]
        env = InProcessEnv(make, share.stop - share.start, first_index=share.start, mask_size=plan.mask_size)
        signals.answer(asked, silent=True)
        while True:
            while not signals.wait_for_question(asked + 1, _PARENT_CHECK_S):
                if os.getppid() != parent:
                    return
            asked += 1
            word, *rest = pipe.recv() if signals.has_message else ("step",)
            if word == "close":
                return
            answer = _obey(env, word, rest, actions, mine)
            # The signal first: an answer that does not fit into the pipe waits there until the parent reads.
            signals.answer(asked, silent=not answer)
            if answer:
                pipe.send(("done", answer))
    except EOFError:
        pass  # the parent is gone, and nobody is left to tell
    except BaseException as error:  # noqa: BLE001  an exit of the environment's is a fault like any other
        cause = error if isinstance(error, PalaestraError) and is_picklable(error) else None
        with contextlib.suppress(OSError):
            signals.answer(asked, silent=False)
            pipe.send(("failed", (cause, traceback.format_exc())))
    finally:
        if env is not None:
            env.close()


def _obey(env: InProcessEnv, word: str, rest: Any, action: NDArray[Any], row: StepRow) -> Any:
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


def _unguarded_error(code: int | None) -> ConfigError | None:
    if code != UNGUARDED_EXIT:
        return None
    reason = "the script starts worker processes when it is imported, and each of them imports it"
    remedy = f"{UNGUARDED_REMEDY}; or use env.vectorization='in_process'"
    return ConfigError("env.vectorization", "workers", reason, remedy)


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
