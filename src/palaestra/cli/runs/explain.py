"""How the metrics of a program are found, for `runs start --explain` and for runs in which none was found."""

from __future__ import annotations

import os

from palaestra.cli.terminal import format_columns
from palaestra.runs.ingest.printed_metrics import MAX_NAMES, MAX_TEXT, RULES, STEP_NAMES
from palaestra.runs.runners.script.command_line import parse_command
from palaestra.runs.wire import JsonObject

_PYTHON = "import palaestra.log; palaestra.log.step(step, loss=loss)"
_ANY_LANGUAGE = '{"kind": "TrainingStep", "env_step": 100, "metrics": {"loss": 0.25}}'


def format_rules() -> list[str]:
    """The rules by which metrics of a program are found."""
    lines = [
        "Metrics of a program are read from, in this order:",
        f"  1. palaestra.log:  {_PYTHON}",
        f"     or a line in the file $PALAESTRA_LOG:  {_ANY_LANGUAGE}",
        f"     or the same line on stdout after @palaestra:  @palaestra {_ANY_LANGUAGE}",
        "  2. TensorBoard event files that its processes create, below the working directory or open elsewhere.",
        "     charts/episodic_return and charts/episodic_length are episodes; other tags are metrics.",
        "  3. JSON lines on stdout, unless it reports by 1 or 2.",
        "  4. Printed text, unless it reports by 1, 2 or 3.",
        "",
        "Printed text, with what each example means:",
    ]
    for rule in RULES:
        lines.append(f"  {rule.title}")
        lines += [f"      {line}" for line in rule.example.split("\n")]
        values = ", ".join(f"{name} = {value:g}" for name, value in rule.metrics.items())
        lines.append(f"    -> step {rule.step:,}: {values}")
    best = ", ".join(name for names in STEP_NAMES for name in sorted(names))
    return [
        *lines,
        "",
        f"Words for the step, the best first: {best}.",
        "A line without a step belongs to the last step, and needs a number with a decimal point or a fraction.",
        "Before the first step such lines are counted once they are repeated. What is printed once is taken for a",
        "setting, unless the program prints no other metric.",
        f"Lines longer than {MAX_TEXT:,} characters are searched for JSON only. At most {MAX_NAMES:,} names are kept.",
    ]


def describe_rules() -> JsonObject:
    """The rules as JSON data."""
    return {
        "log": {"python": _PYTHON, "line": _ANY_LANGUAGE, "variable": "PALAESTRA_LOG", "stdout_prefix": "@palaestra "},
        "printed": [
            {"title": rule.title, "example": rule.example, "step": rule.step, "metrics": dict(rule.metrics)}
            for rule in RULES
        ],
        "steps": [sorted(names) for names in STEP_NAMES],
    }


def describe_program(words: list[str]) -> JsonObject:
    """How the words of a command are understood, as JSON data."""
    command = parse_command(words)
    return {"name": command.name, "directory": os.getcwd(), "configuration": command.to_config()}


def format_program(words: list[str]) -> list[str]:
    """How the words of a command are understood."""
    program = describe_program(words)
    configuration = program["configuration"]
    values = [(f"  {key}", str(value)) for key, value in configuration.items() if key != "program"]
    return [
        "",
        f"The command starts {' '.join(configuration['program'])} in {program['directory']}.",
        f"The id of the run begins with {program['name']}.",
        *(["Its configuration, which KEY=VALUE before the dashes changes:", *format_columns(values)] if values else []),
    ]


def format_missing_metrics(directory: str, output_lines: int) -> list[str]:
    """What was looked for in a program that ended without metrics, and how to report them."""
    return [
        "",
        "No metrics were found. Looked for:",
        "  lines of palaestra.log            none",
        f"  TensorBoard files of its processes  none with numbers below {directory}",
        f"  JSON lines and printed metrics    none in {output_lines:,} lines of output",
        "Report them from Python with:",
        f"  {_PYTHON}",
        "or append such lines to the file $PALAESTRA_LOG, from any language:",
        f"  {_ANY_LANGUAGE}",
        "palaestra runs start --explain lists every rule.",
    ]
