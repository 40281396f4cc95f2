"""Stands by one attempt of a run, outlives the service, and writes down how the attempt ended. A program of its own.

    python -I -S warden.py ATTEMPT_DIRECTORY

Parent and subreaper of everything the trainer starts, so that nothing of it is ever lost sight of. It is told what to
start by launch.json, to end it by stop.json and SIGTERM, and it alone writes process.json (before the trainer may
begin) and exit.json (when nothing of it lives any more). Killed itself, it takes nobody with it: the trainer goes on.
Imports the standard library and `palaestra.processes.procfs` only, because one runs per attempt and must stay small.
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
    # Started by path, without site-packages, in whatever directory: our own tree is all it needs.
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))))

from palaestra.processes.procfs import ProcessIdentity, list_descendants

__all__ = ["LEFTOVER_GRACE_S", "SHUTDOWN_GRACE_S", "main"]

LEFTOVER_GRACE_S = 5.0
"""How long what a trainer left behind may take to end, once the trainer itself has ended."""

SHUTDOWN_GRACE_S = 10.0
"""How long a trainer may take when somebody ends the warden without saying why: the machine is going down."""

_PR_SET_CHILD_SUBREAPER = 36
_RESERVED_BYTES = 8192


def main(attempt_dir: str) -> int:
    """Start the trainer, stand by it, write down its end."""
    os.chdir(attempt_dir)
    with open("launch.json", "rb") as file:
        launch = json.load(file)
    ready = int(launch["ready_fd"])
    os.set_inheritable(ready, False)
    # Whoever started the service may have left descriptors open in it; a pipe among them would never see its end.
    os.closerange(3, ready)
    os.closerange(ready + 1, os.sysconf("SC_OPEN_MAX"))
    wake = _listen()
    _reserve()
    attempt = _Attempt(wake)
    error = attempt.start(launch)
    # From here on the trainer has its arguments; they are on record in command.json, secrets hidden.
    _remove("launch.json")
    if not error:
        with contextlib.suppress(OSError):
            os.write(ready, b"1")
        os.close(ready)
        attempt.stand_by()
    shutil.rmtree("tmp", ignore_errors=True)
    _remove(".stop.reserved")
    attempt.write_exit(error)
    return 0


class _Attempt:
    """The trainer and what it left to us."""

    def __init__(self, wake: int) -> None:
        self._wake = wake
        self._trainer = 0
        self._status: int | None = None
        self._usage: resource.struct_rusage | None = None
        self._leftovers: set[int] = set()
        self._terms = 0
        self._stop_reason = ""
        self._began, self._began_boot = time.time(), _boottime()
        self._kills_before = _out_of_memory_kills()

    def start(self, launch: dict[str, Any]) -> str:
        """Fork, put on record, then let it begin; why it could not, or nothing."""
        gate, open_gate = os.pipe()
        told, tell = os.pipe()
        self._trainer = os.fork()
        if not self._trainer:
            # Its own copy of the other end would keep it waiting for a warden that is dead.
            os.close(open_gate)
            _become_trainer(launch, gate, tell)
        for descriptor in (gate, tell):
            os.close(descriptor)
        try:
            self._put_on_record(launch)
            os.write(open_gate, b"1")
        except OSError as error:
            os.close(open_gate)  # without its byte the child ends instead of beginning
            os.waitpid(self._trainer, 0)
            return f"the start could not be put on record: {error.strerror}"
        os.close(open_gate)
        with os.fdopen(told, "rb") as pipe:
            failure = pipe.read().decode("utf-8", "replace")
        if failure:
            os.waitpid(self._trainer, 0)
        return failure

    def stand_by(self) -> None:
        """Until nothing of the attempt lives: the trainer ends by itself, or is asked to and then made to."""
        deadline: float | None = None
        asked: Any = None
        while self._status is None:
            terms = self._terms
            self._wait(None if deadline is None else deadline - time.monotonic())
            self._alone()
            if self._terms > terms:
                request = _read("stop.json") or self._shutdown()
                grace = max(0.0, float(request.get("grace_s", SHUTDOWN_GRACE_S)))
                # A second request may shorten the grace; a bare second signal ends it.
                repeated = deadline is not None and request.get("asked") == asked
                limit = time.monotonic() + (0.0 if repeated else grace)
                deadline = limit if deadline is None else min(deadline, limit)
                asked, self._stop_reason = request.get("asked"), str(request.get("reason", "operator"))
                self._signal_group(signal.SIGTERM)
            if self._status is None and deadline is not None and time.monotonic() >= deadline:
                self._kill_all()
        self._end_leftovers(deadline)

    def write_exit(self, launch_error: str) -> None:
        """Put the end on record, in space that was set aside at the start: the disk may be full by now."""
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
                "started": self._began,
                "ended": time.time(),
                "duration_s": round(_boottime() - self._began_boot, 3),
                "max_rss_kb": usage.ru_maxrss if usage else 0,
                "user_s": usage.ru_utime if usage else 0.0,
                "system_s": usage.ru_stime if usage else 0.0,
            },
            self._wake,
        )

    def _put_on_record(self, launch: dict[str, Any]) -> None:
        who = {"warden": ProcessIdentity.of(os.getpid()), "trainer": ProcessIdentity.of(self._trainer)}
        identities = {name: None if identity is None else asdict(identity) for name, identity in who.items()}
        _write(
            "process.json",
            {"schema": 1, **identities, "label": launch["label"], "started": self._began, "boottime": self._began_boot},
        )

    def _wait(self, seconds: float | None) -> None:
        """Sleep until a child ends, somebody signals, or the time is over."""
        if seconds is None or seconds > 0:
            select.select([self._wake], [], [], seconds)
        with contextlib.suppress(BlockingIOError):
            self._terms += os.read(self._wake, 4096).count(signal.SIGTERM)

    def _alone(self) -> bool:
        """Collect whatever ended below us, orphans of the trainer included; whether nothing is left at all."""
        try:
            while (ended := os.wait4(-1, os.WNOHANG))[0]:
                if ended[0] == self._trainer:
                    self._status, self._usage = os.waitstatus_to_exitcode(ended[1]), ended[2]
        except ChildProcessError:
            # Every orphan below becomes our child, so the kernel's word is better than any look around /proc.
            return True
        return False

    def _shutdown(self) -> dict[str, Any]:
        request = {"schema": 1, "reason": "shutdown", "by": "signal", "grace_s": SHUTDOWN_GRACE_S, "asked": time.time()}
        with contextlib.suppress(OSError):
            _write("stop.json", request)
        return request

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._trainer, number)

    def _kill_all(self) -> None:
        """Until nothing lives below us: what forks faster than it is found is found the next time."""
        while not self._alone():
            for pid in list_descendants(os.getpid()):
                _signal(pid, signal.SIGKILL)
            self._wait(0.02)

    def _end_leftovers(self, deadline: float | None) -> None:
        self._leftovers = list_descendants(os.getpid())
        end = time.monotonic() + LEFTOVER_GRACE_S
        end = end if deadline is None else min(end, deadline)
        for pid in self._leftovers:
            _signal(pid, signal.SIGTERM)
        while not self._alone() and (left := end - time.monotonic()) > 0:
            self._wait(left)
        self._kill_all()


def _become_trainer(launch: dict[str, Any], gate: int, tell: int) -> None:
    """In the child: wait for the word, then turn into the trainer. Never returns."""
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for name in ("HUP", "INT", "QUIT", "TERM", "CHLD", "PIPE", "XFSZ"):
            signal.signal(signal.Signals[f"SIG{name}"], signal.SIG_DFL)
        if launch.get("memory_mb"):
            size = int(launch["memory_mb"]) << 20
            resource.setrlimit(resource.RLIMIT_AS, (size, size))
        if launch.get("nice"):
            os.nice(int(launch["nice"]))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        argv = [str(word) for word in launch["argv"]]
        if os.read(gate, 1):
            os.chdir(launch["cwd"])
            os.execvpe(argv[0], argv, os.environ)
    except OSError as error:
        place = error.filename or launch["argv"][0]
        os.write(tell, f"{place} cannot be executed: {error.strerror}".encode())
    except BaseException as error:  # noqa: BLE001 - a forked child has nobody to raise to
        os.write(tell, f"{launch['argv'][0]} cannot be executed: {error}".encode())
    finally:
        os._exit(127)


def _listen() -> int:
    """Adopt orphans, and hear of ended children and requests through one descriptor."""
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
    """Seconds since boot, sleep included; unlike the clock on the wall nobody sets it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _out_of_memory_kills() -> int:
    """How many processes the kernel has killed for memory, in our memory cgroup and on the whole machine."""
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


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _read(name: str) -> dict[str, Any] | None:
    try:
        with open(name, "rb") as file:
            data = json.load(file)
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def _remove(name: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name)


def _write(name: str, data: dict[str, Any]) -> None:
    # Its own copy of `files.atomic.write_json`: there is one warden per attempt, and each import is memory it holds.
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


def _reserve() -> None:
    """Space for exit.json. A disk that is full already refuses it; then the record is tried for at the end."""
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
            # Whoever removed the directory, or mounted it read-only, does not want to know.
            if error.errno != errno.ENOSPC:
                return
        readable, _, _ = select.select([wake], [], [], 1.0)
        if readable and signal.SIGTERM in os.read(wake, 4096):
            return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
