"""Does background collection survive half an hour of murder? Collectors are killed and frozen at random, and every step
they took is looked for: learned from once, counted as dropped, or still unread.

Three parts: a collector process that is killed (SIGKILL) or frozen (SIGSTOP) every few seconds, once with a ring that
blocks and once with one that overwrites; then a collector thread whose environments raise at random. The environments
count their steps in files of their own, outside everything that is tested. Run it as `python -m benchmarks.soak
[--minutes N]`; it writes `results/soak.json` and `results/soak.md` and fails when a check does.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv

from benchmarks import machine
from benchmarks.learning import RESULTS
from benchmarks.slow_policy import SlowPolicy
from palaestra.actor.asynchronous import AsyncConfig
from palaestra.actor.collector_process import CollectorProcess
from palaestra.actor.collector_thread import STEPS
from palaestra.env.make import EnvConfig, make_env
from palaestra.learner.ppo import PPO
from palaestra.train.trainer import Trainer

NUM_ENVS, LENGTH = 4, 64
STEP_TIMEOUT = 3.0
STALL_S = 90.0
"""Without an update for this long there is a deadlock: starting, detecting a hang and killing take far less."""
BETWEEN_BLOWS = (2.0, 12.0)
FROZEN = 0.25
"""Share of the blows that freeze instead of kill."""
RSS_GROWTH = 0.05

_MADE = itertools.count()


class Counted(gymnasium.Wrapper):
    """CartPole that counts its steps in a file, which outlives a process that is killed; may raise at random."""

    def __init__(self, folder: str, fault: float = 0.0) -> None:
        super().__init__(gymnasium.wrappers.TimeLimit(CartPoleEnv(), 500))
        number = next(_MADE)
        # One is tried out before the others are made for training; what it does then is no experience.
        tried = number % (NUM_ENVS + 1) == 0
        self._fault = 0.0 if tried else fault
        self._random = random.Random(number)
        name = f"{'tried' if tried else 'used'}-{os.getpid()}-{number}"
        self._taken = np.memmap(Path(folder) / name, np.int64, mode="w+", shape=(1,))

    def step(self, action: Any) -> Any:
        """One step, counted when it is over."""
        if self._random.random() < self._fault:
            raise RuntimeError("the simulator lost its footing")
        result = super().step(action)
        self._taken[0] += 1
        return result


def count_steps_in(folder: str) -> int:
    """Steps that all environments of training took."""
    files = [path for path in Path(folder).iterdir() if path.name.startswith("used")]
    return sum(int(np.fromfile(path, np.int64)[0]) for path in files if path.stat().st_size)


class Ledger(Trainer):
    """A trainer that notes which steps it learns from."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.learned_steps = 0
        self.learned_twice = 0
        self.learned_until: dict[int, int] = {}
        """By stream: the step up to which everything that came has been learned from."""
        self.too_stale = 0

    def learn(self, rollout: Any) -> dict[str, float]:
        streams, steps = rollout["stream"][0].tolist(), rollout["env_step"][:, 0].tolist()
        assert steps == list(range(steps[0], steps[0] + LENGTH))
        version = self.n_updates
        metrics = super().learn(rollout)
        for stream in streams:
            self.learned_twice += max(0, self.learned_until.get(stream, 0) - steps[0])
            self.learned_until[stream] = steps[-1] + 1
        self.learned_steps += rollout["reward"].numel()
        self.too_stale += int((version - rollout["policy_version"] > self.max_staleness).sum())
        return metrics

    max_staleness = 1


@dataclass
class Watch:
    """Looks at the trainer once a second: progress, memory, file descriptors, threads."""

    rss: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    updates: int = 0
    longest_gap: float = 0.0
    moved_at: float = field(default_factory=time.monotonic)
    done: threading.Event = field(default_factory=threading.Event)

    def progress(self) -> None:
        """An update has ended."""
        self.updates += 1
        now = time.monotonic()
        self.longest_gap = max(self.longest_gap, now - self.moved_at)
        self.moved_at = now

    def run(self) -> None:
        """Until done; a deadlock ends the program, with what every thread was doing."""
        while not self.done.wait(1.0):
            if self.updates > 2:  # libraries load with the first
                self._sample()
            if time.monotonic() - self.moved_at > STALL_S:
                faulthandler.dump_traceback()
                print(f"no update for {STALL_S:g} s", file=sys.stderr, flush=True)
                os._exit(1)

    def _sample(self) -> None:
        self.rss.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
        self.descriptors.append(len(os.listdir("/proc/self/fd")))
        self.threads.append(len(os.listdir("/proc/self/task")))


