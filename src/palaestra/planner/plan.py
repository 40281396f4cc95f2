"""`build_plan`: throughput, staleness, memory and cost of a run on given hardware, and what limits it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import Field

from palaestra.config import Section, parse_section
from palaestra.errors import ConfigError
from palaestra.planner.hardware import (
    Cost,
    Hardware,
    Placement,
    ScreenModel,
    learner_rate,
    place,
    price,
    sampler_rate,
    update_seconds,
)
from palaestra.planner.measurement import MeasuredRun, fit_times, read_setup
from palaestra.planner.memory import ModelPlan
from palaestra.planner.shapes import find_shape
from palaestra.planner.throughput import Setup, Throughput, Times, simulate

SCALE = ((8, None), (64, None), (512, None), (8, 10_000), (64, 10_000), (512, 10_000))
"""GPUs and sessions of the table; None: sessions in the same proportion to the GPUs as in the plan."""
MAX_PROPORTIONAL = 10_000
"""Sessions in the table, at most."""


class PlanConfig(Section):
    """Everything a plan depends on."""

    model: ModelPlan | None = Field(default_factory=ModelPlan)
    """The model on screens; null for vector environments, whose memory is small."""
    times: Times = Times()
    setup: Setup = Setup()
    hardware: Hardware = Hardware()


@dataclass(frozen=True)
class Plan:
    """The prediction for one configuration."""

    config: PlanConfig
    placement: Placement
    throughput: Throughput
    rates: dict[str, float]
    """Turns per second that sessions, samplers and learner could process, each alone."""
    bottleneck: str
    running_sessions: int
    """Sessions that play at once, within the staleness bound."""
    cost: Cost
    advice: tuple[str, ...]

    @property
    def updates_per_hour(self) -> float:
        """Updates per hour, without the time lost to failures."""
        return 3600 / self.throughput.update_seconds * (1 - self.config.hardware.lost_share)

    @property
    def episodes_per_hour(self) -> float:
        """Episodes learned from per hour, without the time lost to failures."""
        return self.updates_per_hour * self.config.setup.batch_size

    def facts(self) -> dict[str, Any]:
        """The plan as plain JSON."""
        p, setup = self.placement, self.config.setup
        memory = {
            name: None if plan is None else {"total": plan.total, "parts": plan.parts}
            for name, plan in (("learner", p.learner_memory), ("sampler", p.sampler_memory))
        }
        return {
            "bottleneck": self.bottleneck,
            "rates": self.rates,
            "throughput": {
                **asdict(self.throughput),
                "updates_per_hour": self.updates_per_hour,
                "episodes_per_hour": self.episodes_per_hour,
                "lost_share": self.config.hardware.lost_share,
            },
            "staleness": {
                "mean": self.throughput.staleness,
                "max": self.throughput.staleness_max,
                "bound": setup.max_staleness if setup.collection == "asynchronous" else 0,
                "running_sessions": self.running_sessions,
            },
            "memory": {**memory, "fitting_microbatch": p.fitting_microbatch, "session_gb": self.cost.session_memory_gb},
            "placement": {
                key: value for key, value in asdict(p).items() if key not in ("learner_memory", "sampler_memory")
            },
            "cost": asdict(self.cost),
            "advice": list(self.advice),
            "config": self.config.model_dump(mode="json"),
        }


def plan_config(data: Mapping[str, Any], runs: Sequence[MeasuredRun] = ()) -> PlanConfig:
    """The checked configuration of a plan, from its own keys, a training configuration, and measured runs.

    Measured times come first, then the keys of `data`. A training configuration is recognised by the section `env`, or
    by a section `model` beside `trainer`, `tasks` or `actor_pool`.
    """
    given = {key: value for key, value in data.items() if value is not None}
    own = set(PlanConfig.model_fields)
    plan: dict[str, Any] = {key: dict(given[key]) for key in own & given.keys() if isinstance(given[key], Mapping)}
    for key in own & given.keys() - plan.keys():
        plan[key] = given[key]
    if {"env", "trainer", "tasks", "actor_pool"} & given.keys():
        plan = _from_training(given, plan)
    elif unknown := given.keys() - own:
        parse_section(PlanConfig, {min(unknown): given[min(unknown)]})  # raises with the closest name
    if runs:
        known = parse_section(Times, plan.get("times", {}), place="times")
        given_variation = "session_variation" in plan.get("times", {})
        fitted = fit_times(runs, session_variation=known.session_variation if given_variation else 0.0)
        plan["times"] = fitted.model_dump() | plan.get("times", {})
        if "setup" not in plan:
            plan["setup"] = {}
        plan["setup"] = runs[-1].setup.model_dump() | plan["setup"]
        if not runs[-1].on_screens:
            plan["model"] = None
        elif "model" not in plan:
            plan["model"] = _model_keys(runs[-1].memory)
    elif "env" in given:
        plan["model"] = None
    return parse_section(PlanConfig, plan)


def _from_training(given: Mapping[str, Any], plan: dict[str, Any]) -> dict[str, Any]:
    sections: dict[str, Any] = {key: plan[key] for key in ("times", "setup", "hardware") if key in plan}
    setup = read_setup({key: value for key, value in given.items() if isinstance(value, Mapping)})
    sections["setup"] = setup.model_dump(exclude_unset=True) | sections.get("setup", {})
    if isinstance(given.get("model"), Mapping) and "env" not in given:
        sections["model"] = _model_keys(given["model"])
        turns = (given.get("trainer") or {}).get("microbatch_turns")
        if turns is not None:
            sections["model"].setdefault("microbatch_turns", turns)
    return sections


def _model_keys(model: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a training configuration's section `model` that a plan uses."""
    known = {key: value for key, value in model.items() if key in ModelPlan.model_fields and value is not None}
    if known.get("dtype") == "auto":
        del known["dtype"]
    return known


