"""Environments divided among processes: this process and worker processes each step a part of them in parallel.

Every process runs an `InProcessEnv` for its part. Actions, observations, rewards and flags are in anonymous shared
memory, and `WorkerSignals` triggers the steps; a pipe per worker carries the rest (ended episodes, method calls,
snapshots, tracebacks). Environments are seeded by their global index, so data and snapshots are bit-identical to those
of one process. If a worker raises, dies or stops answering, all workers are stopped and an `EnvironmentContractError`
gives its name and its traceback or exit code. The function that makes an environment must be picklable.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

import numpy as np

from palaestra.env.in_process import InProcessEnv
from palaestra.env.inspection import EnvProperties, inspect_env
from palaestra.env.spaces import ActionLayout, ObservationLayout, write_observation
from palaestra.env.vector import (
    Array,
    EpisodeEnd,
    GymEnv,
    MethodForwarding,
    Observation,
    Snapshot,
    Space,
    StepRow,
    merge_snapshots,
    slice_snapshot,
)
from palaestra.env.worker_signals import WorkerSignals
from palaestra.errors import ConfigError, EnvironmentContractError, PalaestraError
from palaestra.processes.children import UNGUARDED_EXIT, UNGUARDED_REMEDY, is_picklable, start_process, usable_cores
from palaestra.processes.shared_memory import SharedArrays, allocate_shared_block

_CLOSE_TIMEOUT_S = 5.0
"""Seconds that a worker may take to close its environments before it is killed."""
_TIMEOUT_CHECK_S = 0.5
"""Seconds between two checks of the deadline, while the parent waits. The death of a worker ends the wait at once."""
_PARENT_CHECK_S = 2.0
"""Seconds between two checks whether the parent is alive, while a worker is idle."""


@dataclass(slots=True)
class _Worker:
    number: int
    share: slice
    process: BaseProcess
    pipe: Connection
    signals: WorkerSignals
    last_received: int = -1
    """The last request whose result was read."""

    def __str__(self) -> str:
        return f"worker {self.number} (environments {self.share.start} to {self.share.stop - 1})"


@dataclass(frozen=True, slots=True)
class _Layout:
    """Describes the arrays in the shared memory, so that parent and workers lay them out alike."""

    observation_space: Space
    action_space: Space
    num_envs: int
    mask_size: int

    def allocate(self, memory: SharedArrays) -> tuple[Array, StepRow]:
        """The action batch and the row, in shared memory."""
        n, actions = self.num_envs, ActionLayout(self.action_space)
        empty = ObservationLayout(self.observation_space).empty((n,))
        observation: Observation = (
            {name: memory(array.shape, array.dtype) for name, array in empty.items()}
            if isinstance(empty, dict)
            else memory(empty.shape, empty.dtype)
        )
        action, reward = memory((n, *actions.shape), actions.dtype), memory((n,), np.float32)
        terminated, truncated, valid = (memory((n,), np.bool_) for _ in range(3))
        mask = memory((n, self.mask_size), np.bool_) if self.mask_size else None
        return action, StepRow(observation, reward, terminated, truncated, valid, mask)


class _DeathWatch:
    """Wakes a parent that waits for its workers as soon as one of them dies, in a thread that sleeps until then.

    A semaphore cannot be waited for together with a process; signals that can be are slower at every step.
    """

    def __init__(self, workers: list[_Worker]) -> None:
        self.dead: set[int] = set()
        """Numbers of the workers that have exited."""
        self._waiting = {worker.process.sentinel: worker.number for worker in workers}
        self._signals = [worker.signals for worker in workers]
        self._closing, self._close = multiprocessing.Pipe(duplex=False)
        self._thread = threading.Thread(target=self._run, name="palaestra-env-watch", daemon=True)
        if workers:
            self._thread.start()

    def _run(self) -> None:
        while self._closing not in (ready := wait([self._closing, *self._waiting])):
            for sentinel in ready:
                if isinstance(sentinel, int):
                    self.dead.add(self._waiting.pop(sentinel))
            for signals in self._signals:
                signals.wake_parent()

    def close(self) -> None:
        """End the thread."""
        self._close.close()
        if self._thread.ident is not None:
            self._thread.join()
        self._closing.close()
        self._signals = []  # semaphores are removed with their last reference


class WorkerEnv(MethodForwarding):
    """N environments in `num_processes` processes, including this one, as a `VectorEnv`."""

    def __init__(
        self,
        make: Callable[[], GymEnv],
        num_envs: int,
        num_processes: int,
        *,
        properties: EnvProperties | None = None,
        first_index: int = 0,
        timeout_s: float = 300.0,
    ) -> None:
        """Start the workers; one that does not respond within `timeout_s` seconds counts as hung.

        `first_index` as in `InProcessEnv`.
        """
        if not 1 <= num_processes <= num_envs:
            reason = f"must lie between 1 and env.num_envs ({num_envs})"
            raise ConfigError("env.num_workers", num_processes, reason, "Use one per core or fewer")
        try:
            pickle.dumps(make)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            reason = f"it cannot be sent to a worker process ({error})"
            remedy = "Use an importable function, or env.vectorization = 'in_process'"
            raise ConfigError("env.id", make, reason, remedy) from error
        properties = properties or inspect_env(make)
        self.num_envs, self.mask_size = num_envs, properties.mask_size
        self.observation_space, self.action_space = properties.observation_space, properties.action_space
        self._timeout_s = timeout_s
        self._request = 0
        self._closed = False
        # Spawned, not forked: a fork copies locks that other threads of the parent may hold.
        context = multiprocessing.get_context("spawn")
        layout = _Layout(properties.observation_space, properties.action_space, num_envs, properties.mask_size)
        memory = allocate_shared_block(layout.allocate)
        self._action, self._row = layout.allocate(SharedArrays(memory))
        self._workers: list[_Worker] = []
        edges = np.linspace(0, num_envs, num_processes + 1).round().astype(int).tolist()
        own, *others = [slice(start, stop) for start, stop in itertools.pairwise(edges)]
        spin = num_processes <= usable_cores()
        for number, share in enumerate(others, start=1):
            ours, theirs = context.Pipe()
            signals = WorkerSignals(context, spin=spin)
            args = (theirs, make, memory, layout, share, first_index, signals, os.getpid())
            process = context.Process(target=_run_worker, args=args, daemon=True, name=f"palaestra-env-{number}")
            start_process(process)
            theirs.close()
            self._workers.append(_Worker(number, share, process, ours, signals))
        self._watch = _DeathWatch(self._workers)
        self._own_action, self._own_row = self._action[own], _slice_row(self._row, own)
        try:
            self._own = InProcessEnv(make, own.stop, first_index=first_index, mask_size=properties.mask_size)
        except BaseException:
            self._kill()
            raise
        self._collect_results()

    def reset(self, seed: int, row: StepRow) -> None:
        """Start new episodes."""
        self._send("reset", seed)
        self._copy_observation(row)

    def step(self, action: Array, row: StepRow) -> list[EpisodeEnd]:
        """Act in every environment, in all processes at once."""
        if action.shape != self._action.shape:
            raise EnvironmentContractError(f"action has shape {action.shape}, expected {self._action.shape}.")
        self._action[...] = action
        results = self._send("step")
        self._copy_observation(row)
        row.reward[:] = self._row.reward
        row.terminated[:] = self._row.terminated
        row.truncated[:] = self._row.truncated
        row.valid[:] = self._row.valid
        ended: list[EpisodeEnd] = results[0]
        for worker, worker_ends in zip(self._workers, results[1:], strict=True):
            if worker_ends:
                ended += [end._replace(index=end.index + worker.share.start) for end in worker_ends]
        return ended

    def snapshot(self) -> Snapshot | None:
        """The same snapshot as that of an `InProcessEnv`; both can restore it, with any number of workers."""
        return merge_snapshots(self._send("snapshot"))

    def restore(self, snapshot: Snapshot, row: StepRow) -> bool:
        """Every process replays its part; if one fails, all start new episodes."""
        same = snapshot.facts.get("kind") == "replay" and len(snapshot.facts["starts"]) == self.num_envs
        shares = [slice(0, self._own.num_envs), *(worker.share for worker in self._workers)]
        if same:
            same = all(self._send_each("restore", [(slice_snapshot(snapshot, share),) for share in shares]))
        if not same:
            self._send_each("restore", [(Snapshot(),)] * len(shares))
        self._copy_observation(row)
        return same

    def call(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of each environment in its process; arguments and results are pickled."""
        return [result for part in self._send("call", name, args, kwargs) for result in part]

    def has_method(self, name: str) -> bool:
        """Whether the environments have a method of this name; only those of this process are checked."""
        return self._own.has_method(name)

    def close(self) -> None:
        """Stop every worker; one that does not exit in time is killed."""
        if self._closed:
            return
        self._closed = True
        workers, self._workers = self._workers, []
        if hasattr(self, "_watch"):
            self._watch.close()
        for worker in workers:
            worker.signals.send_request(self._request + 1, has_message=True)
            with contextlib.suppress(OSError, ValueError):
                worker.pipe.send(("close",))
        if hasattr(self, "_own"):
            self._own.close()
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for worker in workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.process.close()
            worker.pipe.close()

    def _copy_observation(self, row: StepRow) -> None:
        write_observation(row.observation, ..., self._row.observation)
        if row.action_mask is not None and self._row.action_mask is not None:
            row.action_mask[...] = self._row.action_mask

    def _send(self, *message: Any) -> list[Any]:
        return self._send_each(message[0], [message[1:]] * (1 + len(self._workers)))

    def _send_each(self, command: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        """Send a request to all processes, execute it here, and return the results, those of this process first."""
        if self._closed:
            raise EnvironmentContractError(f"{command} was called on a closed environment. Make a new one.")
        if any(worker.last_received != self._request for worker in self._workers):
            self._collect_results()  # an interrupt came before the last results were read
        self._request += 1
        for worker, rest in zip(self._workers, arguments[1:], strict=True):
            worker.signals.send_request(self._request, has_message=command != "step")
            if command != "step":
                try:
                    worker.pipe.send((command, *rest))
                except OSError:
                    self._raise_worker_error(worker, None)
        try:
            own_result = _execute(self._own, command, arguments[0], self._own_action, self._own_row)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # also a SystemExit of the environment
            self._kill()
            if isinstance(error, PalaestraError):
                raise
            what = f"{type(error).__name__}: {error}"
            raise EnvironmentContractError(
                f"environments 0 to {self._own.num_envs - 1}, in this process: {what}."
            ) from error
        return [own_result, *self._collect_results()]

    def _collect_results(self) -> list[Any]:
        """Results of the workers for the last request, in order, without results that were read before."""
        deadline = time.monotonic() + self._timeout_s
        return [self._receive(worker, deadline) for worker in self._workers if worker.last_received != self._request]

    def _receive(self, worker: _Worker, deadline: float) -> Any:
        while not worker.signals.wait_until_done(self._request, _TIMEOUT_CHECK_S):
            for each in self._workers:
                # Detect the death of any worker, not only of this one.
                if each.number in self._watch.dead and each.signals.last_done != self._request:
                    self._raise_worker_error(each, None)
            if time.monotonic() > deadline:
                self._kill()
                raise EnvironmentContractError(f"{worker} did not respond within {self._timeout_s:g} s and was killed.")
        if worker.signals.is_result_empty:
            worker.last_received = self._request
            return None
        try:
            kind, result = worker.pipe.recv()
        except (EOFError, OSError):
            self._raise_worker_error(worker, None)
        worker.last_received = self._request
        if kind != "done":
            self._raise_worker_error(worker, result)
        return result

    def _raise_worker_error(self, worker: _Worker, report: tuple[BaseException | None, str] | None) -> NoReturn:
        cause: BaseException | None = None
        if report is None:
            worker.process.join(1.0)
            cause = _unguarded_error(worker.process.exitcode)
            text = f"{worker} died ({_exit_reason(worker.process.exitcode)}) without a traceback."
            if self._request == 0:
                text += (
                    " It never started: see its output above. The script must be a file, not standard input, and the "
                    "function that makes an environment must be importable, not defined in a notebook."
                )
        else:
            cause, trace = report
            text = f"{worker} failed: {cause or trace.strip().splitlines()[-1]}\n{trace}"
        self._kill()
        if isinstance(cause, ConfigError):
            raise cause
        raise EnvironmentContractError(text) from cause

    def _kill(self) -> None:
        """Stop the workers after an error, without waiting for the results of the failed step."""
        for worker in self._workers:
            worker.process.kill()
        self.close()


def _run_worker(
    pipe: Connection,
    make: Callable[[], GymEnv],
    memory: Any,
    layout: _Layout,
    share: slice,
    first_index: int,
    signals: WorkerSignals,
    parent: int,
) -> None:
    """Main function of a worker: make the environments, then execute one request at a time until `close`."""
    # Ctrl-C in a terminal and SIGTERM of torchrun reach the whole process group; the parent stops the workers.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    env: InProcessEnv | None = None
    request = 0
    try:
        action, shared = layout.allocate(SharedArrays(memory))
        row, actions = _slice_row(shared, share), action[share]
        first = first_index + share.start
        env = InProcessEnv(make, share.stop - share.start, first_index=first, mask_size=layout.mask_size)
        signals.report_done(request, empty=True)
        while True:
            while not signals.wait_for_request(request + 1, _PARENT_CHECK_S):
                if os.getppid() != parent:
                    return
            request += 1
            command, *rest = pipe.recv() if signals.has_message else ("step",)
            if command == "close":
                return
            result = _execute(env, command, rest, actions, row)
            # Signal first: sending a result that does not fit into the pipe blocks until the parent reads.
            signals.report_done(request, empty=not result)
            if result:
                pipe.send(("done", result))
    except EOFError:
        pass  # the parent is gone
    except BaseException as error:  # noqa: BLE001  also a SystemExit of the environment
        cause = error if isinstance(error, PalaestraError) and is_picklable(error) else None
        with contextlib.suppress(OSError):
            signals.report_done(request, empty=False)
            pipe.send(("failed", (cause, traceback.format_exc())))
    finally:
        if env is not None:
            env.close()


def _execute(env: InProcessEnv, command: str, rest: Any, action: Array, row: StepRow) -> Any:
    if command == "step":
        return env.step(action, row)
    if command == "reset":
        return env.reset(rest[0], row)
    if command == "snapshot":
        return env.snapshot()
    if command == "restore":
        return env.restore(rest[0], row)
    name, args, kwargs = rest
    return env.call(name, *args, **kwargs)


def _slice_row(row: StepRow, share: slice) -> StepRow:
    whole = row.observation
    observation: Observation = {k: v[share] for k, v in whole.items()} if isinstance(whole, dict) else whole[share]
    mask = None if row.action_mask is None else row.action_mask[share]
    flags = (row.terminated[share], row.truncated[share], row.valid[share])
    return StepRow(observation, row.reward[share], *flags, mask)


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
