"""The tables of `benchmarks.overlap`, as Markdown."""

from __future__ import annotations

from typing import Any

__all__ = ["markdown"]

ABOUT = """With collecting C and learning L seconds per update, taking turns costs C + L and overlapping at best
max(C, L): the ideal is (C + L) / max(C, L), never more than 2. C and L come from the synchronous runs, which take turns
with the asynchronous ones. *Speed-up* leaves out the first update, before which nothing can overlap; *whole run* has
it, and the start of the collector's process where there is one.
"""

SLOW = """### A policy that waits

CartPole, one environment, segments of 8 steps (9 inferences), 10 epochs of one minibatch, `collector: thread`,
`max_staleness: 1`. Inference and learning sleep, as for models on a remote accelerator. The default correction looks at
stale experience once more without gradients, which is simulated as a third of a minibatch: learning takes 3.3 % longer
than in the synchronous run, and that counts against the speed-up (with 4 epochs it would be 8.3 %).
More than 100 % of the ideal is noise: other work shared the cores.

| inference | L / C | C | L | ideal | speed-up | of ideal | whole run |
| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
"""

BATCH = """
### Inference for several environments at once

The same at 100 ms and L = C. Four environments share each inference; a minibatch takes as long for 32 rows as for 8,
as on an accelerator that is not full.

| environments | steps/s in turn | steps/s overlapped | speed-up | against one environment in turn |
| ---: | ---: | ---: | ---: | ---: |
"""

BUSY = """
### Both sides busy, two cores

No sleeping: environment, policy and learner compute, each side with one thread of torch. 12 updates per run. Both cores
were never wholly free, so these are noisy and rather too low. The row of TableReach was taken twice, because other work
started during the first time: thread 0.85 and process 0.69 then, the row below in three rounds after that. *Whole run*
of so few updates is mostly the start of the process, about 5 s.

| task | load before | C | L | ideal | thread | of ideal | process | of ideal | whole run, thread | whole run, process |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
"""


def markdown(found: dict[str, Any]) -> str:
    """What was measured of the three parts."""
    parts = [ABOUT, "\n"]
    if "slow" in found:
        parts += [SLOW, *(_slow(row) for row in found["slow"]["rows"])]
    if "batch" in found:
        rows = found["batch"]["rows"]
        first = rows[0]["contenders"]["sync"]["steps_per_second"]
        parts += [BATCH, *(_batch(row, first) for row in rows)]
    if "busy" in found:
        parts += [BUSY, *(_busy(row) for row in found["busy"]["rows"])]
    return "".join(parts)


def _slow(row: dict[str, Any]) -> str:
    ours = row["contenders"]["thread"]
    return (
        f"| {1000 * row['seconds']:.0f} ms | {row['ratio']:g} | {_s(row['collect'])} | {_s(row['learn'])} "
        f"| {row['ideal']:.2f} | {ours['speedup']:.2f} | {100 * ours['of_ideal']:.0f} % | {ours['whole_run']:.2f} |\n"
    )


def _batch(row: dict[str, Any], first: float) -> str:
    sync, ours = row["contenders"]["sync"], row["contenders"]["thread"]
    return (
        f"| {row['num_envs']} | {sync['steps_per_second']:.1f} | {ours['steps_per_second']:.1f} "
        f"| {ours['speedup']:.2f} | {ours['steps_per_second'] / first:.2f} |\n"
    )


def _busy(row: dict[str, Any]) -> str:
    thread, process = row["contenders"]["thread"], row["contenders"]["process"]
    return (
        f"| {row['title']} | {row['load']:.1f} | {_s(row['collect'])} | {_s(row['learn'])} | {row['ideal']:.2f} "
        f"| {thread['speedup']:.2f} | {100 * thread['of_ideal']:.0f} % "
        f"| {process['speedup']:.2f} | {100 * process['of_ideal']:.0f} % "
        f"| {thread['whole_run']:.2f} | {process['whole_run']:.2f} |\n"
    )


def _s(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.0f} ms"
