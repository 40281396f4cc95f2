"""A trainer that learns nothing and can be told to misbehave: flood, hang, crash, fork, ignore TERM, fill the disk.

It speaks what real trainers speak (our journal, marked lines on stdout, TensorBoard event files), and every number it
says can be computed: metric `m<i>` at update u is u + i, episode e returned e. What it has said so far is in
`echo.json` of its working directory when it ends by itself, so that nobody who checks a reader has to guess.
Standard library only, Python 3.8 or later.
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
Said: TypeAlias = "tuple[str, dict[str, Any]]"
"""Kind and fields of an event."""


class JournalVoice:
    """Writes our journal: whole lines, one write each, one writer."""

    def __init__(self, path: str) -> None:
        self.seq = 0
        directory, name = os.path.split(path)
        self._lock = os.open(os.path.join(directory, f".{name}.lock"), os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def say(self, *events: Said) -> None:
        """Tell events."""
        lines = []
        for kind, fields in events:
            self.seq += 1
            lines.append(json.dumps({"schema": 1, "kind": kind, "seq": self.seq, "time": time.time(), **fields}))
        self.raw("\n".join(lines) + "\n")

    def raw(self, text: str) -> None:
        """Write something that is no event."""
        data = text.encode()
        while data:
            data = data[os.write(self._file, data) :]


class StdoutVoice:
    """Prints marked lines, as a trainer does that somebody adapted."""

    def __init__(self) -> None:
        self.seq = 0

    def say(self, *events: Said) -> None:
        """Tell events."""
        for kind, fields in events:
            self.seq += 1
            self.raw("@palaestra " + json.dumps({"kind": kind, **fields}) + "\n")

    def raw(self, text: str) -> None:
        """Write something that is no event."""
        sys.stdout.write(text)
        sys.stdout.flush()


class EventFileVoice:
    """Writes TensorBoard event files with CleanRL's tags; whatever has no number is not said."""

    def __init__(self, directory: str) -> None:
        os.makedirs(directory, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}.0"
        self._file = os.open(os.path.join(directory, name), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._table, self.seq = _crc_table(), 0
        self._record(_bytes(3, b"brain.Event:2"))

    def say(self, *events: Said) -> None:
        """Tell events."""
        for kind, fields in events:
            if kind == "TrainingStep":
                for name, value in fields["metrics"].items():
                    self._scalar("losses/" + name, value, fields["env_step"])
            elif kind == "EpisodeSummary":
                self._scalar("charts/episodic_return", fields["episode_return"], fields["env_step"])
                self._scalar("charts/episodic_length", fields["length"], fields["env_step"])

    def raw(self, text: str) -> None:
        """Write something that is no event."""
        os.write(self._file, text.encode())

    def _scalar(self, tag: str, value: float, step: int) -> None:
        self.seq += 1
        point = _bytes(1, tag.encode()) + b"\x15" + struct.pack("<f", value)
        self._record(b"\x10" + _varint(step) + _bytes(5, _bytes(1, point)))

    def _record(self, fields: bytes) -> None:
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
    """One run."""

    def __init__(self, wanted: argparse.Namespace) -> None:
        self.wanted = wanted
        self.update, self.episodes, self.first, self.saved = 0, 0, 0, 0
        self.stopped = False
        self.voice: JournalVoice | StdoutVoice | EventFileVoice
        if wanted.speak == "journal":
            self.voice = JournalVoice(wanted.journal)
        else:
            self.voice = StdoutVoice() if wanted.speak == "stdout" else EventFileVoice("runs/echo")

    def run(self) -> int:
        """From the first word to the exit code."""
        if self.wanted.ignore_term:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        else:
            signal.signal(signal.SIGTERM, self._term)
        if self.wanted.resume_from:
            with open(self.wanted.resume_from) as file:
                self.update = self.first = self.saved = json.load(file)["update"]
            self.episodes = self.update // self.wanted.episodes_every if self.wanted.episodes_every else 0
        self._wait_for(self.wanted.wait_for)
        fork(self.wanted.fork)
        self.voice.say(("PhaseChanged", {"phase": "running", "reason": "resumed" if self.first else "started"}))
        sys.stdout.write(f"echo: {self.wanted.steps - self.update} updates to go\n")
        sys.stdout.flush()
        flood(self.wanted.flood)
        self._updates()
        self._wait_for(self.wanted.until)
        if self.stopped:
            return self._leave("stopped", "asked", 130)
        return self._then(self.wanted.then)

    def _term(self, number: int, frame: FrameType | None) -> None:
        self.stopped = True

    def _wait_for(self, path: str) -> None:
        while path and not os.path.exists(path) and not self.stopped:
            time.sleep(0.005)

    def _updates(self) -> None:
        start, begun = time.monotonic(), self.update
        middle = begun + (self.wanted.steps - begun) // 2
        while self.update < self.wanted.steps and not self.stopped:
            due = self.wanted.steps
            if self.wanted.rate:
                due = min(due, begun + 1 + int((time.monotonic() - start) * self.wanted.rate))
            events: list[Said] = []
            while self.update < due and len(events) < 1000:
                events += self._one_update()
                if self.update == middle:
                    self._middle()
                if self._checkpoint_due():
                    break
            if events:
                self.voice.say(*events)
            if self._checkpoint_due():
                self._save()
            if self.wanted.rate and self.update < self.wanted.steps:
                time.sleep(max(0.0, start + (self.update - begun) / self.wanted.rate - time.monotonic()))

    def _checkpoint_due(self) -> bool:
        every = self.wanted.checkpoint_every
        return bool(every and self.update % every == 0 and self.update > self.saved)

    def _one_update(self) -> list[Said]:
        self.update += 1
        update, wanted = self.update, self.wanted
        spike = SPIKE if wanted.spike_every and update % wanted.spike_every == 0 else 0.0
        env_step = update * ENV_STEPS
        lost = float("nan") if wanted.nan_from and update >= wanted.nan_from else 0.0
        metrics = {f"m{i}": update + i + spike + lost for i in range(wanted.metrics)}
        events: list[Said] = [("TrainingStep", {"update": update, "env_step": env_step, "metrics": metrics})]
        if wanted.episodes_every and update % wanted.episodes_every == 0:
            self.episodes += 1
            length = wanted.episodes_every * ENV_STEPS
            fields = {"env_step": env_step, "episode": self.episodes, "env_index": 0, "length": length}
            events.append(("EpisodeSummary", {**fields, "episode_return": float(self.episodes)}))
        return events

    def _middle(self) -> None:
        """What goes wrong while it runs."""
        if self.wanted.corrupt_line == "middle":
            mark = "@palaestra " if isinstance(self.voice, StdoutVoice) else ""
            self.voice.raw(mark + '{"schema":1,"kind":"Traini\n')
        if self.wanted.traceback_alive:
            try:
                raise RuntimeError("told to, and alive")
            except RuntimeError:
                traceback.print_exc()
        if self.wanted.fill_disk:
            fill_disk()

    def _save(self) -> None:
        directory = os.path.join(os.path.dirname(self.wanted.journal), "checkpoints")
        os.makedirs(directory, exist_ok=True)
        path = os.path.join(directory, f"step_{self.update * ENV_STEPS}.json")
        write_json(path, {"update": self.update})
        self.saved = self.update
        with open(path, "rb") as file:
            sha256 = hashlib.sha256(file.read()).hexdigest()
        fields = {"update": self.update, "env_step": self.update * ENV_STEPS, "path": path, "sha256": sha256}
        self.voice.say(("CheckpointSaved", {**fields, "best": False, "metric": None}))

    def _then(self, then: str) -> int:
        word, _, detail = then.partition(":")
        if word == "exit":
            code = int(detail or 0)
            if code:
                sys.stderr.write(f"echo: told to exit with {code}\n")
            return self._leave("failed" if code else "succeeded", "done", code)
        self._told()
        if word == "traceback":
            raise RuntimeError("told to")
        if word == "abort":
            os.abort()
        if word == "signal":
            os.kill(os.getpid(), getattr(signal, "SIG" + detail))
        if word == "oom":
            eat_memory(detail)
        while not self.stopped:  # hang
            time.sleep(0.02)
        return self._leave("stopped", "asked", 130)

    def _leave(self, phase: str, reason: str, code: int) -> int:
        if phase == "stopped" and self.wanted.checkpoint_every and self.update > self.saved:
            self._save()
        self.voice.say(("PhaseChanged", {"phase": phase, "reason": reason}))
        if self.wanted.corrupt_line == "end":
            self.voice.raw('{"schema":1,"kind":"Traini')
        self._told()
        return code

    def _told(self) -> None:
        told = {"seq": self.voice.seq, "first_update": self.first, "updates": self.update, "episodes": self.episodes}
        write_json("echo.json", told)


def write_json(path: str, data: dict[str, int]) -> None:
    """Whole or not at all. Runs in any interpreter, so it cannot import `palaestra.files.atomic`."""
    with open(path + ".tmp", "w") as file:
        json.dump(data, file)
    os.replace(path + ".tmp", path)


def fork(wanted: str) -> None:
    """Children that wait for ever; with `:setsid` orphans in a session of their own."""
    count, _, how = (wanted or "0").partition(":")
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
    """Text on stdout, as fast as it goes."""
    block = ("x" * 1023 + "\n") * 1024
    for _ in range(megabytes):
        sys.stdout.write(block)
    sys.stdout.flush()


def fill_disk() -> None:
    """Write until nothing more fits, and go on."""
    try:
        with open("filling", "wb", buffering=0) as file:
            while True:
                file.write(b"\0" * 65536)
    except OSError as error:
        sys.stderr.write(f"echo: {error}\n")


def eat_memory(how: str) -> None:
    """Touch memory until something stops it; `cgroup` brings a limit of its own, which needs root."""
    if how == "cgroup":
        _enter_small_cgroup(64 << 20)
    eaten = []
    for _ in range(512):
        block = bytearray(8 << 20)
        block[::4096] = b"\1" * len(block[::4096])
        eaten.append(block)
    raise RuntimeError("nothing stopped it at 4 GB: give it memory_mb")


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


def parse(words: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--journal", required=True, help="metrics.jsonl of the attempt")
    parser.add_argument("--speak", choices=("journal", "stdout", "tensorboard"), default="journal")
    parser.add_argument("--steps", type=int, default=100, help="updates")
    parser.add_argument("--rate", type=float, default=0.0, help="updates per second; 0 is as fast as it goes")
    parser.add_argument("--metrics", type=int, default=2)
    parser.add_argument("--episodes-every", type=int, default=10)
    parser.add_argument("--checkpoint-every", type=int, default=0)
    parser.add_argument("--resume-from", default="")
    parser.add_argument("--wait-for", default="", help="say nothing before this file exists")
    parser.add_argument("--until", default="", help="after the updates, wait until this file exists")
    parser.add_argument("--then", default="exit:0")
    parser.add_argument("--ignore-term", action="store_true")
    parser.add_argument("--fork", default="")
    parser.add_argument("--flood", type=int, default=0, metavar="MB")
    parser.add_argument("--fill-disk", action="store_true")
    parser.add_argument("--traceback-alive", action="store_true")
    parser.add_argument("--corrupt-line", choices=("", "middle", "end"), default="")
    parser.add_argument("--spike-every", type=int, default=0)
    parser.add_argument("--nan-from", type=int, default=0)
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(Echo(parse(sys.argv[1:])).run())