def build_plan(config: PlanConfig) -> Plan:
    """Predict a run; `ConfigError` if the model does not fit."""
    times, setup, hardware = config.times, config.setup, config.hardware
    model = None if config.model is None else ScreenModel(config.model, find_shape(config.model.name))
    placement = place(model, times, setup, hardware)
    limited = setup.model_copy(update={"max_batch": placement.sampler_batch})
    whole = times.update + times.update_episode * setup.batch_size * setup.rows
    seconds = update_seconds(placement, model, times, setup, hardware)
    alternate = placement.alternate and setup.collection == "asynchronous"
    throughput = simulate(
        times,
        limited,
        samplers=placement.samplers,
        learner_speed=whole / seconds if seconds > 0 else 1.0,
        shared_compute=1.0 if alternate else None,
    )
    running = min(setup.sessions, _max_in_flight(setup))
    turn = times.session_step + times.session_reset / times.turns + times.inference(setup.rows)
    rates = {
        "sessions": running / max(turn, 1e-9),
        "samplers": sampler_rate(placement, times, setup),
        "learner": learner_rate(placement, model, times, setup, hardware),
    }
    if alternate:  # one GPU does both
        rates["GPU"] = 1 / (1 / rates["samplers"] + 1 / rates["learner"])
    bottleneck = min(rates, key=rates.__getitem__)
    if setup.collection == "synchronous" and min(rates.values()) > 0.5 * max(rates.values()):
        bottleneck = "alternation"
    idle = max(throughput.learner_utilisation, throughput.session_utilisation) < 0.9
    if setup.collection == "asynchronous" and idle and throughput.turns_per_second < 0.9 * min(rates.values()):
        bottleneck = "staleness"  # no part is busy: episodes wait for permission to start
    cost = price(
        hardware,
        setup,
        turns_per_second=throughput.turns_per_second,
        update_seconds=throughput.update_seconds,
    )
    plan = Plan(config, placement, throughput, rates, bottleneck, running, cost, ())
    return replace(plan, advice=tuple(_advise(plan)))


def _max_in_flight(setup: Setup) -> int:
    """Episodes that may be in flight or waiting at once."""
    return setup.batch_size * (setup.max_staleness + 1 if setup.collection == "asynchronous" else 1)


