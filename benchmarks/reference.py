"""Writes what comes from code or measurement: configuration keys, benchmarks, and the schemas of the configuration."""

from __future__ import annotations

import json
from pathlib import Path

from palaestra.cli.catalog import configuration_sections
from palaestra.config import Section
from palaestra.learner.registry import ALGORITHMS
from palaestra.runs.runners.palaestra import SCHEMAS_FILE
from palaestra.train.config import SECTIONS

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = Path(__file__).parent / "results"
ABLATION = ("<!-- ablation: begin -->", "<!-- ablation: end -->")

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


BENCHMARKS = """# Benchmarks

How fast and how well, with the method and the raw numbers. Figures are from one small machine that other work shared;
every size and time is noisy there, so trust the ratios. `make bench` measures the speed again beside the rivals, and
`python -m benchmarks.learning` the learning; this page is put together from `benchmarks/results/` by `make docs`.

## Speed

"""

LEARNING = """
### Beside the table

The figures were taken in two goes: CartPole with every rival, three rounds of 3 s; the other rows with SB3 alone, two
rounds of 4 s, so that "fastest rival" means SB3 there. Only the lane with one core is shown.

`palaestra --help` answers in 0.12 s. From the command to the end of the first update, kernels cached: 2.2 s. A
rollout of 2048 x 16 CartPole steps takes 0.97 to 1.11 times the bytes of its tensors in resident memory (SB3's: 1.29).

The image rows are bound by the convolutions themselves, which both sides leave to the same library; what ours gains
there is layout and the optimiser. With two cores free, actor and critic learn in two threads: the learning kernels by
themselves went from 220k to 339k steps/s that way, a whole run gained nothing measurable. Why is not known.

### Environments in several processes

`env.vectorization: workers` shares the copies out over processes, the training process among them. A process that
waits for another reads a counter in shared memory for up to 0.1 ms before it sleeps on a semaphore, and stops doing so
where it does not pay. Environment steps per second on an idle machine with two cores, blocks of 20 ms in turns: the
best block of each, and the ratio of the best and of the median blocks.

| environment | copies | one process | two processes | ratio, best | ratio, median |
| --- | ---: | ---: | ---: | ---: | ---: |
| LunarLander-v3 | 8 | 31,082 | 42,889 | 1.38 | 0.92 |
| LunarLander-v3 | 16 | 31,746 | 48,480 | 1.53 | 1.21 |
| LunarLander-v3 | 64 | 38,448 | 51,795 | 1.35 | 1.19 |
| HalfCheetah-v5 | 8 | 25,063 | 43,984 | 1.75 | 1.66 |
| HalfCheetah-v5 | 16 | 25,172 | 45,583 | 1.81 | 1.75 |
| HalfCheetah-v5 | 64 | 24,284 | 47,916 | 1.97 | 1.92 |
| CartPole-v1 | 8 | 155,254 | 155,915 | 1.00 | 0.58 |
| CartPole-v1 | 16 | 159,286 | 181,472 | 1.14 | 1.00 |
| CartPole-v1 | 64 | 160,122 | 220,051 | 1.37 | 1.29 |

LunarLander's steps differ in length, so the processes wait for the slower one; CartPole's are too short to share out in
small numbers. With other work on both cores there is nothing to gain: at a load of 10 the median ratio was 0.4 to 0.9.
Eight environments that wait 37 ms make 212 steps a second in eight processes and 27 in one.
`python -m benchmarks.workers` measures it again.

## Learning

At the published hyperparameters and budgets, where a published figure exists.

"""

CURVES = """
The thin lines are single seeds.

| | |
| --- | --- |
"""

TWO_CORES = """
## Two cores

Acting on one core while learning on the other, for small networks and fast environments:
`trainer: {collection: asynchronous, collector: process}`. `make bench-cores` measures it again.

"""

ENVPOOL = """
## Environments of EnvPool

`env.backend: envpool` steps environments in C++. Whole training, collection and updates together, beside the same
settings with the environments of Gymnasium in the process. `python -m benchmarks.envpool` measures it again.
HalfCheetah was measured twice, at different loads; both results are shown.

"""

BACKGROUND = """
## Collecting in the background

What `collection: asynchronous` gains in time, costs in learning, and survives. `make bench-async` takes the figures
again: `python -m benchmarks.overlap`, `benchmarks.staleness` and `benchmarks.soak`.

"""

