"""What `benchmarks.kubernetes` found, as a section of a page."""

from __future__ import annotations

import statistics
from typing import Any

__all__ = ["markdown"]


def _quantile(numbers: list[float], q: float) -> float:
    ordered = sorted(numbers)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def _seconds(name: str, numbers: list[float]) -> str:
    middle, tail = _quantile(numbers, 0.5), _quantile(numbers, 0.9)
    return f"| {name} | {len(numbers)} | **{middle:.2f}** | {tail:.2f} | {min(numbers):.2f} | {max(numbers):.2f} |"


def _steps(name: str, found: dict[str, list[float]]) -> list[str]:
    rows = []
    for way in ("straight", "through"):
        numbers = found[f"{way}_ms"]
        p50, p90, p99 = (_quantile(numbers, q) for q in (0.5, 0.9, 0.99))
        rows.append(f"| {name}, {way} | {len(numbers)} | **{p50:.2f}** | {p90:.2f} | **{p99:.2f}** |")
    return rows


def markdown(result: dict[str, Any]) -> str:
    """Tables of seconds, milliseconds and megabytes."""
    parallel, inside = result["parallel"], result.get("inside")
    openings = [
        _seconds("open, no spare", result["no_spare"]["open_s"]),
        _seconds("open, a spare waits", result["one_spare"]["open_s"]),
        _seconds(f"open, {parallel['number']} at once, each", parallel["open_s"]),
        _seconds("close: the cluster has no such pod", result["no_spare"]["close_s"]),
        _seconds("close: nothing answers at its address", result["no_spare"]["silent_s"]),
    ]
    steps = _steps("gateway outside", result["steps"])
    episodes = list(result["episodes"])
    if inside is not None:
        openings.insert(2, _seconds("open, a spare waits, gateway in the cluster", inside["one_spare"]["open_s"]))
        steps += _steps("gateway in the cluster", inside["steps"])
        episodes += inside["episodes"]
    memory, machine, cluster = parallel["memory_mb"], result["machine"], result["cluster"]
    held = (
        f"{statistics.median(memory):.0f} MB (median of {len(memory)}, on `data_entry/form`)" if memory else "unknown"
    )
    images = ", ".join(f"{name.rpartition('/')[2]} {size:.0f} MB" for name, size in sorted(result["images_mb"].items()))
    return "\n".join([
        "<!-- written by `python -m benchmarks.kubernetes` -->", "",
        "| seconds | n | p50 | p90 | least | most |", "| --- | --- | --- | --- | --- | --- |", *openings, "",
        f"{parallel['number']} opened at once were all open after {parallel['all_open_s']:.1f} s, and all gone "
        f"{parallel['all_closed_s']:.1f} s after they were closed.", "",
        "| act with its picture at 160x210, ms | n | p50 | p90 | p99 |", "| --- | --- | --- | --- | --- |", *steps, "",
        f"Memory of a session pod: {held}. Images, unpacked: {images}. "
        f"{len(episodes)} of {len(episodes)} scripted episodes were solved "
        f"({', '.join(sorted({one['task'] for one in episodes}))}).", "",
        f"Kubernetes {cluster['kubeletVersion']}, {cluster['containerRuntimeVersion'].replace('://', ' ')}, everything "
        f"on one machine: {machine['processor']}, {machine['cores']} cores, Python {machine['python']}, load "
        f"{machine['load_at_start']} before and {result['load_at_end']} after; {machine['date']}.", "",
    ])  # fmt: skip
