"""`palaestra doctor`: what works on this machine, what would fail, and the command that mends it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from palaestra.cli.terminal import printable, strict_json

__all__ = ["doctor", "finding_lines"]


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False) -> None:
    """Look at this machine: what works, what would fail, and what mends it. Exit code 1 when something must be."""
    from palaestra.files.home import Home
    from palaestra.runs.service.doctor import examine

    found = [asdict(finding) for finding in examine(Home.default())]
    if as_json:
        print(strict_json(found))
    else:
        for line in finding_lines(found):
            print(line)
    if any(finding["level"] == "refused" for finding in found):
        raise typer.Exit(1)


def finding_lines(findings: Sequence[Mapping[str, str]]) -> list[str]:
    """One line per finding, the remedy below it."""
    width = max((len(finding["check"]) for finding in findings), default=0)
    lines = []
    for finding in findings:
        text = printable(" ".join(finding["text"].split()))
        lines.append(f"{finding['level']:<8} {finding['check']:<{width}}  {text}")
        if finding["remedy"] and finding["level"] != "ok":
            lines.append(f"{'':<8} {'':<{width}}  → {finding['remedy']}")
    return lines