OLDER = """
### Learning from older weights

"""

ENDURANCE = """
### Endurance

CartPole behind a policy that takes 3 ms per inference, while the collector's process is killed (SIGKILL) or frozen
(SIGSTOP) every 2 to 12 s, or the environments raise at one step in a thousand; `collector_restarts` without limit,
`step_timeout` 3 s. The environments count their steps in files of their own, which outlive a killed process. Learned,
dropped and unread must add up to that count, but for the step that a collector was in when it was struck. Also checked:
no step learned from twice (by stream and number), none staler than allowed, an update at least every 90 s, and memory,
file descriptors, threads and child processes as they were. `make test-slow` does two minutes of it. The first part
ran beside the other two, on a machine that other work kept busy too: the longest pauses are processes that take long to
start, killed again while they do, or frozen.

"""


FINE_TUNING = """
## A pretrained model, before and after

`SmallVLA` cloned from a trembling expert, then improved by PPO on TableReach: `configs/vla/table_reach.yaml` (50,000
steps) and `table_reach_chunk4.yaml` (four actions per inference). Share of 1,000 scenes solved greedily, the same
scenes before and after, none of them trained on; the interval before is Wilson's over scenes, the one after Student's
over five seeds. `python -m benchmarks.fine_tuning` measures it again.

"""


GATEWAY = """
## The gateway

What a request costs more through the gateway than straight to the session server. The difference is that of the two
distributions' quantiles. With several agents at once it depends much on what else the two cores do.

"""

KUBERNETES = """
## Sessions in a cluster

What a session costs that is a pod of its own, on the single node that `tests/kubernetes/node.py` brings up. See
[kubernetes](kubernetes.md). `python -m benchmarks.kubernetes` measures it again.

"""


SESSIONS = """
## UI sessions

How long it takes to open a session, from `POST /sessions` to the first screenshot, in a browser that is warm; and how
many acts with their screenshots come of two cores, beside a program that does the browser's share of an act over raw
CDP and nothing else. `python -m benchmarks.sessions` measures it again.

Milliseconds, sessions one after the other with 100 ms between two, the ways in turn. A page waits in reserve in every
browser, in an unused context, so that what is left of a reset is loading the task's page and drawing it.
Sessions that are opened without a pause, or several at once, make their contexts themselves.

One step is move, press and release, 507 ms of [page time](sessions.md#page-time), a PNG of 160 x 210 and the score. Raw
CDP is measured twice: with the picture taken at once, and with the same page time passing before it, which is what a
session must do and is therefore what it is compared with. *Strangers* is the share of the cores that others used
meanwhile. By the clock a contender is as fast as they leave it; processor time per step hardly depends on them, and on
full cores it is what decides.

The table is of one round of 3 s on an idle machine. With one agent, settling costs raw CDP 1.3 ms a step (4.1 to
5.4 ms). Sessions in process reach 86 to 97 % of settled raw CDP by the clock, and 60 to 76 % through the gateway. In a
second round, in which the machine was a third slower, settling cost 1.2 ms with one agent.

"""

FALLBACK = """
### Without drawing on demand

Debian's full `chromium`, which cannot be told when to draw, is what sessions fall back to. There an act waits 507 ms in
real time before its picture; the table was measured with pictures taken at once. One round, on a
machine that others kept busy; 16 agents through the gateway were not measured. Ours had a page in reserve here, which
draws all the time in such a browser: without it one agent in process needed 37 and 47 ms of processor a step instead of
83 and 139 (four turns of 2 s), so such browsers keep none.

"""

SESSION_SOAK = """
### Endurance of sessions

Through a real gateway with two session servers and one in reserve; every episode is a new session. Half of them are
rungs of `click_target`, half MiniWoB's `click-test` and `focus-text`, solved by a script; one in ten is given up on
purpose. Browsers that carry sessions are killed with SIGKILL, and so are their servers. `make soak` does it again.

"""


UI_LEARNING = """
## Learning on screens

The built-in tiny model (1.3 million weights) with LoRA of rank 16, on `click_target` (difficulty 2) and three MiniWoB++
tasks at once, one click an episode, in real browsers on two shared cores, two seeds each. Rejection sampling,
GRPO and PPO begin with the same weights and play the same 768 episodes: 12 updates of 64, 8 steps of 1e-3 falling to
1e-4 on each. Nothing is
played again in place of what an algorithm drops. Before and after on 160 held-out seeds per run, answers drawn at
temperature 1 as in training; per cent solved with the 95 % interval over all seeds' episodes.
`python -m benchmarks.ui_learning` does it again.

"""

