"""The watchdog of one attempt: starts the trainer, outlives the service, and records how the attempt ended. A program.

    python -I -S watchdog.py ATTEMPT_DIRECTORY

It is the parent and subreaper of every process the trainer starts, so none of them can escape. launch.json tells it
what to start; stop.json and SIGTERM tell it to stop. Only the watchdog writes process.json (before the trainer starts)
and exit.json (when no process is left). If the watchdog is killed, the trainer keeps running. It imports only the
standard library and `palaestra.processes.procfs`, because one runs per attempt and must stay small.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import resource
import select
import shutil
import signal
import sys
import time
from dataclasses import asdict
from typing import Any

if not __package__:
    # Started by path without site-packages: make our own package importable.
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))))

from palaestra.processes.procfs import ProcessIdentity, list_descendants

LEFTOVER_GRACE_S = 5.0
"""Time for the remaining processes to end after the trainer has ended."""

SHUTDOWN_GRACE_S = 10.0
"""Grace period after a SIGTERM without stop.json, as in a shutdown of the machine."""

_PR_SET_CHILD_SUBREAPER = 36
_RESERVED_BYTES = 8192


def main(attempt_dir: str) -> int:
    """Start the trainer, wait for it, and record its exit."""
    os.chdir(attempt_dir)
    with open("launch.json", "rb") as file:
        launch = json.load(file)
    ready = int(launch["ready_fd"])
    os.set_inheritable(ready, False)
    # Close descriptors inherited from the service: an inherited pipe would otherwise never be closed.
    os.closerange(3, ready)
    os.closerange(ready + 1, os.sysconf("SC_OPEN_MAX"))
    wake = _install_signal_handlers()
    _reserve_exit_record()
    attempt = _Attempt(wake)
    error = attempt.start(launch)
    # launch.json may hold secrets; command.json records the command without them.
    _remove("launch.json")
    if not error:
        with contextlib.suppress(OSError):
            os.write(ready, b"1")
        os.close(ready)
        attempt.wait()
    shutil.rmtree("tmp", ignore_errors=True)
    _remove(".stop.reserved")
    attempt.write_exit(error)
    return 0


class _Attempt:
    """The trainer and its descendants."""

    def __init__(self, wake: int) -> None:
        self._wake = wake
        self._trainer = 0
        self._status: int | None = None
        self._usage: resource.struct_rusage | None = None
        self._leftovers: set[int] = set()
        self._terms = 0
        self._stop_reason = ""
        self._started, self._started_boottime = time.time(), _boottime()
        self._kills_before = _out_of_memory_kills()

    def start(self, launch: dict[str, Any]) -> str:
        """Fork, write process.json, then let the trainer execute. Returns the error, or an empty string."""
        gate, gate_writer = os.pipe()
        errors, errors_writer = os.pipe()
        self._trainer = os.fork()
        if not self._trainer:
            # With its own copy of the writer it would wait forever for a watchdog that was killed.
            os.close(gate_writer)
            _execute_trainer(launch, gate, errors_writer)
        for descriptor in (gate, errors_writer):
            os.close(descriptor)
        try:
            self._write_process_record(launch)
            os.write(gate_writer, b"1")
        except OSError as error:
            os.close(gate_writer)  # without the byte the child exits instead of executing the program
            os.waitpid(self._trainer, 0)
            return f"process.json could not be written: {error.strerror}"
        os.close(gate_writer)
        with os.fdopen(errors, "rb") as pipe:
            failure = pipe.read().decode("utf-8", "replace")
        if failure:
            os.waitpid(self._trainer, 0)
        return failure

    def wait(self) -> None:
        """Wait until no process is left; on SIGTERM stop the trainer, and kill it after the grace period."""
        deadline: float | None = None
        asked: Any = None
        while self._status is None:
            terms = self._terms
            self._sleep(None if deadline is None else deadline - time.monotonic())
            self._reap()
            if self._terms > terms:
                request = _read_json("stop.json") or self._write_shutdown_request()
                grace = max(0.0, float(request.get("grace_s", SHUTDOWN_GRACE_S)))
                # A second request may shorten the grace period; a second signal without a new request ends it.
                repeated = deadline is not None and request.get("asked") == asked
                limit = time.monotonic() + (0.0 if repeated else grace)
                deadline = limit if deadline is None else min(deadline, limit)
                asked, self._stop_reason = request.get("asked"), str(request.get("reason", "operator"))
                self._signal_group(signal.SIGTERM)
            if self._status is None and deadline is not None and time.monotonic() >= deadline:
                self._kill_all()
        self._end_leftovers(deadline)

    def write_exit(self, launch_error: str) -> None:
        """Write exit.json into space reserved at the start, because the disk may be full by now."""
        code = self._status
        usage = self._usage
        grown = _out_of_memory_kills() - self._kills_before
        _write_reserved(
            {
                "schema": 1,
                "returncode": code,
                "signal": -code if code is not None and code < 0 else None,
                "out_of_memory": code == -signal.SIGKILL and grown > 0,
                "launch_error": launch_error,
                "leftovers": len(self._leftovers),
                "stop_reason": self._stop_reason,
                "started": self._started,
                "ended": time.time(),
                "duration_s": round(_boottime() - self._started_boottime, 3),
                "max_rss_kb": usage.ru_maxrss if usage else 0,
                "user_s": usage.ru_utime if usage else 0.0,
                "system_s": usage.ru_stime if usage else 0.0,
            },
            self._wake,
        )

    def _write_process_record(self, launch: dict[str, Any]) -> None:
        processes = {"watchdog": ProcessIdentity.of(os.getpid()), "trainer": ProcessIdentity.of(self._trainer)}
        identities = {name: None if identity is None else asdict(identity) for name, identity in processes.items()}
        _write_json(
            "process.json",
            {
                "schema": 1,
                **identities,
                "label": launch["label"],
                "started": self._started,
                "boottime": self._started_boottime,
            },
        )

    def _sleep(self, seconds: float | None) -> None:
        """Sleep until a child ends, a signal arrives, or the time is over."""
        if seconds is None or seconds > 0:
            select.select([self._wake], [], [], seconds)
        with contextlib.suppress(BlockingIOError):
            self._terms += os.read(self._wake, 4096).count(signal.SIGTERM)

    def _reap(self) -> bool:
        """Reap ended descendants, orphans included; whether none is left."""
        try:
            while (ended := os.wait4(-1, os.WNOHANG))[0]:
                if ended[0] == self._trainer:
                    self._status, self._usage = os.waitstatus_to_exitcode(ended[1]), ended[2]
        except ChildProcessError:
            # Every orphan becomes our child, so this is more reliable than searching /proc.
            return True
        return False

    def _write_shutdown_request(self) -> dict[str, Any]:
        request = {"schema": 1, "reason": "shutdown", "by": "signal", "grace_s": SHUTDOWN_GRACE_S, "asked": time.time()}
        with contextlib.suppress(OSError):
            _write_json("stop.json", request)
        return request

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._trainer, number)

    def _kill_all(self) -> None:
        """Kill descendants until none is left; processes forked meanwhile are found in the next round."""
        while not self._reap():
            for pid in list_descendants(os.getpid()):
                _send_signal(pid, signal.SIGKILL)
            self._sleep(0.02)

    def _end_leftovers(self, deadline: float | None) -> None:
        self._leftovers = list_descendants(os.getpid())
        end = time.monotonic() + LEFTOVER_GRACE_S
        end = end if deadline is None else min(end, deadline)
        for pid in self._leftovers:
            _send_signal(pid, signal.SIGTERM)
        while not self._reap() and (left := end - time.monotonic()) > 0:
            self._sleep(left)
        self._kill_all()


def _execute_trainer(launch: dict[str, Any], gate: int, errors: int) -> None:
    """In the child: wait for a byte from the gate, then execute the trainer. Never returns."""
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for name in ("HUP", "INT", "QUIT", "TERM", "CHLD", "PIPE", "XFSZ"):
            signal.signal(signal.Signals[f"SIG{name}"], signal.SIG_DFL)
        if launch.get("memory_mb"):
            size = int(launch["memory_mb"]) << 20
            resource.setrlimit(resource.RLIMIT_AS, (size, size))
        if launch.get("nice"):
            _lower_priority(int(launch["nice"]))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        argv = [str(word) for word in launch["argv"]]
        if os.read(gate, 1):
            os.chdir(launch["cwd"])
            os.execvpe(argv[0], argv, os.environ)
    except OSError as error:
        place = error.filename or launch["argv"][0]
        os.write(errors, f"{place} cannot be executed: {error.strerror}".encode())
    except BaseException as error:  # noqa: BLE001 - a forked child cannot raise to a caller
        os.write(errors, f"{launch['argv'][0]} cannot be executed: {error}".encode())
    finally:
        os._exit(127)


def _lower_priority(niceness: int) -> None:
    """Lower the priority of this process, and of its session where Linux compares niceness only within a session."""
    os.nice(niceness)
    try:
        with open("/proc/self/autogroup", "w") as file:
            file.write(str(niceness))
    except OSError:
        pass  # no autogroups here


def _install_signal_handlers() -> int:
    """Become a subreaper; returns a descriptor that reports ended children and SIGTERM."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wake, woken = os.pipe()
    for descriptor in (wake, woken):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    return wake


