"""Writes what comes from code or measurement: configuration keys, tables of benchmarks, and schemas."""

from __future__ import annotations

import json
import re
from pathlib import Path

from palaestra.cli.catalog import configuration_sections
from palaestra.config import Section
from palaestra.learner.registry import ALGORITHMS
from palaestra.runs.runners.palaestra import SCHEMAS_FILE
from palaestra.train.config import SECTIONS

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = Path(__file__).parent / "results"

INTRODUCTION = """# Configuration

A run is described by one YAML or JSON file (JSON may carry comments) with six sections. `env.id` is the only key that
has to be there; with `dataset.id`, the environment of the dataset is the default.

```yaml
env: {id: CartPole-v1, num_envs: 4}
algorithm: {name: ppo, learning_rate: 2.5e-4, n_epochs: 4, batch_size: 128}
trainer: {total_timesteps: 500_000, rollout_length: 128}
```

Any key can be set on the command line as well, after the file: `palaestra train FILE algorithm.learning_rate=1e-3
policy.hidden=[128,128]`. Values are read as YAML. `--seed N` is short for `trainer.seed=N`. Unknown keys are refused
with the nearest name; so is a `batch_size` that does not divide a rollout. What was understood is written to
`resolved.json` in the run directory before anything starts.

`algorithm: {name: ppo, cfg: {…}}` and `trainer: {buffer_size: …, iterations: …}` are accepted as other spellings of
`algorithm: {name: ppo, …}` and `trainer: {rollout_length: …, total_timesteps: …}`.

A run that cannot fit into the machine's memory (or its container's) is refused before its directory exists, with the
estimate and the limit: rollouts, shuffles, and seven numbers per trained weight.

Observations of type uint8 are pictures if they have three axes, or bounds 0 and 255 and two axes (grey, sides of at
least 8) or four (a stack of pictures, up to four channels each). Pictures are scaled to 0 … 1 and read by a
convolutional network; everything else is numbers for a multilayer perceptron. Pixels of another shape are refused.
Floats that look like a picture are numbers, and the run says so when it starts.

A package adds environments by an entry point that names a module to import, or a function to call, which registers
them with Gymnasium: `[project.entry-points."palaestra.environments"]`, `mazes = "my_package.mazes:register"`. They are
trained, played and listed like all others.

`palaestra schema NAME` prints the same as JSON Schema; this page is generated from it by `make docs`.
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
    """Every key of every section, as Markdown."""
    parts = [INTRODUCTION]
    titled = {name: SECTIONS[name] for name in ("env", "dataset", "policy")}
    titled |= {f"algorithm (name: {' or '.join(names)})": section for section, names in _algorithm_sections().items()}
    titled |= {name: SECTIONS[name] for name in ("trainer", "actors", "telemetry")}
    parts += [f"## {title}\n\n{_table(section)}" for title, section in titled.items()]
    return "\n".join(parts)


def _algorithm_sections() -> dict[type[Section], list[str]]:
    """The names of the algorithms for environments by their section; some share one."""
    sections: dict[type[Section], list[str]] = {}
    for name in [*ALGORITHMS["rollouts"], *ALGORITHMS["transitions"]]:
        sections.setdefault(SECTIONS[name], []).append(name)
    return sections


def _table(section: type[Section]) -> str:
    rows = ["| key | default | what it does |", "| --- | --- | --- |"]
    for name, field in section.model_fields.items():
        default = "required" if field.is_required() else _format_default(field.get_default(call_default_factory=True))
        text = " ".join((field.description or "").split()).replace("|", "\\|")
        rows.append(f"| `{name}` | {default} | {text} |")
    return "\n".join(rows) + "\n"


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
