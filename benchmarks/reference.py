"""Writes what comes from code or measurement: configuration keys, tables of benchmarks, and schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from pydantic.fields import FieldInfo

from palaestra.cli.catalog import configuration_sections
from palaestra.config import Section
from palaestra.learner.registry import ALGORITHMS
from palaestra.learner.transitions import TransitionConfig
from palaestra.runs.runners.palaestra import SCHEMAS_FILE
from palaestra.train.config import SECTIONS

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = Path(__file__).parent / "results"

INTRODUCTION = """# Configuration

This page lists every key of a run with its default. A run is one YAML or JSON file (JSON may carry comments), and any
key can be set on the command line: `palaestra train FILE algorithm.learning_rate=1e-3 policy.hidden=[128,128]`.

```yaml
env: {id: CartPole-v1, num_envs: 4}
algorithm: {name: ppo, learning_rate: 2.5e-4, n_epochs: 4, batch_size: 128}
trainer: {total_timesteps: 500_000, rollout_length: 128}
```

- Only `env.id` is required; with `dataset.id`, the environment of the dataset is the default.
- Values are read as YAML. `--seed N` is short for `trainer.seed=N`. Unknown keys are refused with the nearest name. The
  result is written to `resolved.json` in the run directory.
- `algorithm: {name: ppo, cfg: {…}}` and `trainer: {buffer_size: …, iterations: …}` are other spellings of
  `algorithm: {name: ppo, …}` and `trainer: {rollout_length: …, total_timesteps: …}`.
- A run that cannot fit into the memory of the machine or container is refused, with the estimate and the limit.
- Observations of type uint8 are pictures, read by a convolutional network, if they have three axes, or bounds 0 and 255
  and two axes (grey, sides of at least 8) or four (a stack, up to four channels each). Everything else, also floats
  that look like a picture, is numbers for a multilayer perceptron. Pixels of another shape are refused.
- A package adds environments by an entry point that names a module to import or a function to call:
  `[project.entry-points."palaestra.environments"]`, `mazes = "my_package.mazes:register"`.

`palaestra schema NAME` prints the same as JSON Schema. `make docs` generates this page from the code.
"""


_TABLE = re.compile(r"(<!-- table: ([\w.]+) (\d+) -->\n).*?(<!-- end -->)", re.DOTALL)


def benchmarks_page(page: str) -> str:
    """The page on benchmarks with its tables as they were measured; its text is written by hand."""

    def replace(match: re.Match[str]) -> str:
        begin, name, number, end = match.groups()
        tables = re.findall(r"(?:^\|.*\n)+", (RESULTS / name).read_text(encoding="utf-8"), re.MULTILINE)
        # The blank line before the comment ends the table for Markdown.
        return f"{begin}{tables[int(number) - 1]}\n{end}"

    return _TABLE.sub(replace, page)


def configuration_page() -> str:
    """Every key of every section, as Markdown. Algorithms that share most of their keys share a table."""
    algorithms = {name: SECTIONS[name] for name in ALGORITHMS["transitions"]}
    networks = {name: section for name, section in algorithms.items() if issubclass(section, TransitionConfig)}
    tables = [name for name in algorithms if name not in networks]
    titled = {name: _table(SECTIONS[name]) for name in ("env", "dataset", "policy")}
    titled |= {f"algorithm (name: {name})": _table(SECTIONS[name]) for name in ALGORITHMS["rollouts"]}
    titled[f"algorithm (name: {' or '.join(networks)})"] = _joint_table(networks)
    titled[f"algorithm (name: {' or '.join(tables)})"] = _table(SECTIONS[tables[0]])
    titled |= {name: _table(SECTIONS[name]) for name in ("trainer", "actors", "telemetry")}
    return "\n".join([INTRODUCTION, *(f"## {title}\n\n{table}" for title, table in titled.items())])


def _joint_table(sections: Mapping[str, type[Section]]) -> str:
    """The keys of several algorithms, with the algorithms that have them."""
    keys: dict[tuple[str, str], dict[str, list[str]]] = {}
    for algorithm, section in sections.items():
        for name, field in section.model_fields.items():
            algorithms = keys.setdefault((name, _describe(field)), {})
            algorithms.setdefault(_default(field), []).append(algorithm)
    rows = ["| key | algorithm | default | what it does |", "| --- | --- | --- | --- |"]
    for (name, text), algorithms in keys.items():
        users = [algorithm for group in algorithms.values() for algorithm in group]
        defaults = [f"{value} ({', '.join(group)})" for value, group in algorithms.items()]
        rows.append(
            f"| `{name}` | {'all' if len(users) == len(sections) else ', '.join(users)} | "
            f"{', '.join(defaults) if len(defaults) > 1 else next(iter(algorithms))} | {text} |"
        )
    return "\n".join(rows) + "\n"


def _table(section: type[Section]) -> str:
    rows = ["| key | default | what it does |", "| --- | --- | --- |"]
    for name, field in section.model_fields.items():
        rows.append(f"| `{name}` | {_default(field)} | {_describe(field)} |")
    return "\n".join(rows) + "\n"


def _describe(field: FieldInfo) -> str:
    return " ".join((field.description or "").split()).replace("|", "\\|")


def _default(field: FieldInfo) -> str:
    return "required" if field.is_required() else _format_default(field.get_default(call_default_factory=True))


def _format_default(value: object) -> str:
    plain = {None: "null", True: "true", False: "false"}
    if isinstance(value, tuple):
        value = list(value)
    if value is None or isinstance(value, bool):
        return f"`{plain[value]}`"
    return f"`{value}`"


def schemas_file() -> str:
    """The JSON Schemas of all sections of the configuration, which the run service reads without importing torch."""
    schemas = {name: section.model_json_schema() for name, section in configuration_sections().items()}
    # One line for each section: a change shows which one.
    lines = [f"{json.dumps(name)}: {json.dumps(schema, separators=(',', ':'))}" for name, schema in schemas.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def documented_metrics() -> dict[str, tuple[str, str, str]]:
    """Unit, meaning and advice of every metric in docs/metrics.md."""
    rows = (line.strip("| ").split(" | ") for line in (DOCS / "metrics.md").read_text(encoding="utf-8").splitlines())
    return {row[0].strip("`"): (row[1], row[2], row[3]) for row in rows if len(row) == 4 and row[0].startswith("`")}


def main() -> None:
    """Write every page."""
    benchmarks = DOCS / "benchmarks.md"
    benchmarks.write_text(benchmarks_page(benchmarks.read_text(encoding="utf-8")), encoding="utf-8")
    (DOCS / "configuration.md").write_text(configuration_page(), encoding="utf-8")
    SCHEMAS_FILE.write_text(schemas_file(), encoding="utf-8")


if __name__ == "__main__":
    main()
