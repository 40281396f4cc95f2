"""Child processes: starting one, and sending an exception back from one."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
from multiprocessing.process import BaseProcess

UNGUARDED_EXIT = 97
"""Exit code of a child process that would start children while it imports the script of its parent."""
UNGUARDED_REMEDY = (
    "Put what the script does under `if __name__ == '__main__':`, because every child process imports the script"
)


def usable_cores() -> int:
    """Number of CPU cores that this process may run on; its part of them if torchrun started several processes."""
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, len(os.sched_getaffinity(0)) // max(1, local_processes))


def start_process(process: BaseProcess) -> None:
    """Start a child process. A process that is still importing its parent's script exits with `UNGUARDED_EXIT`."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        # multiprocessing would raise here, and print its traceback before the parent's message.
        raise SystemExit(UNGUARDED_EXIT)
    process.start()


def exit_with_parent() -> None:
    """End this child process when its parent has ended, also by SIGKILL. Only on Linux.

    The kernel counts the end of the thread that started the child as the end of the parent.
    """
    if sys.platform == "linux":
        parent_death_signal = 1
        ctypes.CDLL(None, use_errno=True).prctl(parent_death_signal, signal.SIGKILL, 0, 0, 0)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:
        raise SystemExit("the parent process has ended")


def is_picklable(error: BaseException) -> bool:
    """Whether an exception can be sent to another process and restored there."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  user-defined exceptions may fail in any way
        return False
    return True
