"""A trainer for tests that learns nothing and can fail: flood, hang, crash, fork, ignore SIGTERM, fill the disk.

It reports telemetry like real trainers (journal, marked lines on stdout, TensorBoard event files), and all numbers are
predictable: metric `m<i>` at update u is u + i, episode e returns e. When it exits, it writes the totals to `echo.json`
in its working directory, so that tests can verify a reader. Standard library only, Python 3.8 or later.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import signal
import socket
import struct
import sys
import time
import traceback
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import TypeAlias

ENV_STEPS = 10
"""Environment steps per update."""
SPIKE = 1e6
EventData: TypeAlias = "tuple[str, dict[str, Any]]"
"""Kind and fields of an event."""


class JournalEmitter:
    """Writes the journal: complete lines, one writer."""

    def __init__(self, path: str) -> None:
        self.seq = 0
        directory, name = os.path.split(path)
        self._lock = os.open(os.path.join(directory, f".{name}.lock"), os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def emit(self, *events: EventData) -> None:
        """Write events."""
        lines = []
        for kind, fields in events:
            self.seq += 1
            lines.append(json.dumps({"schema": 1, "kind": kind, "seq": self.seq, "time": time.time(), **fields}))
        self.write_raw("\n".join(lines) + "\n")

    def write_raw(self, text: str) -> None:
        """Write text that is not an event."""
        data = text.encode()
        while data:
            data = data[os.write(self._file, data) :]


class StdoutEmitter:
    """Prints marked lines, like a script with our template."""

    def __init__(self) -> None:
        self.seq = 0

    def emit(self, *events: EventData) -> None:
        """Write events."""
        for kind, fields in events:
            self.seq += 1
            self.write_raw("@palaestra " + json.dumps({"kind": kind, **fields}) + "\n")

    def write_raw(self, text: str) -> None:
        """Write text that is not an event."""
        sys.stdout.write(text)
        sys.stdout.flush()


class EventFileEmitter:
    """Writes TensorBoard event files with CleanRL's tags; skips events without numbers."""

    def __init__(self, directory: str) -> None:
        os.makedirs(directory, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}.0"
        self._file = os.open(os.path.join(directory, name), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._table, self.seq = _crc_table(), 0
        self._write_record(_bytes(3, b"brain.Event:2"))

    def emit(self, *events: EventData) -> None:
        """Write events."""
        for kind, fields in events:
            if kind == "TrainingStep":
                for name, value in fields["metrics"].items():
                    self._write_scalar("losses/" + name, value, fields["env_step"])
            elif kind == "EpisodeSummary":
                self._write_scalar("charts/episodic_return", fields["episode_return"], fields["env_step"])
                self._write_scalar("charts/episodic_length", fields["length"], fields["env_step"])

    def write_raw(self, text: str) -> None:
        """Write text that is not an event."""
        os.write(self._file, text.encode())

    def _write_scalar(self, tag: str, value: float, step: int) -> None:
        self.seq += 1
        point = _bytes(1, tag.encode()) + b"\x15" + struct.pack("<f", value)
        self._write_record(b"\x10" + _varint(step) + _bytes(5, _bytes(1, point)))

    def _write_record(self, fields: bytes) -> None:
        data = b"\x09" + struct.pack("<d", time.time()) + fields
        head = struct.pack("<Q", len(data))
        os.write(self._file, head + self._crc(head) + data + self._crc(data))

    def _crc(self, data: bytes) -> bytes:
        crc = 0xFFFFFFFF
        for byte in data:
            crc = self._table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
        crc ^= 0xFFFFFFFF
        return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def _crc_table() -> list[int]:
    table = []
    for crc in range(256):
        for _ in range(8):
            crc = (crc >> 1) ^ 0x82F63B78 if crc & 1 else crc >> 1
        table.append(crc)
    return table


def _varint(number: int) -> bytes:
    out = b""
    while number > 127:
        out += bytes([number & 127 | 128])
        number >>= 7
    return out + bytes([number])


def _bytes(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


class Echo:
    """One echo run."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.update, self.episodes, self.first, self.saved = 0, 0, 0, 0
        self.stopped = False
        self.emitter: JournalEmitter | StdoutEmitter | EventFileEmitter
        if args.speak == "journal":
            self.emitter = JournalEmitter(args.journal)
        else:
            self.emitter = StdoutEmitter() if args.speak == "stdout" else EventFileEmitter("runs/echo")

    def run(self) -> int:
        """Run to the end; returns the exit code."""
        if self.args.ignore_term:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        else:
            signal.signal(signal.SIGTERM, self._handle_sigterm)
        if self.args.resume_from:
            with open(self.args.resume_from) as file:
                self.update = self.first = self.saved = json.load(file)["update"]
            self.episodes = self.update // self.args.episodes_every if self.args.episodes_every else 0
        self._wait_for(self.args.wait_for)
        fork(self.args.fork)
        self.emitter.emit(("PhaseChanged", {"phase": "running", "reason": "resumed" if self.first else "started"}))
        sys.stdout.write(f"echo: {self.args.steps - self.update} updates to go\n")
        sys.stdout.flush()
        flood(self.args.flood)
        self._run_updates()
        self._wait_for(self.args.until)
        if self.stopped:
            return self._finish("stopped", "asked", 130)
        return self._end(self.args.then)

    def _handle_sigterm(self, number: int, frame: FrameType | None) -> None:
        self.stopped = True

    def _wait_for(self, path: str) -> None:
        while path and not os.path.exists(path) and not self.stopped:
            time.sleep(0.005)

    def _run_updates(self) -> None:
        start, first = time.monotonic(), self.update
        middle = first + (self.args.steps - first) // 2
        while self.update < self.args.steps and not self.stopped:
            due = self.args.steps
            if self.args.rate:
                due = min(due, first + 1 + int((time.monotonic() - start) * self.args.rate))
            events: list[EventData] = []
            while self.update < due and len(events) < 1000:
                events += self._run_update()
                if self.update == middle:
                    self._fail_midway()
                if self._is_checkpoint_due():
                    break
            if events:
                self.emitter.emit(*events)
            if self._is_checkpoint_due():
                self._save()
            if self.args.rate and self.update < self.args.steps:
                time.sleep(max(0.0, start + (self.update - first) / self.args.rate - time.monotonic()))

    def _is_checkpoint_due(self) -> bool:
        every = self.args.checkpoint_every
        return bool(every and self.update % every == 0 and self.update > self.saved)

    def _run_update(self) -> list[EventData]:
        self.update += 1
        update, args = self.update, self.args
        spike = SPIKE if args.spike_every and update % args.spike_every == 0 else 0.0
        env_step = update * ENV_STEPS
        nan = float("nan") if args.nan_from and update >= args.nan_from else 0.0
        metrics = {f"m{i}": update + i + spike + nan for i in range(args.metrics)}
        events: list[EventData] = [("TrainingStep", {"update": update, "env_step": env_step, "metrics": metrics})]
        if args.episodes_every and update % args.episodes_every == 0:
            self.episodes += 1
            length = args.episodes_every * ENV_STEPS
            fields = {"env_step": env_step, "episode": self.episodes, "env_index": 0, "length": length}
            events.append(("EpisodeSummary", {**fields, "episode_return": float(self.episodes)}))
        return events

    def _fail_midway(self) -> None:
        """The failures that happen after half of the updates."""
        if self.args.corrupt_line == "middle":
            mark = "@palaestra " if isinstance(self.emitter, StdoutEmitter) else ""
            self.emitter.write_raw(mark + '{"schema":1,"kind":"Traini\n')
        if self.args.traceback_alive:
            try:
                raise RuntimeError("requested, and still running")
            except RuntimeError:
                traceback.print_exc()
        if self.args.fill_disk:
            fill_disk()

    def _save(self) -> None:
        directory = os.path.join(os.path.dirname(self.args.journal), "checkpoints")
        os.makedirs(directory, exist_ok=True)
        path = os.path.join(directory, f"step_{self.update * ENV_STEPS}.json")
        write_json(path, {"update": self.update})
        self.saved = self.update
        with open(path, "rb") as file:
            sha256 = hashlib.sha256(file.read()).hexdigest()
        fields = {"update": self.update, "env_step": self.update * ENV_STEPS, "path": path, "sha256": sha256}
        self.emitter.emit(("CheckpointSaved", {**fields, "best": False, "metric": None}))

    def _end(self, then: str) -> int:
        word, _, detail = then.partition(":")
        if word == "exit":
            code = int(detail or 0)
            if code:
                sys.stderr.write(f"echo: exiting with {code} as requested\n")
            return self._finish("failed" if code else "succeeded", "done", code)
        self._write_totals()
        if word == "traceback":
            raise RuntimeError("requested by then=traceback")
        if word == "abort":
            os.abort()
        if word == "signal":
            os.kill(os.getpid(), getattr(signal, "SIG" + detail))
        if word == "oom":
            exhaust_memory(detail)
        while not self.stopped:  # hang
            time.sleep(0.02)
        return self._finish("stopped", "asked", 130)

    def _finish(self, phase: str, reason: str, code: int) -> int:
        if phase == "stopped" and self.args.checkpoint_every and self.update > self.saved:
            self._save()
        self.emitter.emit(("PhaseChanged", {"phase": phase, "reason": reason}))
        if self.args.corrupt_line == "end":
            self.emitter.write_raw('{"schema":1,"kind":"Traini')
        self._write_totals()
        return code

    def _write_totals(self) -> None:
        totals = {
            "seq": self.emitter.seq,
            "first_update": self.first,
            "updates": self.update,
            "episodes": self.episodes,
        }
        write_json("echo.json", totals)


def write_json(path: str, data: dict[str, int]) -> None:
    """Write a file atomically; `palaestra.files.atomic` cannot be imported here."""
    with open(path + ".tmp", "w") as file:
        json.dump(data, file)
    os.replace(path + ".tmp", path)


def fork(args: str) -> None:
    """Start child processes that never exit; with `:setsid`, orphans in new sessions."""
    count, _, how = (args or "0").partition(":")
    for _ in range(int(count)):
        if os.fork():
            continue
        if how == "setsid":
            os.setsid()
            if os.fork():
                os._exit(0)
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        while True:
            time.sleep(3600)


def flood(megabytes: int) -> None:
    """Print text as fast as possible."""
    block = ("x" * 1023 + "\n") * 1024
    for _ in range(megabytes):
        sys.stdout.write(block)
    sys.stdout.flush()


def fill_disk() -> None:
    """Fill the disk, and continue."""
    try:
        with open("filling", "wb", buffering=0) as file:
            while True:
                file.write(b"\0" * 65536)
    except OSError as error:
        sys.stderr.write(f"echo: {error}\n")


def exhaust_memory(how: str) -> None:
    """Allocate memory until the process is stopped; `cgroup` sets a limit first, which needs root."""
    if how == "cgroup":
        _enter_small_cgroup(64 << 20)
    blocks = []
    for _ in range(512):
        block = bytearray(8 << 20)
        block[::4096] = b"\1" * len(block[::4096])
        blocks.append(block)
    raise RuntimeError("4 GB were allocated without a limit: set memory_mb")


def _enter_small_cgroup(limit: int) -> None:
    name = f"echo_{os.getpid()}"
    if os.path.exists("/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        path, knob = "/sys/fs/cgroup/memory/" + name, "memory.limit_in_bytes"
    else:
        path, knob = "/sys/fs/cgroup/" + name, "memory.max"
    os.makedirs(path, exist_ok=True)
    for file, value in ((knob, limit), ("cgroup.procs", os.getpid())):
        with open(os.path.join(path, file), "w") as handle:
            handle.write(str(value))


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--journal", required=True, help="metrics.jsonl of the attempt")
    parser.add_argument("--speak", choices=("journal", "stdout", "tensorboard"), default="journal")
    parser.add_argument("--steps", type=int, default=100, help="updates")
    parser.add_argument("--rate", type=float, default=0.0, help="updates per second (0: as fast as possible)")
    parser.add_argument("--metrics", type=int, default=2)
    parser.add_argument("--episodes-every", type=int, default=10)
    parser.add_argument("--checkpoint-every", type=int, default=0)
    parser.add_argument("--resume-from", default="")
    parser.add_argument("--wait-for", default="", help="wait for this file before the first update")
    parser.add_argument("--until", default="", help="wait for this file after the last update")
    parser.add_argument("--then", default="exit:0")
    parser.add_argument("--ignore-term", action="store_true")
    parser.add_argument("--fork", default="")
    parser.add_argument("--flood", type=int, default=0, metavar="MB")
    parser.add_argument("--fill-disk", action="store_true")
    parser.add_argument("--traceback-alive", action="store_true")
    parser.add_argument("--corrupt-line", choices=("", "middle", "end"), default="")
    parser.add_argument("--spike-every", type=int, default=0)
    parser.add_argument("--nan-from", type=int, default=0)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(Echo(parse_args(sys.argv[1:])).run())
