"""`palaestra plan`: predict throughput, staleness, memory and cost of a run before it is started."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from palaestra.cli.terminal import JsonOption, format_columns, print_json
from palaestra.errors import ConfigError

if TYPE_CHECKING:
    from palaestra.planner.memory import MemoryPlan
    from palaestra.planner.plan import Plan

_LIMITS = {
    "sessions": "the sessions: samplers and learner wait for them",
    "samplers": "sampling: sessions and learner wait for replies",
    "learner": "learning: sessions and samplers wait for updates",
    "staleness": "the staleness bound: episodes wait until updates allow them to start",
    "GPU": "the GPU, on which samplers and learner take turns",
    "alternation": "taking turns: playing and learning take about as long as each other, one after the other",
}


def plan_command(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CONFIG KEY=VALUE…",
            help="Training or plan configuration, then keys of the plan, such as times.session_step=0.4.",
            show_default=False,
        ),
    ] = None,
    measured: Annotated[
        list[str] | None,
        typer.Option(
            "--from", metavar="RUN", help="Take the times from this run; may be repeated.", show_default=False
        ),
    ] = None,
    gpus: Annotated[int | None, typer.Option(metavar="N", help="Same as hardware.gpus=N.")] = None,
    sessions: Annotated[int | None, typer.Option(metavar="N", help="Same as setup.sessions=N.")] = None,
    gpu_hour_price: Annotated[
        float | None, typer.Option(metavar="PRICE", help="Same as hardware.gpu_hour_price=PRICE.")
    ] = None,
    scale: Annotated[bool, typer.Option(help="Add a table for 8, 64 and 512 GPUs and 10,000 sessions.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Predict throughput, staleness, memory and cost of a run.

    Times are measured ones, from runs (--from) or given as keys; docs/planning.md lists them.
    """
    from palaestra.files.home import Home
    from palaestra.files.run_directory import RunDirectory
    from palaestra.planner.measurement import read_run
    from palaestra.planner.plan import build_plan, plan_config, scale_plan

    options = {"hardware.gpus": gpus, "setup.sessions": sessions, "hardware.gpu_hour_price": gpu_hour_price}
    data = _read_data(words or [], {key: value for key, value in options.items() if value is not None})
    root = Home.default().runs
    runs = [read_run(RunDirectory.find(name, root)) for name in measured or ()]
    if not data and not runs:
        remedy = "Try: palaestra plan --from RUN --gpus 8, or palaestra plan click_target"
        raise ConfigError("CONFIG", None, "nothing to plan was given", remedy)
    plan = build_plan(plan_config(data, runs))
    table = scale_plan(plan) if scale else []
    if as_json:
        print_json({**plan.facts(), "from": [run.run_id for run in runs], "scale": [one.facts() for one in table]})
        return
    print("\n".join(format_plan(plan)))
    if table:
        print("\n".join(["", "On clusters (batches grow with the sessions)", *format_scale(table)]))


def _read_data(words: list[str], options: dict[str, Any]) -> dict[str, Any]:
    """The configuration file, with overrides and options applied."""
    from palaestra.config.file import apply_overrides, set_value
    from palaestra.config.packaged import read_config

    name = words[0] if words and "=" not in words[0] else None
    assignments = words[1:] if name is not None else words
    invalid = next((word for word in assignments if "=" not in word), None)
    if invalid is not None:
        raise ConfigError("argument", invalid, "is not key=value", "Write for example times.session_step=0.4")
    data = apply_overrides({}, assignments) if name is None else read_config(name).apply_overrides(assignments)
    for key, value in options.items():
        set_value(data, key, value)
    return data