def thirds(samples: list[int]) -> tuple[float, float]:
    """Mean of the first and of the last third, after the first tenth, in which everything warms up."""
    settled = samples[len(samples) // 10 :]
    third = max(1, len(settled) // 3)
    return float(np.mean(settled[:third])), float(np.mean(settled[-third:]))


class Murderer:
    """Kills or freezes the collector's process every few seconds."""

    def __init__(self, filler: CollectorProcess, seed: int) -> None:
        self._filler, self._random = filler, random.Random(seed)
        self.kills = self.freezes = self.kills_of_starting = 0
        self._last_was_early = False

    def run(self, done: threading.Event) -> None:
        """Until done."""
        while not done.wait(self._random.uniform(*BETWEEN_BLOWS)):
            freeze = self._random.random() < FROZEN
            starting = bool(self._filler._heartbeat[STEPS] < 1)
            # A first step has two minutes of grace, so a process that is frozen before it would look like a deadlock;
            # so would a machine too busy to start a process between two blows.
            if starting and (freeze or self._last_was_early):
                continue
            if self._strike(signal.SIGSTOP if freeze else signal.SIGKILL):
                self._last_was_early = starting
                self.freezes += freeze
                self.kills += not freeze
                self.kills_of_starting += starting

    def _strike(self, number: signal.Signals) -> bool:
        """Through a descriptor of the process: its pid may have been reused by then."""
        try:
            pid = self._filler.pid
            if pid is None:
                return False
            handle = os.pidfd_open(pid)
        except (OSError, ValueError):
            return False
        try:
            parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) != os.getpid():
                return False
            signal.pidfd_send_signal(handle, number)
        except OSError:
            return False
        finally:
            os.close(handle)
        return True


def soak(
    collector: str,
    seconds: float,
    *,
    overflow: str = "block",
    fault: float = 0.0,
    learn_seconds: float = 0.003,
    seed: int = 0,
) -> dict[str, Any]:
    """Train for some time under attack; returns the counts and the failed checks."""
    children_before = children()
    with tempfile.TemporaryDirectory() as folder:
        env = EnvConfig(
            id="benchmarks.soak:Counted", num_envs=NUM_ENVS, kwargs={"folder": folder, "fault": fault},
            vectorization="in_process",
        )  # fmt: skip
        vector = make_env(env)
        policy = SlowPolicy(vector.observation_space, vector.action_space, seed=seed)
        # Waiting, so that the attacks and not the cores set the pace.
        policy.infer_seconds, policy.learn_seconds, policy.learn_rows = 0.003, learn_seconds, LENGTH
        background = AsyncConfig(
            collector=collector, overflow=overflow, step_timeout=STEP_TIMEOUT, collector_restarts=10**9
        )
        trainer = Ledger(
            policy, vector, PPO(n_epochs=4, batch_size=LENGTH), seed=seed, asynchronous=background, env_config=env
        )
        watch, murderer = Watch(), None
        threading.Thread(target=watch.run, daemon=True).start()
        until = time.monotonic() + seconds
        final: dict[str, float] = {}

        def after_update(_: Trainer, metrics: dict[str, float]) -> bool:
            nonlocal murderer
            watch.progress()
            final.update(metrics)
            if murderer is None and collector == "process":
                murderer = Murderer(trainer.training.source._worker, seed)
                threading.Thread(target=murderer.run, args=(watch.done,), daemon=True).start()
            return time.monotonic() < until

        try:
            trainer.train(10**12, LENGTH, callback=after_update)
        finally:
            watch.done.set()
            vector.close()
        return _findings(trainer, watch, murderer, count_steps_in(folder), children() - children_before) | {
            "collector": collector, "overflow": overflow, "seconds": seconds,
        }  # fmt: skip


def _findings(
    trainer: Ledger, watch: Watch, murderer: Murderer | None, taken: int, left_behind: set[int]
) -> dict[str, Any]:
    source = trainer.training.source
    ring = source.ring
    unread = len(ring) * LENGTH * NUM_ENVS
    accounted = trainer.learned_steps + ring.dropped_steps + unread
    restarts = len(source.failures)
    # A collector that is struck down in the middle of a step has taken it in some environments without reporting it.
    in_flight = NUM_ENVS * (restarts + 1)
    rss = thirds(watch.rss)
    descriptors, threads = thirds(watch.descriptors), thirds(watch.threads)
    checks = {
        "no step learned from twice": trainer.learned_twice == 0,
        "no step staler than allowed": trainer.too_stale == 0,
        "every step accounted for": 0 <= taken - accounted <= in_flight,
        "learned steps are the trainer's count": trainer.learned_steps == trainer.total_timesteps,
        "memory flat": rss[1] <= rss[0] * (1 + RSS_GROWTH),
        "file descriptors flat": descriptors[1] <= descriptors[0] + 1,
        "threads flat": threads[1] <= threads[0] + 1,
        "no process left behind": not left_behind,
        "collectors were replaced": restarts > 0,
    }
    return {
        "updates": trainer.n_updates,
        "taken": taken, "learned": trainer.learned_steps, "dropped": ring.dropped_steps, "unread": unread,
        "learned_twice": trainer.learned_twice,
        "in_flight_when_struck": taken - accounted, "in_flight_bound": in_flight,
        "restarts": restarts,
        "kills": murderer.kills if murderer else 0, "freezes": murderer.freezes if murderer else 0,
        "kills_of_starting": murderer.kills_of_starting if murderer else 0,
        "hangs_noticed": sum("hangs" in failure for failure in source.failures),
        "streams": len(trainer.learned_until),
        "longest_gap_seconds": round(watch.longest_gap, 2),
        "rss_mb": [round(part / 2**20, 1) for part in rss],
        "descriptors": descriptors, "threads": threads,
        "episode_return": float(np.mean(trainer.episode_rewards)),
        "failed_checks": [name for name, passed in checks.items() if not passed],
    }  # fmt: skip


def children() -> set[int]:
    """Living processes that this one started, but for the one that multiprocessing keeps for its own books."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            found |= {int(pid) for pid in (task / "children").read_text().split()}
        except OSError:
            continue
    return {pid for pid in found if b"resource_tracker" not in _command(pid)}


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


PARTS = (
    (0.5, {"collector": "process"}),
    (0.25, {"collector": "process", "overflow": "overwrite_oldest", "learn_seconds": 0.03}),
    (0.25, {"collector": "thread", "fault": 1e-3}),
)
"""Share of the time, and what is attacked."""


def markdown(found: dict[str, Any]) -> str:
    """A row per part."""
    lines = [
        "| collector | ring | minutes | killed | frozen | replaced | steps taken | learned | dropped | unread "
        "| in flight when struck | learned twice | longest pause | memory, first and last third | checks |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for part in found["parts"]:
        failed = part["failed_checks"]
        lines.append(
            f"| {part['collector']} | {part['overflow']} | {part['seconds'] / 60:.1f} | {part['kills']} "
            f"| {part['freezes']} | {part['restarts']} | {part['taken']:,} | {part['learned']:,} "
            f"| {part['dropped']:,} | {part['unread']:,} | {part['in_flight_when_struck']} "
            f"| {part['learned_twice']} "
            f"| {part['longest_gap_seconds']:.1f} s | {part['rss_mb'][0]:.0f}, {part['rss_mb'][1]:.0f} MB "
            f"| {'all passed' if not failed else 'FAILED: ' + ', '.join(failed)} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Every part, one after the other, or the one asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="for all parts together (30)")
    parser.add_argument("--part", type=int, choices=range(len(PARTS)), help="only this one")
    parser.add_argument("--seed", type=int, default=0, help="of the attacks (0)")
    parser.add_argument("--dry", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    failed = False
    for number, (share, what) in enumerate(PARTS):
        if arguments.part not in (None, number):
            continue
        part = {"part": number, "machine": machine.facts()}
        part |= soak(seconds=60 * arguments.minutes * share, seed=arguments.seed, **what)
        failed |= bool(part["failed_checks"])
        print(json.dumps(part), flush=True)
        if not arguments.dry:
            _store(part)
    return int(failed)


def _store(part: dict[str, Any]) -> None:
    stored = RESULTS / "soak.json"
    known = json.loads(stored.read_text())["parts"] if stored.exists() else []
    parts = sorted([*(one for one in known if one["part"] != part["part"]), part], key=lambda one: one["part"])
    stored.write_text(json.dumps({"parts": parts}, indent=1) + "\n")
    (RESULTS / "soak.md").write_text(markdown({"parts": parts}))


if __name__ == "__main__":
    sys.exit(main())