UI_CURVES = """
![curves](images/ui-learning.png)

Every episode of training is on a seed that was never played, so the curves are of held-out success, too: mean of an
update and its two neighbours, thin lines single runs. Taking the likeliest answer instead of drawing one, the model
begins near the end of these curves on three of the four tasks: what is learned here is mostly to be sure of itself.
"""

UI_ASYNC = """
### Playing while learning

The same training in turn, and with episodes played by a sampler of its own while the learner learns: 12 updates of 64
episodes, one round, seconds from the first update to the last, an otherwise idle machine. The goal of 1.5x is missed,
and with browsers on the same two cores it cannot be met: 768 episodes at the 0.24 s of processor that a session was
measured to cost are 184 s in browsers alone, 92 s of both cores, so 1.2x is all there is to gain over 111 s. GRPO even
loses a little: its learning is cheap, and a sampler of its own competes for cores that were busy anyway (letting it
wait for fuller batches changed nothing). PPO, whose learning costs more, gains. With sessions on other machines both
would have the cores to themselves. `python -m benchmarks.ui_async` does it again.

"""

UI_INFERENCE = """
### Answers for sixteen actors

Sixteen questions about first screens of MiniWoB++ tasks, answered in one batch and one by one, by one thread; medians
of nine rounds in turn, by processor time. Actors of a group ask about the same screen, whose prompt then runs once.
Half of the time on sixteen different screens is the vision tower, which gains nothing from a batch: that lane misses
the goal of 4x. `python -m benchmarks.ui_inference` measures it again.

"""


def benchmarks_page() -> str:
    """Speed, learning and collecting in the background, from what was measured."""
    speed = (RESULTS / "speed.md").read_text() if (RESULTS / "speed.md").exists() else "Not measured yet.\n"
    parts = [BENCHMARKS, speed, LEARNING, (RESULTS / "learning.md").read_text(), CURVES]
    pictures = [f"![{path.stem}](images/{path.name})" for path in sorted((DOCS / "images").glob("learning_*.png"))]
    pictures += [""] * (len(pictures) % 2)
    parts += [f"| {left} | {right} |\n" for left, right in zip(pictures[::2], pictures[1::2], strict=True)]
    for heading, name in (
        (TWO_CORES, "two_cores"),
        (ENVPOOL, "envpool"),
        (BACKGROUND, "overlap"),
        (OLDER, "staleness"),
        (ENDURANCE, "soak"),
        (FINE_TUNING, "fine_tuning"),
        (UI_LEARNING, "ui_learning"),
        (UI_CURVES, ""),
        (UI_ASYNC, "ui_async"),
        (UI_INFERENCE, "ui_inference"),
        (GATEWAY, "gateway"),
        (SESSIONS, "sessions"),
        (FALLBACK, "sessions_chromium"),
        (SESSION_SOAK, "session_soak"),
        (KUBERNETES, "kubernetes"),
    ):
        measured = RESULTS / f"{name}.md"
        parts.append(heading)
        if name:
            parts.append(measured.read_text() if measured.exists() else "Not measured yet.\n")
    return "".join(parts)


def algorithms_page(page: str) -> str:
    """The page on algorithms with the measured ablation put in its place."""
    head, _, rest = page.partition(ABLATION[0])
    _, _, tail = rest.partition(ABLATION[1])
    found = (RESULTS / "ablation.md").read_text().strip()
    return f"{head}{ABLATION[0]}\n{found}\n\n{ABLATION[1]}{tail}"


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
    (DOCS / "benchmarks.md").write_text(benchmarks_page(), encoding="utf-8")
    algorithms = DOCS / "algorithms.md"
    if (RESULTS / "ablation.md").exists():
        algorithms.write_text(algorithms_page(algorithms.read_text(encoding="utf-8")), encoding="utf-8")
    (DOCS / "configuration.md").write_text(configuration_page(), encoding="utf-8")
    SCHEMAS_FILE.write_text(schemas_file(), encoding="utf-8")


if __name__ == "__main__":
    main()
