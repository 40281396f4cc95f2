"""`Ranks`: the processes of a run that `torchrun` started, and what they exchange.

`torchrun` starts the same command several times and tells each process its rank in the environment; `join_ranks` reads
it. Every method is collective: all processes call it in the same order. Tensors on a GPU travel with NCCL, all others
with gloo. Objects are pickled, between these processes only. A process that fails inside `Ranks.run` ends all
of them with one message; a process that dies ends the others with `RankFailed` instead of a hang.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from palaestra.errors import ConfigError, RankFailed

R = TypeVar("R")

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables of a process that torchrun started."""
_FAILURE = "palaestra/failure"
"""Key of the store of the process group for the message of the first process that failed."""


@dataclass(frozen=True)
class Share:
    """Consecutive places of one process among those of all processes."""

    first: int
    count: int
    total: int

    @property
    def part(self) -> slice:
        """The places as a slice."""
        return slice(self.first, self.first + self.count)


class Ranks:
    """The processes of a run, seen from one of them. A run in one process has rank 0 of 1."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self.lost = False
        """Whether another process no longer responds, so that nothing can be exchanged."""

    @property
    def is_first(self) -> bool:
        """Whether this process writes the files and the messages of the run."""
        return self.rank == 0

    def share(self, total: int) -> Share:
        """This process's part of `total` places, which the number of processes must divide."""
        count = total // self.size
        return Share(self.rank * count, count, total)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place; bit-identical in all of them."""
        if self.size > 1:
            with self._translate_errors():
                dist.all_reduce(tensor)
        return tensor

    def gather(self, value: R) -> list[R]:
        """The values of all processes, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self._translate_errors():
            dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: R) -> R:
        """The value of the first process."""
        if self.size == 1:
            return value
        values = [value if self.is_first else None]
        with self._translate_errors():
            dist.broadcast_object_list(values, src=0)
        return values[0]  # type: ignore[return-value]

    def copy_from_first(self, tensors: Mapping[str, Tensor] | list[Tensor]) -> None:
        """Overwrite the tensors with those of the first process."""
        if self.size > 1:
            with self._translate_errors():
                for tensor in tensors.values() if isinstance(tensors, Mapping) else tensors:
                    dist.broadcast(tensor.detach(), src=0)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in at least one process."""
        return flag if self.size == 1 else bool(self.sum(torch.tensor([int(flag)])).item())

    def run(self, action: Callable[[], R]) -> R:
        """The result of `action`; if it raises in one process, all raise `RankFailed` with its message."""
        if self.size == 1:
            return action()
        failure: Exception | None = None
        try:
            result = action()
        except RankFailed:
            raise
        except Exception as error:  # noqa: BLE001  raised in every process below
            failure = error
        self.agree(failure)
        return result

    def agree(self, failure: Exception | None) -> None:
        """Raise `RankFailed` in all processes if one of them has a failure."""
        texts = self.gather(None if failure is None else f"{type(failure).__name__}: {failure}")
        failed = [rank for rank, text in enumerate(texts) if text is not None]
        if failure is not None and len(set(texts)) == 1:
            raise failure  # the same in all processes
        if failed:
            text = f"process {failed[0]} of {self.size} (numbered from 0) failed with {texts[failed[0]]}"
            raise RankFailed(text, known_to_all=True) from failure

    def report_failure(self, error: BaseException) -> None:
        """Leave a message for the processes that are still waiting for this one."""
        if self.size > 1 and not isinstance(error, RankFailed):
            with suppress(RuntimeError, AttributeError):
                text = (
                    f"process {self.rank} of {self.size} (numbered from 0) failed with {type(error).__name__}: {error}"
                )
                _store().set(_FAILURE, text)

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        if self.lost:
            raise RankFailed("another process has ended before.")
        try:
            yield
        except (RuntimeError, ValueError) as error:
            self._raise_lost(error)

    def _raise_lost(self, error: Exception) -> NoReturn:
        self.lost = True
        text = ""
        with suppress(RuntimeError, AttributeError):
            if _store().check([_FAILURE]):
                text = _store().get(_FAILURE).decode()
        if not text:
            reason = str(error).partition("\n")[0]
            text = f"process {self.rank} of {self.size} waited for another one, which has ended or hangs ({reason})"
        raise RankFailed(text) from error


ALONE = Ranks()
"""One process."""
_CURRENT = [ALONE]


def current_ranks() -> Ranks:
    """The processes inside `join_ranks`; `ALONE` outside."""
    return _CURRENT[-1]


def launched_by_torchrun() -> bool:
    """Whether torchrun started this process beside others."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


@contextmanager
def join_ranks(timeout_s: float) -> Iterator[Ranks]:
    """Join the processes that torchrun started; `ALONE` if there is only this one.

    `timeout_s`: time limit of every exchange, including the time that the processes wait for the slowest one.
    """
    if not launched_by_torchrun():
        yield ALONE
        return
    missing = [name for name in VARIABLES if name not in os.environ]
    if missing:
        reason = f"the environment has WORLD_SIZE but not {', '.join(missing)}"
        raise ConfigError("torchrun", missing[0], reason, "Start the processes with torchrun, or unset WORLD_SIZE")
    backend = _choose_backend()
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    except (RuntimeError, ValueError, dist.DistError) as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        reason = f"the processes cannot reach each other ({str(error).partition(chr(10))[0]})"
        remedy = "Check that every machine reaches this address, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        raise ConfigError("torchrun", address, reason, remedy) from error
    ranks = Ranks(dist.get_rank(), dist.get_world_size())
    _CURRENT.append(ranks)
    try:
        yield ranks
    except BaseException as error:
        ranks.report_failure(error)
        raise
    finally:
        _CURRENT.remove(ranks)
        with suppress(RuntimeError):
            dist.destroy_process_group()


def end_process(code: int) -> NoReturn:
    """Exit without the destructors of C++ libraries.

    While they run, a thread of torch sometimes aborts the process, whose work is done by then: torchrun would report
    a failure and end the other processes.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _choose_backend() -> str:
    if not (dist.is_available() and dist.is_gloo_available()):
        reason = f"torch {torch.__version__} was built without gloo, which the processes exchange data with"
        raise ConfigError("torchrun", "gloo", reason, "Install another build of torch, or train in one process")
    if not torch.cuda.is_available():
        return "gloo"
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    return "cpu:gloo,cuda:nccl" if dist.is_nccl_available() else "gloo"


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()