def _advise(plan: Plan) -> list[str]:
    """What would make the run faster, most important first."""
    setup, hardware, rates = plan.config.setup, plan.config.hardware, plan.rates
    advice = []
    other = sorted(rates.values())[1]
    gain = min(other / max(rates[plan.bottleneck], 1e-9), 100.0) if plan.bottleneck in rates else 2.0
    if plan.running_sessions < setup.sessions:
        idle = setup.sessions - plan.running_sessions
        reason = "the staleness bound" if setup.collection == "asynchronous" else "the batch"
        size = -(-setup.sessions // (_max_in_flight(setup) // setup.batch_size))
        advice.append(
            f"{idle:,} of {setup.sessions:,} sessions never run: {reason} allows {plan.running_sessions:,} episodes at "
            f"once. Use trainer.batch_size={size} or fewer sessions."
        )
    if plan.bottleneck == "sessions":
        advice.append(
            f"Sessions are the limit: samplers and learner could process {gain:.1f} times as much. Use more sessions, "
            "or faster ones."
        )
    elif plan.bottleneck == "samplers":
        advice.append(
            f"Sampling is the limit: the rest could process {gain:.1f} times as much. Use more GPUs for samplers, a "
            "shorter model.history, or shorter replies."
        )
    elif plan.bottleneck == "learner":
        advice.append(
            f"Learning is the limit: the rest could process {gain:.1f} times as much. Use more GPUs for the learner, "
            "fewer trainer.epochs, or larger microbatches."
        )
    elif plan.bottleneck == "staleness":
        advice.append(
            "The staleness bound is the limit, and every part has time left: raise trainer.max_staleness or "
            "trainer.batch_size."
        )
    elif plan.bottleneck == "GPU":
        advice.append("One GPU samples and learns: a second one would let them overlap.")
    if setup.collection == "synchronous":
        advice.append("Playing and learning alternate: trainer.collection=asynchronous overlaps them.")
    if plan.throughput.dropped_share > 0.02:
        advice.append(
            f"{100 * plan.throughput.dropped_share:.0f} % of the episodes are too stale when they end: raise "
            "trainer.max_staleness or trainer.batch_size."
        )
    if plan.placement.fitting_microbatch and plan.config.model is not None:
        configured = plan.config.model.microbatch_turns
        if plan.placement.fitting_microbatch < configured:
            other_way = "" if plan.config.model.gradient_checkpointing else ", or model.gradient_checkpointing=true"
            fits = plan.placement.fitting_microbatch
            advice.append(
                f"Turns that fit into a forward pass: {fits} of {configured}. Set trainer.microbatch_turns={fits}"
                f"{other_way}."
            )
    if hardware.lost_share > 0.01:
        advice.append(
            f"Failures cost {100 * hardware.lost_share:.1f} % of the time: save checkpoints more often or restart "
            "faster."
        )
    return advice


def scale_plan(plan: Plan) -> list[Plan]:
    """The same run on 8, 64 and 512 GPUs, with sessions in proportion and with 10,000.

    Batches grow with the sessions, so that the staleness bound lets all of them run.
    """
    config = plan.config
    plans: dict[tuple[int, int], Plan] = {}
    for gpus, sessions in SCALE:
        count = sessions or min(MAX_PROPORTIONAL, max(1, round(config.setup.sessions * gpus / config.hardware.gpus)))
        batches = config.setup.max_staleness + 1 if config.setup.collection == "asynchronous" else 1
        size = config.setup.batch_size
        grown = max(size, -(-count // (batches * size)) * size)
        setup = config.setup.model_copy(update={"sessions": count, "batch_size": grown})
        hardware = config.hardware.model_copy(update={"gpus": gpus, "samplers": None})
        try:
            if (gpus, count) not in plans:
                plans[gpus, count] = build_plan(config.model_copy(update={"setup": setup, "hardware": hardware}))
        except ConfigError as error:
            if error.place != "hardware.gpu_memory_gb":
                raise
    return list(plans.values())
