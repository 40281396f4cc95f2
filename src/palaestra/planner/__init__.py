"""Plans of runs that do not exist yet: throughput, staleness, memory and cost, from measured times and model shapes.

`build_plan` predicts one configuration, `scale_plan` the same one on clusters, `read_run` measures a real run. Nothing
here loads a model or imports torch. docs/planning.md explains the numbers and compares them with real runs.
"""

from palaestra.planner.measurement import read_run
from palaestra.planner.memory import plan_learner_memory
from palaestra.planner.plan import Plan, PlanConfig, build_plan, plan_config, scale_plan
from palaestra.planner.throughput import Setup, Times, simulate

__all__ = [
    "Plan",
    "PlanConfig",
    "Setup",
    "Times",
    "build_plan",
    "plan_config",
    "plan_learner_memory",
    "read_run",
    "scale_plan",
    "simulate",
]
