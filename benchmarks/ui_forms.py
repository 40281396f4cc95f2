"""From a pretrained model to forms: a warm start on demonstrations, then reinforcement, on the same held-out seeds.

`python -m benchmarks.ui_forms` takes configs/ui/forms.yaml, or another `--config`, through its stages: record
demonstrations of the tasks that have an oracle on training seeds, imitate them (the warm start; `--warm-start 0` leaves
it out), reinforce, with `--share` of demonstrations beside the episodes. The pretrained model, the warm start and
every reinforced model play the same held-out seeds, with sampled and with greedy actions. `--algorithms
grpo,rejection_sampling,ppo --seeds 1..3` compares algorithms from one warm start at equal episodes: every update plays
as many, and nothing is played again in place of groups without a signal. `--form` measures the last rung,
`data_entry/form`.

Each run is a separate process. Results are written to benchmarks/results/ui_<config>.json after each stage (`--name`
replaces the name of the configuration), and what is there is not measured again; runs stay in `--home`. `--report`
only draws the tables and curves. `--held-out` is the first held-out seed: settings are chosen on the seeds from 0,
and the figures of the docs are from others.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.machine import facts, load
from benchmarks.ui_forms_report import FORM_STAGES, WAYS, write_report
from benchmarks.ui_runs import (
    ALGORITHMS,
    evaluate_held_out,
    list_checkpoints,
    read_training_steps,
    run_palaestra,
    train_model,
    write_results,
)
from palaestra.config.file import read_config_file
from palaestra.experience.trajectory import Outcome
from palaestra.experience.trajectory_archive import TrajectoryArchive
from palaestra.files.run_directory import RunDirectory
from palaestra.sessions.suites import make_task

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
IMAGES = ROOT / "docs" / "images"
CONFIG = ROOT / "configs" / "ui" / "forms.yaml"
HOME = ROOT / "var" / "ui-forms"

DEMONSTRATIONS_PER_TASK = 8
WARM_START_BATCH, WARM_START_UPDATES = 64, 12
HELD_OUT = 200_000
"""The first held-out seed of the figures."""
UPDATES = 60
EPISODES_PER_TASK = 20
"""Held-out episodes per task in each evaluation."""

FORM_TASK = {"task": "data_entry/form"}
FORM_STEPS = 60
"""The step limit of the task. Three rows of three fields take 21 steps."""
FORM_DEMONSTRATIONS = 64
FORM_WARM_START = {"batch_size": 32, "num_training_steps": 12, "decay_updates": 12}
FORM_UPDATES = 20
FORM_EPISODES = 60
STAGES = ("demonstrations", "pretrained", "warm_start", "rl")


class Measurement:
    """Results of a configuration that are saved after each stage, and the directory of the runs."""

    def __init__(self, name: str, home: Path, settings: dict[str, float | str], ways: Sequence[str] = WAYS) -> None:
        self.home, self._file, self._ways = home.resolve(), results_file(name), ways
        self.home.mkdir(parents=True, exist_ok=True)
        self.results: dict = {"machine": facts(), "settings": settings, "stages": {}, "runs": [], "form": {}}
        if self._file.exists():
            self.results = json.loads(self._file.read_text())
        if self.results["settings"] != settings:
            raise SystemExit(
                f"{self._file} was measured with {self.results['settings']}, and this is {settings}. "
                "Use the same settings, or remove the file."
            )

    def save(self) -> None:
        """Write the results."""
        write_results(self._file, self.results)

    def relative(self, path: Path) -> str:
        """The path below the home."""
        return str(path.resolve().relative_to(self.home))

    def find(self, place: str) -> Path:
        """A directory that an earlier stage left."""
        if not (self.home / place).is_dir():
            reason = f"{self.home / place} is missing, and {self._file} refers to it."
            raise SystemExit(f"{reason} Give the --home of that measurement, or remove the file.")
        return self.home / place

    def record(self, config: dict, name: str, episodes: int) -> dict:
        """Record demonstrations on training seeds; returns how many were written by task, and their directory."""
        print(f"recording {episodes} demonstrations", flush=True)
        output, file = self.home / name, self.home / "config.json"
        # Recording adds to a directory, and an interrupted recording would leave too many.
        shutil.rmtree(output, ignore_errors=True)
        file.write_text(json.dumps(config))
        summary = run_palaestra(self.home, "demos", "record", file, "--episodes", episodes, "--output", output)
        return {"written": summary["written"], "dropped": summary["dropped"], "path": name}

    def evaluate(self, stage: dict, episodes: int) -> None:
        """Let the checkpoint of a stage play the held-out seeds."""
        for way in self._ways:
            if way not in stage:
                print(f"evaluating {stage['checkpoint']}, {way}", flush=True)
                first = self.results["settings"]["held_out"]
                checkpoint = self.find(stage["checkpoint"])
                document = evaluate_held_out(checkpoint, episodes, self.home, greedy=way == "greedy", seed=first)
                stage[way] = read_outcomes(Path(document["trajectories"]))
                stage[f"{way}_return"] = document["mean_return"]
                self.save()

    def train(self, config: dict, seed: int = 1, start: Path | None = None) -> RunDirectory:
        """Train in a separate process, from the weights of the checkpoint `start` if there is one."""
        print(f"training {config['algorithm']['name']}, seed {seed}", flush=True)
        return train_model(config, seed, self.home, start)

    def train_warm_start(self, config: dict, stages: dict, before: str, after: str, start: Path | None = None) -> None:
        """Imitate; adds the stages before and after. A run saves the model that it starts with."""
        first, *_, last = list_checkpoints(self.train(config, start=start))
        stages[before], stages[after] = ({"checkpoint": self.relative(one)} for one in (first, last))
        self.save()


def has_oracle(task: dict) -> bool:
    """Whether demonstrations of a task of a configuration can be recorded."""
    suite, _, name = task["task"].partition("/")
    return make_task(suite, name, 0, task.get("params", {})).oracle is not None


def results_file(name: str) -> Path:
    """The results of the configuration of this name."""
    return RESULTS / f"ui_{name}.json"


def read_outcomes(directory: Path) -> dict[str, str]:
    """By task, a character per held-out seed in order: 1 solved, 0 not solved, - the session failed."""
    outcomes: dict[str, str] = {}
    for entry in sorted(TrajectoryArchive(directory).entries(), key=lambda entry: (entry.task, entry.seed)):
        character = "-" if entry.outcome is Outcome.ENVIRONMENT_FAILED else "1" if entry.success else "0"
        outcomes[entry.task] = outcomes.get(entry.task, "") + character
    return outcomes


def read_curves(run: RunDirectory) -> dict[str, list[float | None]]:
    """By task, the share of its episodes that were solved in each update; None if it was not played."""
    steps = read_training_steps(run)
    keys = sorted({key for metrics in steps for key in metrics if key.startswith("success_rate/")})
    return {
        key.removeprefix("success_rate/").partition("[")[0]: [
            round(metrics[key], 3) if key in metrics else None for metrics in steps
        ]
        for key in keys
    }


def imitate(config: dict, demonstrations: Path, trainer: dict) -> dict:
    """The configuration of supervised learning from demonstrations."""
    return config | {
        "algorithm": {"name": "supervised"},
        "demonstrations": {"path": str(demonstrations)},
        "trainer": config["trainer"] | trainer,
    }


def reinforce(
    config: dict, algorithm: str, updates: int, demonstrations: Path | None = None, share: float = 0.0
) -> dict:
    """The configuration of reinforcement; the algorithm has the settings of the configuration if it is that one.

    Every update plays the same number of episodes; `share` of what it learns from are demonstrations.
    """
    own = config["algorithm"]
    length = {"num_training_steps": updates, "decay_updates": updates, "max_refills": 0}
    mixed = {"demonstrations": {"path": str(demonstrations), "share": share}} if share else {}
    return (
        config
        | mixed
        | {
            "algorithm": own if own["name"] == algorithm else ALGORITHMS[algorithm],
            "trainer": config["trainer"] | length,
            "trajectories_kept": 200,
        }
    )


def measure(m: Measurement, config: dict, until: str, algorithms: list[str], seeds: list[int]) -> None:
    """The stages up to `until`; of the reinforced models, seeds first, so that all algorithms have the same seeds."""
    stages, runs, settings = m.results["stages"], m.results["runs"], m.results["settings"]
    if settings["demonstrations"] and "demonstrations" not in stages:
        demonstrated = [task for task in config["tasks"] if has_oracle(task)]
        episodes = len(demonstrated) * settings["demonstrations"]
        stages["demonstrations"] = m.record(config | {"tasks": demonstrated}, "demos", episodes)
        m.save()
    if until == "demonstrations":
        return
    demonstrations = m.find(stages["demonstrations"]["path"]) if "demonstrations" in stages else None
    if settings["warm_start"] and "warm_start" not in stages:
        length = {"num_training_steps": settings["warm_start"], "decay_updates": settings["warm_start"]}
        assert demonstrations is not None
        rate = {"learning_rate": settings["warm_start_rate"]} if settings.get("warm_start_rate") else {}
        imitation = imitate(config, demonstrations, {"batch_size": WARM_START_BATCH, **length, **rate})
        m.train_warm_start(imitation, stages, "pretrained", "warm_start")
    for stage in ("pretrained", "warm_start"):
        if stage in stages:
            m.evaluate(stages[stage], settings["episodes"])
        if until == stage:
            return
    for seed, algorithm in ((seed, algorithm) for seed in seeds for algorithm in algorithms):
        run = next((run for run in runs if (run["algorithm"], run["seed"]) == (algorithm, seed)), None)
        if run is None:
            started = time.monotonic()
            start = m.find(stages["warm_start"]["checkpoint"]) if "warm_start" in stages else None
            share = settings["share_percent"] / 100
            trained = m.train(reinforce(config, algorithm, settings["updates"], demonstrations, share), seed, start)
            run = {"algorithm": algorithm, "seed": seed, "minutes": round((time.monotonic() - started) / 60, 1)}
            first, *_, last = list_checkpoints(trained)
            # Without a warm start, a run begins with the pretrained model.
            stages.setdefault("pretrained", {"checkpoint": m.relative(first)})
            run |= {"load": load(), "checkpoint": m.relative(last)}
            runs.append(run | {"curves": read_curves(trained)})
            run = runs[-1]
            m.save()
        m.evaluate(run, settings["episodes"])
    m.evaluate(stages["pretrained"], settings["episodes"])


def measure_form(m: Measurement, base: dict) -> None:
    """The last rung: sheets of ten rows, of which three are entered.

    Stages: the pretrained model, the model that learned the other forms, the same after demonstrations of this task,
    and after reinforcement on it.
    """
    if not m.results["runs"]:
        raise SystemExit("--form starts from a reinforced model: measure the stage rl first.")
    form = m.results["form"]
    config = base | {
        "tasks": [FORM_TASK],
        "sampler": {"name": "uniform"},
        "model": base["model"] | {"max_new_tokens": 64},
        "actor": base.get("actor", {}) | {"max_steps_per_episode": FORM_STEPS},
    }
    if "demonstrations" not in form:
        form["demonstrations"] = m.record(config, "form-demos", FORM_DEMONSTRATIONS)
        m.save()
    demonstrations = m.find(form["demonstrations"]["path"])
    if "pretrained" not in form:
        # One update, for a checkpoint of the pretrained model with the configuration of this task.
        run = m.train(imitate(config, demonstrations, {"batch_size": 1, "num_training_steps": 1}))
        form["pretrained"] = {"checkpoint": m.relative(list_checkpoints(run)[0])}
        m.save()
    if "warm_start" not in form:
        start = m.find(m.results["runs"][0]["checkpoint"])
        imitation = imitate(config, demonstrations, FORM_WARM_START)
        m.train_warm_start(imitation, form, "after_other_forms", "warm_start", start)
    if "grpo" not in form:
        start = m.find(form["warm_start"]["checkpoint"])
        run = m.train(reinforce(config, "grpo", FORM_UPDATES), start=start)
        form["grpo"] = {"checkpoint": m.relative(list_checkpoints(run)[-1])}
        m.save()
    for stage in FORM_STAGES:
        m.evaluate(form[stage], FORM_EPISODES)


def parse_seeds(text: str) -> list[int]:
    """Seeds from `1..3`, `1,2,5` or `4`."""
    first, dots, last = text.partition("..")
    return list(range(int(first), int(last) + 1)) if dots else [int(part) for part in text.split(",")]


def parse_algorithms(text: str) -> list[str]:
    """Names of algorithms, separated by commas."""
    names = text.split(",")
    if unknown := set(names) - set(ALGORITHMS):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: known are {', '.join(ALGORITHMS)}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=CONFIG, help="configuration of the tasks and of the training")
    parser.add_argument("--model", help="model directory in place of the configuration's model")
    parser.add_argument("--name", help="name of the results; default: the configuration's")
    parser.add_argument("--until", choices=STAGES, default="rl", help="last stage to measure")
    parser.add_argument("--algorithms", type=parse_algorithms, default=["grpo"])
    parser.add_argument("--seeds", type=parse_seeds, default=[1], help="1..3 or 1,2,5")
    parser.add_argument("--updates", type=int, default=UPDATES, help="updates of each reinforced model")
    parser.add_argument(
        "--demonstrations", type=int, default=DEMONSTRATIONS_PER_TASK, help="demonstrations per task; 0: none"
    )
    parser.add_argument("--warm-start", type=int, default=WARM_START_UPDATES, help="updates of the warm start; 0: none")
    parser.add_argument(
        "--warm-start-rate", type=float, help="learning rate of the warm start; default: the configuration's"
    )
    parser.add_argument("--share", type=int, default=0, help="per cent of demonstrations beside episodes")
    parser.add_argument("--episodes", type=int, default=EPISODES_PER_TASK, help="episodes per task in each evaluation")
    parser.add_argument("--held-out", type=int, default=HELD_OUT, help="first held-out seed")
    parser.add_argument("--sampled", action="store_true", help="evaluate with sampled actions only")
    parser.add_argument("--form", action="store_true", help="measure data_entry/form from the first reinforced model")
    parser.add_argument("--home", type=Path, default=HOME, help="directory of the runs")
    parser.add_argument("--report", action="store_true", help="only write the tables and the curves")
    asked = parser.parse_args()
    if (asked.warm_start or asked.share) and not asked.demonstrations:
        parser.error("--warm-start and --share need --demonstrations")
    name = asked.name or asked.config.stem
    if not asked.report:
        config = dict(read_config_file(asked.config))
        if asked.model:
            config["model"] = config["model"] | {"name": str(Path(asked.model).resolve())}
        settings = {
            "updates": asked.updates,
            "demonstrations": asked.demonstrations,
            "warm_start": asked.warm_start,
            "share_percent": asked.share,
            "episodes": asked.episodes * len(config["tasks"]),
            "held_out": asked.held_out,
        } | ({"warm_start_rate": asked.warm_start_rate} if asked.warm_start_rate else {})
        if asked.model:
            settings["model"] = Path(asked.model).name
        m = Measurement(name, asked.home / name, settings, WAYS[:1] if asked.sampled else WAYS)
        if asked.form:
            measure_form(m, config)
        else:
            measure(m, config, asked.until, asked.algorithms, asked.seeds)
    write_report(json.loads(results_file(name).read_text()), RESULTS / f"ui_{name}.md", IMAGES / f"ui-{name}.png")


if __name__ == "__main__":
    main()