def _boottime() -> float:
    """Seconds since boot, suspend included; unlike the wall clock it is never set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _out_of_memory_kills() -> int:
    """Number of out-of-memory kills in our memory cgroup and on the whole machine."""
    sources = ["/proc/vmstat"]
    with contextlib.suppress(OSError), open("/proc/self/cgroup", encoding="utf-8") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if not controllers:
                sources.append(f"/sys/fs/cgroup{path}/memory.events")
            elif "memory" in controllers.split(","):
                sources.append(f"/sys/fs/cgroup/memory{path}/memory.oom_control")
    kills = 0
    for source in sources:
        with contextlib.suppress(OSError), open(source, encoding="utf-8") as file:
            kills += sum(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
    return kills


def _send_signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _read_json(name: str) -> dict[str, Any] | None:
    try:
        with open(name, "rb") as file:
            data = json.load(file)
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def _remove(name: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name)


def _write_json(name: str, data: dict[str, Any]) -> None:
    # Not `files.atomic.write_json`: every import costs memory in one process per attempt.
    temporary = f".{name}.{os.getpid()}.tmp"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(data, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, name)
    except OSError:
        _remove(temporary)
        raise


def _reserve_exit_record() -> None:
    """Reserve space for exit.json. If the disk is already full, writing it is retried at the end."""
    with contextlib.suppress(OSError):
        descriptor = os.open(".exit.reserved", os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.posix_fallocate(descriptor, 0, _RESERVED_BYTES)
        finally:
            os.close(descriptor)


def _write_reserved(data: dict[str, Any], wake: int) -> None:
    text = json.dumps(data, indent=2).encode() + b"\n"
    while True:
        try:
            descriptor = os.open(".exit.reserved", os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                if os.pwrite(descriptor, text, 0) != len(text):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.ftruncate(descriptor, len(text))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(".exit.reserved", "exit.json")
            return
        except OSError as error:
            # The directory was removed or is read-only: there is no place to record the exit.
            if error.errno != errno.ENOSPC:
                return
        readable, _, _ = select.select([wake], [], [], 1.0)
        if readable and signal.SIGTERM in os.read(wake, 4096):
            return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