def format_plan(plan: Plan) -> list[str]:
    """The plan as lines of text, the bottleneck first."""
    config, t, p = plan.config, plan.throughput, plan.placement
    setup, hardware, cost = config.setup, config.hardware, plan.cost
    vector = config.model is None
    unit = "rollouts" if vector else "episodes"
    name = "vector environments" if config.model is None else config.model.name
    where = f"{hardware.gpus} GPU{'s' if hardware.gpus > 1 else ''}"
    lines = [
        f"{name}, {where}, {setup.sessions:,} sessions, {setup.batch_size} {unit} per update, {setup.collection}",
        "",
        f"Limited by {_LIMITS[plan.bottleneck]}.",
        "",
    ]
    rows = [
        ("Throughput", f"{plan.episodes_per_hour:,.0f} {unit}/h", f"{plan.updates_per_hour:,.1f} updates/h"),
        ("", f"{t.turns_per_second * setup.rows:,.1f} steps/s", f"{_seconds(t.update_seconds)} per update"),
        ("Busy", f"learner {_percent(t.learner_utilisation)}", f"samplers {_percent(t.sampler_utilisation)}"),
        ("", f"sessions {_percent(t.session_utilisation)}", f"{t.mean_batch:.1f} replies per batch"),
        ("Could process", f"sessions {plan.rates['sessions']:,.1f} steps/s", f"samplers {plan.rates['samplers']:,.1f}"),
        ("", f"learner {plan.rates['learner']:,.1f}", ""),
        ("Staleness", f"mean {t.staleness:.2f} updates", f"max {t.staleness_max} of {_bound_text(plan)}"),
        ("", f"dropped {_percent(t.dropped_share)}", f"retried {_percent(t.retried_share)}"),
        ("GPUs", *_placement_cells(plan)),
        ("Cost", f"{cost.per_hour:,.2f} per hour", f"{cost.session_cores:,} cores for sessions"),
        ("", f"{cost.per_1000_episodes:,.2f} per 1,000 {unit}", f"{cost.per_1000_updates:,.2f} per 1,000 updates"),
    ]
    lines += format_columns(rows)
    for title, memory in (("Learner memory per GPU", p.learner_memory), ("Sampler memory per GPU", p.sampler_memory)):
        if memory is not None:
            lines += ["", *_memory_lines(title, memory, hardware.gpu_memory_gb)]
    if config.model is not None:
        lines.append(f"  turns per forward pass: {p.microbatch} used, {p.fitting_microbatch} fit")
        lines.append(f"  sessions: {cost.session_memory_gb:,.0f} GB of main memory")
    if not config.times.model_fields_set:
        lines += ["", "All times are defaults, not measurements: give --from RUN, or keys such as times.turns=12."]
    if plan.advice:
        lines += ["", "To go faster", *(f"  - {text}" for text in plan.advice)]
    return lines


def _placement_cells(plan: Plan) -> tuple[str, str]:
    p = plan.placement
    if p.alternate:
        return f"{p.learner_gpus} sample and learn", "in turns"
    shards = f", split over {p.learner_shards}" if p.learner_shards > 1 else ""
    return f"{p.sampler_gpus} sample", f"{p.learner_gpus} learn{shards}"


def _bound_text(plan: Plan) -> str:
    setup = plan.config.setup
    return f"{setup.max_staleness} allowed" if setup.collection == "asynchronous" else "0 allowed"


def _memory_lines(title: str, memory: MemoryPlan, limit: float) -> list[str]:
    lines = [f"{title}: {memory.total / 1e9:.1f} of {limit:g} GB"]
    rows = [(f"  {part}", f"{size / 1e9:.2f}") for part, size in memory.parts.items()]
    return lines + format_columns(rows, (False, True))


def format_scale(plans: list[Plan]) -> list[str]:
    """One line per size of cluster."""
    head = ("GPUS", "SESSIONS", "BATCH", "SAMPLE+LEARN", "EPISODES/H", "UPDATES/H", "STALENESS", "PER 1,000", "LIMIT")
    rows: list[tuple[str, ...]] = [head]
    for plan in plans:
        setup, p = plan.config.setup, plan.placement
        split = "in turns" if p.alternate else f"{p.sampler_gpus}+{p.learner_gpus}"
        rows.append(
            (
                f"{plan.config.hardware.gpus}",
                f"{setup.sessions:,}",
                f"{setup.batch_size:,}",
                split,
                f"{plan.episodes_per_hour:,.0f}",
                f"{plan.updates_per_hour:,.1f}",
                f"{plan.throughput.staleness:.2f}",
                f"{plan.cost.per_1000_episodes:,.2f}",
                plan.bottleneck,
            )
        )
    return format_columns(rows, (True,) * 8)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
